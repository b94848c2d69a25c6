// What a call of the linear kernel is told.

#pragma once

#include <cstdint>

extern "C" {

// x, y and residual are all float32 or all bfloat16, dense in the last dimension. Null pointers
// stand for "none". With a gate, the panels of W alternate between gate and up, N counts the
// columns of either, and y = act(x · gateᵀ) · (x · upᵀ).
struct Linear {
  const void *x, *weight, *residual;  // [M, K], packed, [M, N] dense
  const float *bias;                  // [N]; none with a gate
  const float *norm;                  // [K] weight of the normalisation of x
  void* y;                            // [M, N], dense
  int64_t num_rows, x_row, inputs, outputs;  // M, stride of a row of x in elements, K, N
  float epsilon;
  int32_t norm_rounds_first;  // x / rms is rounded to x's type before it meets the weight
  int32_t gate;               // 0 none, 1 SiLU, 2 GELU (tanh)
  int32_t is_bfloat16, packed_as_bfloat16, num_threads;
};

}  // extern "C"

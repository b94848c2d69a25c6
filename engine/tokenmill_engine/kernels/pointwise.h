// What transformers compute between their products, value by value or row by row.

#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace tokenmill {

// What a value becomes when the model keeps it in its own type.
template <class X>
inline float rounded(float x) {
  X kept;
  from_float(x, &kept);
  return to_float(kept);
}
template <>
inline float rounded<float>(float x) { return x; }

// A whole vector rounded as from_float() does.
inline vfloat in_bfloat16(vfloat x) {
  const vuint bits = (vuint)x;
  const vint kept = (vint)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
  return choose(x == x, (vfloat)kept, (vfloat)(vint{} + 0x7fc00000));
}

// x · sigmoid(s): SiLU (kind 1) for s = x, and the tanh form of GELU (kind 2) for the s below.
inline vfloat activate(vfloat x, int32_t kind) {
  vfloat s = x;
  if (kind == 2) s = 1.5957691216057308f * (x + 0.044715f * (x * x * x));
  const vfloat minus = -s;
  return x / (1.0f + exponential(choose(minus > 88.0f, all(88.0f), minus)));
}

// RMS normalisation; `rounds_first`: the quotient is rounded to X before it meets the weight.
struct Norm {
  const float* weight;
  float epsilon;
  int32_t rounds_first;
};

// X may be out's own type, and x and out the same.
template <class X, class Y>
void normalise(const X* x, int64_t size, const Norm& norm, Y* out) {
  vfloat squares{};
  float rest = 0.0f;
  int64_t k = 0;
  for (; k + W <= size; k += W) {
    const vfloat part = load(x + k);
    squares += part * part;
  }
  for (; k < size; k++) rest += to_float(x[k]) * to_float(x[k]);
  const float scale = 1.0f / std::sqrt((sum_of(squares) + rest) / float(size) + norm.epsilon);
  for (k = 0; k < size; k++) {
    const float plain = to_float(x[k]) * scale;
    from_float(rounded<X>((norm.rounds_first ? rounded<X>(plain) : plain) * norm.weight[k]),
               out + k);
  }
}

// Rotary embedding in place, as a model of type T computes it: x[d] and x[d + size / 2] are a pair.
template <class T>
void rotate(const T* __restrict cos, const T* __restrict sin, int64_t size, float* __restrict x) {
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; d++) {
    const float a = x[d], b = x[d + half];
    x[d] = rounded<T>(rounded<T>(a * to_float(cos[d])) - rounded<T>(b * to_float(sin[d])));
    x[d + half] = rounded<T>(rounded<T>(b * to_float(cos[d + half]))
                             + rounded<T>(a * to_float(sin[d + half])));
  }
}

}  // namespace tokenmill

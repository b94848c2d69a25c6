// What transformers compute between their products, value by value or row by row.

#pragma once

#include <cmath>
#include <cstdint>

#include "exponential.h"
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
template <class X>
inline vfloat rounded(vfloat x) { return sizeof(X) == sizeof(float) ? x : in_bfloat16(x); }

// x · sigmoid(s) of a model of type X: SiLU (kind 1) for s = x, and the tanh form of GELU (kind 2) for the s below.
template <class X>
vfloat activate(vfloat x, int32_t kind) {
  vfloat s = x;
  if (kind == 2) s = 1.5957691216057308f * (x + 0.044715f * (x * x * x));
  const vfloat minus = -s;
  const vfloat divisor = 1.0f + exponential(choose(minus > 88.0f, all(88.0f), minus));
  return sizeof(X) == sizeof(float) ? x / divisor : x * reciprocal(divisor);
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
  for (k = 0; k + W <= size; k += W) {
    vfloat plain = load(x + k) * scale;
    if (norm.rounds_first) plain = rounded<X>(plain);
    const vfloat result = plain * load(norm.weight + k);
    store(out + k, sizeof(X) == sizeof(Y) ? result : rounded<X>(result));
  }
  for (; k < size; k++) {
    const float plain = to_float(x[k]) * scale;
    from_float(rounded<X>((norm.rounds_first ? rounded<X>(plain) : plain) * norm.weight[k]),
               out + k);
  }
}

// Rotary embedding in place, as a model of type T computes it: x[d] and x[d + size / 2] are a pair.
template <class T>
void rotate(const T* __restrict cos, const T* __restrict sin, int64_t size, float* __restrict x) {
  const int64_t half = size / 2;
  int64_t d = 0;
  for (; d + W <= half; d += W) {
    const vfloat a = load(x + d), b = load(x + d + half);
    store(x + d, rounded<T>(rounded<T>(a * load(cos + d)) - rounded<T>(b * load(sin + d))));
    store(x + d + half, rounded<T>(rounded<T>(b * load(cos + d + half))
                                   + rounded<T>(a * load(sin + d + half))));
  }
  for (; d < half; d++) {
    const float a = x[d], b = x[d + half];
    x[d] = rounded<T>(rounded<T>(a * to_float(cos[d])) - rounded<T>(b * to_float(sin[d])));
    x[d + half] = rounded<T>(rounded<T>(b * to_float(cos[d + half]))
                             + rounded<T>(a * to_float(sin[d + half])));
  }
}

}  // namespace tokenmill

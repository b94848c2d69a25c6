// The order of a packed weight in memory: panels of PANEL output columns, back to back.
//
// In float32 a panel is [k, column]. In bfloat16 two adjacent k share a 32-bit word, the even one
// in its lower half: a panel is [k / 2, column, k % 2]. An odd last k is followed by zeros, and so are the columns
// of the last panel.

#pragma once

#include <cstdint>

#include "vectors.h"

namespace tokenmill {

constexpr int PANEL = 2 * W;

inline int64_t ceil_div(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
inline int64_t even(int64_t n) { return n + n % 2; }

// Where W[n, k] is in the panels of a packed weight of type T.
template <class T>
int64_t place(int64_t n, int64_t k, int64_t inputs, int64_t first, int64_t step) {
  const int64_t panel = first + n / PANEL * step, column = n % PANEL;
  const int64_t start = panel * even(inputs) * PANEL;
  if (sizeof(T) == sizeof(float)) return start + k * PANEL + column;
  return start + k / 2 * 2 * PANEL + column * 2 + k % 2;
}

struct Packing { int64_t outputs, inputs, first, step; };

template <class T>
void pack(const float* weight, const Packing& p, T* packed) {
  for (int64_t n = 0; n < ceil_div(p.outputs, PANEL) * PANEL; n++)
    for (int64_t k = 0; k < even(p.inputs); k++)
      from_float(n < p.outputs && k < p.inputs ? weight[n * p.inputs + k] : 0.0f,
                 packed + place<T>(n, k, p.inputs, p.first, p.step));
}

template <class T>
void unpack(const T* packed, const Packing& p, float* weight) {
  for (int64_t n = 0; n < p.outputs; n++)
    for (int64_t k = 0; k < p.inputs; k++)
      weight[n * p.inputs + k] = to_float(packed[place<T>(n, k, p.inputs, p.first, p.step)]);
}

}  // namespace tokenmill

// The order of a packed weight in memory: panels of PANEL output columns, back to back.
//
// In float32 a panel is [k, column]. In bfloat16 two adjacent k share a 32-bit word, the even one
// in its lower half: a panel is [k / 2, column, k % 2]. Zeros fill K up to a multiple of DEPTH, and the columns of
// the last panel.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define TOKENMILL_TILES
#endif

namespace tokenmill {

constexpr int PANEL = 2 * W;
#if defined(TOKENMILL_TILES)
constexpr int64_t DEPTH = 32;  // k of a tile, see tiles.h
#else
constexpr int64_t DEPTH = 2;
#endif

inline int64_t ceil_div(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
inline int64_t even(int64_t n) { return n + n % 2; }
inline int64_t padded(int64_t inputs) { return ceil_div(inputs, DEPTH) * DEPTH; }

// Where W[n, k] is in the panels of a packed weight of type T.
template <class T>
int64_t place(int64_t n, int64_t k, int64_t inputs, int64_t first, int64_t step) {
  const int64_t panel = first + n / PANEL * step, column = n % PANEL;
  const int64_t start = panel * padded(inputs) * PANEL;
  if (sizeof(T) == sizeof(float)) return start + k * PANEL + column;
  return start + k / 2 * 2 * PANEL + column * 2 + k % 2;
}

struct Packing { int64_t outputs, inputs, first, step; };

// One panel's numbers in their order, wherever the panel is.
template <class T>
void pack_panel(const float* weight, const Packing& p, int64_t panel, T* out) {
  constexpr int64_t GROUP = sizeof(T) == sizeof(float) ? 1 : 2;
  for (int64_t first = 0; first < padded(p.inputs); first += GROUP)
    for (int64_t n = panel * PANEL; n < (panel + 1) * PANEL; n++)
      for (int64_t k = first; k < first + GROUP; k++)
        from_float(n < p.outputs && k < p.inputs ? weight[n * p.inputs + k] : 0.0f, out++);
}

template <class T>
void pack(const float* weight, const Packing& p, T* packed, int threads) {
  const int64_t panels = ceil_div(p.outputs, PANEL);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t panel = 0; panel < panels; panel++)
    pack_panel(weight, p, panel, packed + (p.first + panel * p.step) * padded(p.inputs) * PANEL);
}

// Whether bfloat16 holds all of `count` numbers exactly.
inline bool fits_bfloat16(const float* numbers, int64_t count, int threads) {
  constexpr int64_t PIECE = 1 << 14;
  const int64_t pieces = ceil_div(count, PIECE);
  uint32_t lost = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : lost)
  for (int64_t piece = 0; piece < pieces; piece++) {
    if (lost) continue;
    for (int64_t i = piece * PIECE; i < std::min(count, (piece + 1) * PIECE); i++) {
      uint32_t bits;
      std::memcpy(&bits, numbers + i, sizeof bits);
      lost |= bits & 0xFFFF;
    }
  }
  return !lost;
}

template <class T>
void unpack(const T* packed, const Packing& p, float* weight) {
  for (int64_t n = 0; n < p.outputs; n++)
    for (int64_t k = 0; k < p.inputs; k++)
      weight[n * p.inputs + k] = to_float(packed[place<T>(n, k, p.inputs, p.first, p.step)]);
}

}  // namespace tokenmill

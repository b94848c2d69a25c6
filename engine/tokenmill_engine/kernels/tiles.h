// Products of bfloat16 by the processor's own matrix unit (Intel AMX): up to 16 rows of x by 16 columns of
// W are summed up in a tile register.
//
// A tile of W is 16 pairs of k by 16 columns, as they lie in a panel (see packing.h); a tile of x is
// read from its rows, 32 k of each. Four sums are under way at once: two row tiles by one panel, or one by
// two. A row's sums run over K in the same order in either, and in a tile of any height.

#pragma once

#include "packing.h"

#if defined(TOKENMILL_TILES)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace tokenmill {

constexpr int64_t TILE_ROWS = 16, TILE_COLUMNS = 16, TILE_PAIRS = 16;
constexpr int64_t PANEL_ROW_BYTES = PANEL * sizeof(int32_t);  // a pair of k for each column
constexpr int64_t PANEL_STEP = 2 * TILE_PAIRS * PANEL;        // numbers of a panel from tile to tile
static_assert(PANEL == 2 * TILE_COLUMNS && DEPTH == 2 * TILE_PAIRS);

// Linux saves tiles only for processes that have asked for it, once and for all their threads.
inline bool tiles_permitted() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of <asm/prctl.h>
  static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return permitted;
}

// The compiler does not know that these instructions read memory, and which.
inline void memory_is_read(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// The tile registers of this thread, while it lives: 4 is the upper row tile of x and 5 the lower one,
// 6 and 7 are of W, 0 and 1 the upper sums, 2 and 3 the lower ones. Others, such as oneDNN, configure
// them too: nobody may rely on what was left behind.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() { if (upper_) _tile_release(); }

  // Heights in rows. What the registers held is lost if they change.
  void shape(int64_t upper, int64_t lower) {
    if (upper == upper_ && lower == lower_) return;
    upper_ = upper, lower_ = lower;
    struct alignas(64) Shapes {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      const bool is_upper = tile == 0 || tile == 1 || tile == 4;
      shapes.row_bytes[tile] = LINE_BYTES;
      shapes.rows[tile] = uint8_t(tile >= 6 ? TILE_PAIRS : is_upper ? upper : lower);
    }
    memory_is_read(&shapes);
    _tile_loadconfig(&shapes);
  }

 private:
  int64_t upper_ = 0, lower_ = 0;
};

// y += x · W, or y = x · W, in two row tiles by one panel (ROWS = 2), one by two (PANELS = 2) or one by one.
// `panel(step, p)` is where the tiles of panel p for 32 more k lie. `beside()` is done once for each panel and
// step: vectors and memory are free while the matrix unit computes.
template <int ROWS, int PANELS, class Panel, class Beside>
inline void tile_block(Matrix<const bfloat16> x, int64_t steps, const Panel& panel, Matrix<float> y,
                       bool adds, const Beside& beside) {
  const int64_t x_bytes = x.row * int64_t(sizeof(bfloat16)), y_bytes = y.row * int64_t(sizeof(float));
  const bfloat16 *upper = x.at, *lower = x.at + TILE_ROWS * x.row;
  float* second = y.at + (ROWS == 2 ? TILE_ROWS * y.row : PANEL);
  if (adds) {
    _tile_loadd(0, y.at, y_bytes);
    _tile_loadd(1, y.at + TILE_COLUMNS, y_bytes);
    if (ROWS * PANELS == 2) {
      _tile_loadd(2, second, y_bytes);
      _tile_loadd(3, second + TILE_COLUMNS, y_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (ROWS * PANELS == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t step = 0; step < steps; step++, upper += DEPTH, lower += DEPTH) {
    const bfloat16* weight = panel(step, 0);
    _tile_loadd(6, weight, PANEL_ROW_BYTES);
    _tile_loadd(4, upper, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + 2 * TILE_COLUMNS, PANEL_ROW_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    if (ROWS == 2) {
      _tile_loadd(5, lower, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    if (PANELS == 2) {
      beside();
      weight = panel(step, 1);
      _tile_loadd(6, weight, PANEL_ROW_BYTES);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, weight + 2 * TILE_COLUMNS, PANEL_ROW_BYTES);
      _tile_dpbf16ps(3, 4, 7);
    }
    beside();
  }
  _tile_stored(0, y.at, y_bytes);
  _tile_stored(1, y.at + TILE_COLUMNS, y_bytes);
  if (ROWS * PANELS == 2) {
    _tile_stored(2, second, y_bytes);
    _tile_stored(3, second + TILE_COLUMNS, y_bytes);
  }
}

// How often `tile_products` does what it is given to do beside.
inline int64_t calls_beside(int64_t rows, int64_t steps, int64_t panels) {
  return (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS) * steps * panels;
}

// y [rows, panels · PANEL] of any number of rows.
template <class Panel, class Beside>
inline void tile_products(TileRegisters& registers, Matrix<const bfloat16> x, int64_t rows,
                          int64_t steps, const Panel& panel, int64_t panels, Matrix<float> y,
                          bool adds, const Beside& beside) {
  memory_is_read(y.at);
  for (; rows > TILE_ROWS; rows -= 2 * TILE_ROWS) {
    registers.shape(TILE_ROWS, std::min(rows - TILE_ROWS, TILE_ROWS));
    for (int64_t p = 0; p < panels; p++)
      tile_block<2, 1>(x, steps, [&](int64_t step, int64_t) { return panel(step, p); },
                       {y.at + p * PANEL, y.row}, adds, beside);
    x.at += 2 * TILE_ROWS * x.row, y.at += 2 * TILE_ROWS * y.row;
  }
  if (rows <= 0) return;
  registers.shape(rows, rows);
  for (int64_t p = 0; p < panels; p += 2) {
    const auto from = [&](int64_t step, int64_t q) { return panel(step, p + q); };
    const Matrix<float> out{y.at + p * PANEL, y.row};
    if (p + 1 < panels) tile_block<1, 2>(x, steps, from, out, adds, beside);
    else tile_block<1, 1>(x, steps, from, out, adds, beside);
  }
}

}  // namespace tokenmill

#endif

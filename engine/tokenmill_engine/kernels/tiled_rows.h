// How `Product` computes by tiles (tiles.h).

#pragma once

#include "tiles.h"

#if defined(TOKENMILL_TILES)

#include <algorithm>
#include <cstdint>

#include "blocks.h"

namespace tokenmill {

constexpr int64_t TILED_BLOCK_NUMBERS = 512 * 1024;  // of x in a row block: half of an L2 cache of 2 MiB
constexpr int64_t MOST_TILED_ROWS = 256;
constexpr int64_t ALIASING = 512;  // numbers; rows that are multiples of this apart share few cache sets

class TiledRows {
 public:
  using Number = bfloat16;
  static constexpr bool HAS_BESIDE = true;
  struct InThread {
    explicit InThread(const TiledRows&) {}
    TileRegisters registers;
  };

  TiledRows(int64_t rows, int64_t inputs) : rows_(rows), depth_(padded(inputs)), inputs_(inputs) {}

  // Whether rows of x can be multiplied where they are, some numbers apart.
  bool takes(int64_t x_row) const {
    return inputs_ == depth_ && (rows_ == 1 || x_row % ALIASING != 0);
  }
  int64_t row_size() const { return depth_ % ALIASING == 0 ? depth_ + DEPTH : depth_; }
  int64_t block_rows() const {
    const int64_t most = std::clamp(TILED_BLOCK_NUMBERS / depth_, rows_at_once(), MOST_TILED_ROWS);
    const int64_t even = ceil_div(rows_, ceil_div(rows_, most));
    return ceil_div(even, rows_at_once()) * rows_at_once();
  }
  int64_t pass_rows(int64_t threads) const { return block_rows() * threads; }
  int64_t rows_at_once() const { return 2 * TILE_ROWS; }  // their sums stay in the L1 cache
  // Wide tasks write more of a row at once, and narrow ones let threads end together. One row tile is multiplied
  // by two panels at once, and many rows are read again for each task: one panel alone is for a few row tiles.
  int64_t task_panels(int64_t panels, int64_t threads) const {
    constexpr int64_t TASKS = 16;  // of a thread, at least, if they are wide
    if (panels >= 2 * PANELS_PER_TASK * TASKS * threads) return 2 * PANELS_PER_TASK;
    const bool is_narrow = TILE_ROWS < rows_ && rows_ <= 2 * rows_at_once();
    return is_narrow && panels < PANELS_PER_TASK * TASKS * threads ? 1 : PANELS_PER_TASK;
  }
  int64_t calls_beside(int64_t rows, int64_t panels) const {
    return tokenmill::calls_beside(rows, depth_ / DEPTH, panels);
  }

  template <class Beside>
  void multiply(InThread& thread, Matrix<const bfloat16> x, int64_t rows, const bfloat16* weight,
                int64_t panels, Matrix<float> y, bool adds, const Beside& beside) const {
    const int64_t panel_size = depth_ * PANEL;
    tile_products(thread.registers, x, rows, depth_ / DEPTH,
                  [&](int64_t step, int64_t p) { return weight + p * panel_size + step * PANEL_STEP; },
                  panels, y, adds, beside);
  }

 private:
  const int64_t rows_, depth_, inputs_;
};

}  // namespace tokenmill

#endif

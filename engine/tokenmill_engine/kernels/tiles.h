// Products of bfloat16 by the processor's own matrix unit (Intel AMX): 16 rows of x by 16 columns of W
// are summed up in a tile register, over the whole of K.
//
// A tile of W is 16 pairs of k by 16 columns, as they lie in a panel (see packing.h). x is prepared as
// tiles of bfloat16 whose K is padded with zeros: as few as can be, of one height, the last one padded
// with rows of zeros; the tiles of a row tile lie back to back. Four sums are under way at
// once: two row tiles by one panel, or one by two. A row's sums run over K in the same order in either,
// and in a tile of any height.

#pragma once

#include "blocks.h"
#include "kept.h"
#include "packing.h"

#if defined(TOKENMILL_TILES)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tokenmill {

constexpr int64_t TILE_ROWS = 16, TILE_COLUMNS = 16, TILE_PAIRS = 16;
constexpr int64_t TILE_ROW_BYTES = 64;
constexpr int64_t PANEL_ROW_BYTES = PANEL * sizeof(int32_t);  // a pair of k for each column
constexpr int64_t PANEL_STEP = 2 * TILE_PAIRS * PANEL;        // numbers of a panel from tile to tile
constexpr int64_t BLOCK_TILE_NUMBERS = 512 * 1024;  // of x in a row block: half of an L2 cache of 2 MiB
constexpr int64_t MOST_BLOCK_TILES = 16;
static_assert(PANEL == 2 * TILE_COLUMNS && DEPTH == 2 * TILE_PAIRS);

// Linux saves tiles only for processes that have asked for it, once and for all their threads.
inline bool tiles_permitted() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of <asm/prctl.h>
  static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return permitted;
}

// The compiler does not know that these instructions read memory, and which.
inline void memory_is_read(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// The tile registers of this thread, while it lives: 0 to 3 are sums, 4 and 5 of x, 6 and 7 of W.
// Others, such as oneDNN, configure them too: nobody may rely on what was left behind.
class TileRegisters {
 public:
  explicit TileRegisters(int64_t height) {
    struct alignas(64) Shapes {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      shapes.row_bytes[tile] = TILE_ROW_BYTES;
      shapes.rows[tile] = uint8_t(tile < 6 ? height : TILE_PAIRS);
    }
    memory_is_read(&shapes);
    _tile_loadconfig(&shapes);
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() { _tile_release(); }
};

// x in tiles: `count` row tiles of `height` rows each.
struct RowTiles {
  int64_t count, height, depth;

  RowTiles(int64_t rows, int64_t inputs)
      : count(ceil_div(rows, TILE_ROWS)), height(ceil_div(rows, count)), depth(padded(inputs)) {}

  int64_t size() const { return height * depth; }  // numbers in a row tile
};

// y [2 · height, PANEL] += two row tiles · one panel.
inline void two_row_tiles(const bfloat16* x, const RowTiles& tiles, const bfloat16* panel, float* y,
                          int64_t y_row) {
  const int64_t y_bytes = y_row * int64_t(sizeof(float)), step = tiles.height * DEPTH;
  const bfloat16* next = x + tiles.size();
  float* below = y + tiles.height * y_row;
  _tile_loadd(0, y, y_bytes);
  _tile_loadd(1, y + TILE_COLUMNS, y_bytes);
  _tile_loadd(2, below, y_bytes);
  _tile_loadd(3, below + TILE_COLUMNS, y_bytes);
  for (int64_t k = 0; k < tiles.depth; k += DEPTH) {
    _tile_loadd(6, panel, PANEL_ROW_BYTES);
    _tile_loadd(4, x, TILE_ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 2 * TILE_COLUMNS, PANEL_ROW_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, next, TILE_ROW_BYTES);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    x += step, next += step, panel += PANEL_STEP;
  }
  _tile_stored(0, y, y_bytes);
  _tile_stored(1, y + TILE_COLUMNS, y_bytes);
  _tile_stored(2, below, y_bytes);
  _tile_stored(3, below + TILE_COLUMNS, y_bytes);
}

// y [height, PANELS · PANEL] += one row tile · one panel or two.
template <int PANELS>
void one_row_tile(const bfloat16* x, const RowTiles& tiles, const bfloat16* panel, float* y,
                  int64_t y_row) {
  const int64_t y_bytes = y_row * int64_t(sizeof(float)), step = tiles.height * DEPTH;
  const bfloat16* second = panel + tiles.depth * PANEL;
  float* right = y + PANEL;
  _tile_loadd(0, y, y_bytes);
  _tile_loadd(1, y + TILE_COLUMNS, y_bytes);
  if (PANELS == 2) {
    _tile_loadd(2, right, y_bytes);
    _tile_loadd(3, right + TILE_COLUMNS, y_bytes);
  }
  for (int64_t k = 0; k < tiles.depth; k += DEPTH) {
    _tile_loadd(4, x, TILE_ROW_BYTES);
    _tile_loadd(6, panel, PANEL_ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 2 * TILE_COLUMNS, PANEL_ROW_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    if (PANELS == 2) {
      _tile_loadd(6, second, PANEL_ROW_BYTES);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, second + 2 * TILE_COLUMNS, PANEL_ROW_BYTES);
      _tile_dpbf16ps(3, 4, 7);
    }
    x += step, panel += PANEL_STEP, second += PANEL_STEP;
  }
  _tile_stored(0, y, y_bytes);
  _tile_stored(1, y + TILE_COLUMNS, y_bytes);
  if (PANELS == 2) {
    _tile_stored(2, right, y_bytes);
    _tile_stored(3, right + TILE_COLUMNS, y_bytes);
  }
}

// y [count · height, panels · PANEL] += `count` row tiles · adjacent panels.
inline void tile_products(const bfloat16* x, int64_t count, const RowTiles& tiles,
                          const bfloat16* weight, int64_t panels, float* y, int64_t y_row) {
  const int64_t panel_size = tiles.depth * PANEL;
  memory_is_read(y);
  for (; count >= 2; count -= 2) {
    for (int64_t p = 0; p < panels; p++)
      two_row_tiles(x, tiles, weight + p * panel_size, y + p * PANEL, y_row);
    x += 2 * tiles.size(), y += 2 * tiles.height * y_row;
  }
  for (int64_t p = 0; count && p < panels; p += 2) {
    const bfloat16* panel = weight + p * panel_size;
    if (p + 1 < panels) one_row_tile<2>(x, tiles, panel, y + p * PANEL, y_row);
    else one_row_tile<1>(x, tiles, panel, y + p * PANEL, y_row);
  }
}

// How `Product` computes by tiles.
class Tiles {
 public:
  using Number = bfloat16;
  struct InThread : TileRegisters {
    explicit InThread(const Tiles& method) : TileRegisters(method.tiles_.height) {}
  };

  Tiles(int64_t rows, int64_t inputs) : tiles_(rows, inputs) {}

  int64_t units() const { return tiles_.count; }
  int64_t unit_rows() const { return tiles_.height; }
  int64_t row_size() const { return tiles_.depth; }
  int64_t block_units() const {
    return std::clamp<int64_t>(BLOCK_TILE_NUMBERS / tiles_.size(), 2, MOST_BLOCK_TILES);
  }
  int64_t pass_units(int64_t threads) const { return block_units() * threads; }
  int64_t units_at_once() const { return 2; }  // their sums stay in the L1 cache
  int64_t task_panels() const { return PANELS_PER_TASK; }

  // Calls `make` with a row's place, and spreads what was made over the tiles of x.
  template <class Make>
  void place(int64_t row, bfloat16* x, const Make& make) const {
    bfloat16* made = kept<bfloat16>(ROW, tiles_.depth);
    make(made);
    bfloat16* out = x + row / tiles_.height * tiles_.size() + row % tiles_.height * DEPTH;
    for (int64_t k = 0; k < tiles_.depth; k += DEPTH, out += tiles_.height * DEPTH)
      std::memcpy(out, made + k, TILE_ROW_BYTES);
  }

  void multiply(const bfloat16* x, int64_t, int64_t rows, const bfloat16* weight, int64_t panels,
                float* y, int64_t y_row) const {
    tile_products(x, rows / tiles_.height, tiles_, weight, panels, y, y_row);
  }

 private:
  const RowTiles tiles_;
};

}  // namespace tokenmill

#endif

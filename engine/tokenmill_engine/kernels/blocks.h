// Rows of x by panels of a packed weight, in blocks of vector registers: the micro-kernel of Goto and
// van de Geijn (2008).
//
// P is the type of prepared x, T that of the weight. In float32 a bfloat16 weight is widened on
// its way; bfloat16 by bfloat16 takes two k at once, where the processor has a fast instruction for that.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "packing.h"
#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace tokenmill {

constexpr int PANELS_PER_TASK = 2;  // small tasks: threads that were held up are overtaken
constexpr int WIDE = 4;             // panels of a single row at once: enough sums under way
constexpr int64_t BLOCK_FLOATS = 80 * 1024;  // of x in a row block: two thirds of a small L2 cache
constexpr int64_t MOST_BLOCK_ROWS = 144;
constexpr int64_t PANEL_BYTES = 20 * 1024;  // of a panel in a block of K: half of a small L1 cache

#if defined(__AVX512BF16__)
// On Intel's, products of widened numbers are faster: 150 GFLOP/s of a thread against 83 (Sapphire Rapids).
inline bool multiplies_pairs() {
#if defined(TOKENMILL_PAIRS_ANYWHERE)  // for tests
  return true;
#else
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel");
#endif
}

inline void add_pairs(vfloat& sum, vint x, vint weights) {
  sum = (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
}
#endif

// Column vector j of a panel at k = 2 · pair + ODD.
template <int ODD>
inline vfloat weights(const float* panel, int64_t pair, int j) {
  return load(panel + (2 * pair + ODD) * PANEL + j * W);
}
template <int ODD>
inline vfloat weights(const bfloat16* panel, int64_t pair, int j) {
  const vint words = load_words(panel + (pair * 2 + j) * PANEL);
  return ODD ? (vfloat)(words & int32_t(0xffff0000)) : (vfloat)(words << 16);
}

template <int ROWS, int PANELS, int ODD, class T>
inline void add_products(vfloat (&sum)[ROWS][2 * PANELS], const float* x, int64_t x_row,
                         const T* weight, int64_t panel_size, int64_t pair) {
  vfloat row[2 * PANELS];
  for (int j = 0; j < 2 * PANELS; j++) {
    row[j] = weights<ODD>(weight + j / 2 * panel_size, pair, j % 2);
    keep(row[j]);
  }
  for (int m = 0; m < ROWS; m++) {
    const vfloat factor = all(x[m * x_row + 2 * pair + ODD]);
    for (int j = 0; j < 2 * PANELS; j++) sum[m][j] += factor * row[j];
  }
}

// `count` k, of which an odd last one stands alone.
template <int ROWS, int PANELS, class T>
inline void add_all(vfloat (&sum)[ROWS][2 * PANELS], const float* x, int64_t x_row,
                    const T* weight, int64_t panel_size, int64_t count) {
  for (int64_t pair = 0; pair < count / 2; pair++) {
    add_products<ROWS, PANELS, 0>(sum, x, x_row, weight, panel_size, pair);
    add_products<ROWS, PANELS, 1>(sum, x, x_row, weight, panel_size, pair);
  }
  if (count % 2) add_products<ROWS, PANELS, 0>(sum, x, x_row, weight, panel_size, count / 2);
}

#if defined(__AVX512BF16__)
// `count` k, which is even: x and weight are padded with zeros.
template <int ROWS, int PANELS>
inline void add_all(vfloat (&sum)[ROWS][2 * PANELS], const bfloat16* x, int64_t x_row,
                    const bfloat16* weight, int64_t panel_size, int64_t count) {
  for (int64_t pair = 0; pair < count / 2; pair++) {
    vint row[2 * PANELS];
    for (int j = 0; j < 2 * PANELS; j++)
      row[j] = load_words(weight + j / 2 * panel_size + (pair * 2 + j % 2) * PANEL);
    for (int m = 0; m < ROWS; m++) {
      int32_t word;
      std::memcpy(&word, x + m * x_row + 2 * pair, sizeof word);
      for (int j = 0; j < 2 * PANELS; j++) add_pairs(sum[m][j], word - vint{}, row[j]);
    }
  }
}
#endif

// y [ROWS, PANELS · PANEL] += x · weight, over `count` k of adjacent panels.
template <int ROWS, int PANELS, class P, class T>
void register_block(const P* x, int64_t x_row, const T* weight, int64_t panel_size, int64_t count,
                    float* y, int64_t y_row) {
  vfloat sum[ROWS][2 * PANELS];
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < 2 * PANELS; j++) sum[m][j] = load(y + m * y_row + j * W);
  add_all<ROWS, PANELS>(sum, x, x_row, weight, panel_size, count);
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < 2 * PANELS; j++) store(y + m * y_row + j * W, sum[m][j]);
}

template <int ROWS, class P, class T>
void few_rows(int64_t rows, const P* x, int64_t x_row, const T* weight, int64_t count, float* y,
              int64_t y_row) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) register_block<ROWS, 1>(x, x_row, weight, 0, count, y, y_row);
    else few_rows<ROWS - 1>(rows, x, x_row, weight, count, y, y_row);
  }
}

// One panel for all rows of a row block, in register blocks of nearly the same height.
template <class P, class T>
void panel_rows(int64_t rows, const P* x, int64_t x_row, const T* weight, int64_t count, float* y,
                int64_t y_row) {
  const int64_t tiles = ceil_div(rows, MOST_ROWS);
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t m = rows * tile / tiles, end = rows * (tile + 1) / tiles;
    few_rows<MOST_ROWS>(end - m, x + m * x_row, x_row, weight, count, y + m * y_row, y_row);
  }
}

// How `Product` computes: x as rows of P. K is cut so that its part of a panel stays in the L1 cache for all
// rows of a row block, and these in the L2 cache.
template <class P, class T>
class Rows {
 public:
  using Number = P;
  static constexpr bool HAS_BESIDE = false;  // time for something else while it multiplies
  struct InThread { explicit InThread(const Rows&) {} };

  Rows(int64_t rows, int64_t inputs)
      : rows_(rows), inputs_(sizeof(P) == sizeof(float) ? inputs : even(inputs)), real_(inputs) {}

  // Whether rows of x can be multiplied where they are, some numbers apart.
  bool takes(int64_t) const { return inputs_ == real_; }
  int64_t row_size() const { return inputs_; }
  int64_t block_rows() const {
    const int64_t most = std::clamp<int64_t>(BLOCK_FLOATS / inputs_, MOST_ROWS, MOST_BLOCK_ROWS);
    return ceil_div(rows_, ceil_div(rows_, most));
  }
  int64_t pass_rows(int64_t) const { return rows_; }
  int64_t rows_at_once() const { return rows_; }
  int64_t task_panels(int64_t, int64_t) const { return rows_ == 1 ? WIDE : PANELS_PER_TASK; }
  int64_t calls_beside(int64_t, int64_t) const { return 0; }

  // Rows of x by adjacent panels, added to y or not.
  template <class Beside>
  void multiply(InThread&, Matrix<const P> x, int64_t rows, const T* weight, int64_t panels,
                Matrix<float> y, bool adds, const Beside&) const {
    if (!adds) for (int64_t m = 0; m < rows; m++) std::fill_n(y.at + m * y.row, panels * PANEL, 0.0f);
    multiply(x.at, x.row, rows, weight, panels, y.at, y.row);
  }

 private:
  void multiply(const P* x, int64_t x_row, int64_t rows, const T* weight, int64_t panels, float* y,
                int64_t y_row) const {
    const int64_t blocks = ceil_div(inputs_ * PANEL * int64_t(sizeof(T)), PANEL_BYTES);
    const int64_t size = rows == 1 ? inputs_ : even(ceil_div(inputs_, blocks));
    const int64_t panel_size = padded(inputs_) * PANEL;
    for (int64_t k = 0; k < inputs_; k += size, x += size, weight += size * PANEL) {
      const int64_t part = std::min(size, inputs_ - k);
      if (rows == 1 && panels == WIDE)
        register_block<1, WIDE>(x, x_row, weight, panel_size, part, y, y_row);
      else if (rows == 2 && panels == 2)
        register_block<2, 2>(x, x_row, weight, panel_size, part, y, y_row);
      else
        for (int64_t p = 0; p < panels; p++)
          panel_rows(rows, x, x_row, weight + p * panel_size, part, y + p * PANEL, y_row);
    }
  }

  const int64_t rows_, inputs_, real_;
};

}  // namespace tokenmill

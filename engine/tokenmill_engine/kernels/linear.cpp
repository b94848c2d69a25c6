// y = x · Wᵀ + b on a CPU, with W packed once, and what surrounds it in a transformer's layer: RMS
// normalisation of x before, a gated activation or a residual sum after.
//
// W [N, K] is cut into panels of PANEL output columns, each stored front to back in the order in which
// the inner loop reads it; the last panel is padded with zeros. A register block of up to MOST_ROWS
// rows and one panel runs over K (the micro-kernel of Goto and van de Geijn, 2008), cut so that
// its part of the panel stays in the L1 cache for all rows of a row block, and these in the L2 cache.
//
// A weight whose numbers are all exact in bfloat16 may be stored so: the result is the same bit
// by bit, and half as many bytes are read; a shift or a mask widens a vector (see packing.h).
//
// The sum of an output runs over K in order, whatever the number of rows: no row depends on others.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "packing.h"
#include "pointwise.h"
#include "vectors.h"

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

// RMS normalisation alone, of rows [M, K] that may be any number of elements apart.
struct RmsNorm {
  const void* x;
  const float* weight;  // [K]
  void* y;              // [M, K], dense
  int64_t num_rows, x_row, size;
  float epsilon;
  int32_t rounds_first, is_bfloat16, num_threads;
};

}  // extern "C"

namespace {

using namespace tokenmill;

constexpr int64_t BLOCK_FLOATS = 80 * 1024;  // of x in a row block: two thirds of a small L2 cache
constexpr int64_t MOST_BLOCK_ROWS = 144;
constexpr int64_t PANEL_BYTES = 20 * 1024;  // of a panel in a block of K: half of a small L1 cache
constexpr int PANELS_PER_TASK = 2;  // small tasks: threads that were held up are overtaken
constexpr int WIDE = 4;             // panels of a single row at once: enough sums under way

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

// y [ROWS, PANELS · PANEL] += x · weight, over `count` k of adjacent panels.
template <int ROWS, int PANELS, class T>
void register_block(const float* x, int64_t x_row, const T* weight, int64_t panel_size,
                    int64_t count, float* y, int64_t y_row) {
  vfloat sum[ROWS][2 * PANELS];
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < 2 * PANELS; j++) sum[m][j] = load(y + m * y_row + j * W);
  for (int64_t pair = 0; pair < count / 2; pair++) {
    add_products<ROWS, PANELS, 0>(sum, x, x_row, weight, panel_size, pair);
    add_products<ROWS, PANELS, 1>(sum, x, x_row, weight, panel_size, pair);
  }
  if (count % 2) add_products<ROWS, PANELS, 0>(sum, x, x_row, weight, panel_size, count / 2);
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < 2 * PANELS; j++) store(y + m * y_row + j * W, sum[m][j]);
}

template <int ROWS, class T>
void few_rows(int64_t rows, const float* x, int64_t x_row, const T* weight, int64_t count,
              float* y, int64_t y_row) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) register_block<ROWS, 1>(x, x_row, weight, 0, count, y, y_row);
    else few_rows<ROWS - 1>(rows, x, x_row, weight, count, y, y_row);
  }
}

// One panel for all rows of a row block, in register blocks of nearly the same height.
template <class T>
void panel_rows(int64_t rows, const float* x, int64_t x_row, const T* weight, int64_t count,
                float* y, int64_t y_row) {
  const int64_t tiles = ceil_div(rows, MOST_ROWS);
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t m = rows * tile / tiles, end = rows * (tile + 1) / tiles;
    few_rows<MOST_ROWS>(end - m, x + m * x_row, x_row, weight, count, y + m * y_row, y_row);
  }
}

// Memory that threads keep from call to call: x made float32 or normalised, and sums of a task.
std::vector<float>& kept(int which) {
  static thread_local std::vector<float> buffers[2];
  return buffers[which];
}

// X is the type of x and y, T that of the packed weight.
template <class X, class T>
class Product {
 public:
  explicit Product(const Linear& call)
      : call_(call), panels_(ceil_div(call.outputs, PANEL) * (call.gate ? 2 : 1)),
        panel_size_(even(call.inputs) * PANEL), x_row_(call.x_row) {}

  void run() {
    const int64_t rows = call_.num_rows, inputs = call_.inputs;
    const bool prepares = sizeof(X) != sizeof(float) || call_.norm;
    float* prepared = nullptr;
    if (prepares) {
      auto& buffer = kept(0);
      if (int64_t(buffer.size()) < rows * inputs) buffer.resize(rows * inputs);
      x_ = prepared = buffer.data();
      x_row_ = inputs;
    } else {
      x_ = static_cast<const float*>(call_.x);
    }
    const int64_t limit = std::clamp<int64_t>(BLOCK_FLOATS / inputs, MOST_ROWS, MOST_BLOCK_ROWS);
    const int64_t row_blocks = ceil_div(rows, limit);
    const int64_t width = rows == 1 ? WIDE : PANELS_PER_TASK;
    const int64_t groups = ceil_div(panels_, width);
#pragma omp parallel num_threads(std::max(1, call_.num_threads))
    {
      if (prepares) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) prepare(row, prepared + row * inputs);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < row_blocks * groups; task++) {
        const int64_t block = task / groups, first = task % groups * width;
        const int64_t row = rows * block / row_blocks, end = rows * (block + 1) / row_blocks;
        compute(row, end - row, first, std::min(width, panels_ - first));
      }
    }
  }

 private:
  void prepare(int64_t row, float* out) const {
    const X* x = static_cast<const X*>(call_.x) + row * call_.x_row;
    if (call_.norm)
      normalise(x, call_.inputs, {call_.norm, call_.epsilon, call_.norm_rounds_first}, out);
    else for (int64_t k = 0; k < call_.inputs; k++) out[k] = to_float(x[k]);
  }

  void compute(int64_t row, int64_t rows, int64_t first, int64_t count) const {
    const int64_t columns = count * PANEL;
    auto& buffer = kept(1);
    if (int64_t(buffer.size()) < rows * columns) buffer.resize(rows * columns);
    float* sums = buffer.data();
    const int64_t column = first * PANEL;
    for (int64_t m = 0; m < rows; m++) {
      std::fill_n(sums + m * columns, columns, 0.0f);
      if (call_.bias)
        std::copy_n(call_.bias + column, std::min(columns, call_.outputs - column),
                    sums + m * columns);
    }
    multiply(row, rows, first, count, sums);
    for (int64_t m = 0; m < rows; m++) finish(row + m, first, count, sums + m * columns);
  }

  void multiply(int64_t row, int64_t rows, int64_t first, int64_t count, float* sums) const {
    const int64_t inputs = call_.inputs, columns = count * PANEL;
    const int64_t blocks = ceil_div(inputs * PANEL * int64_t(sizeof(T)), PANEL_BYTES);
    const int64_t size = rows == 1 ? inputs : even(ceil_div(inputs, blocks));
    for (int64_t k = 0; k < inputs; k += size) {
      const int64_t part = std::min(size, inputs - k);
      const float* x = x_ + row * x_row_ + k;
      const T* weight = static_cast<const T*>(call_.weight) + first * panel_size_ + k * PANEL;
      if (rows == 1 && count == WIDE)
        register_block<1, WIDE>(x, x_row_, weight, panel_size_, part, sums, columns);
      else if (rows == 2 && count == 2)
        register_block<2, 2>(x, x_row_, weight, panel_size_, part, sums, columns);
      else
        for (int64_t p = 0; p < count; p++)
          panel_rows(rows, x, x_row_, weight + p * panel_size_, part, sums + p * PANEL, columns);
    }
  }

  // Sums of one row to results.
  void finish(int64_t row, int64_t first, int64_t count, float* sums) const {
    int64_t column = first * PANEL;
    if (call_.gate) {
      column /= 2;
      for (int64_t p = 0; p < count; p += 2)
        for (int j = 0; j < PANEL; j += W) gate(sums + p * PANEL + j, sums + p / 2 * PANEL + j);
      count /= 2;
    }
    const int64_t real = std::min(count * PANEL, call_.outputs - column);
    const int64_t place = row * call_.outputs + column;
    X* y = static_cast<X*>(call_.y) + place;
    if (call_.residual) {
      const X* residual = static_cast<const X*>(call_.residual) + place;
      for (int64_t n = 0; n < real; n++)
        from_float(to_float(residual[n]) + rounded<X>(sums[n]), y + n);
    } else {
      for (int64_t n = 0; n < real; n++) from_float(sums[n], y + n);
    }
  }

  void gate(const float* sums, float* out) const {
    vfloat gate = load(sums), up = load(sums + PANEL);
    if (sizeof(X) == sizeof(float)) {
      store(out, activate(gate, call_.gate) * up);
      return;
    }
    for (int i = 0; i < W; i++) gate[i] = rounded<X>(gate[i]);
    const vfloat activated = activate(gate, call_.gate);
    for (int i = 0; i < W; i++) out[i] = rounded<X>(activated[i]) * rounded<X>(up[i]);
  }

  const Linear& call_;
  const int64_t panels_, panel_size_;
  const float* x_ = nullptr;
  int64_t x_row_;
};

template <class X>
void normalise_rows(const RmsNorm& call) {
  const Norm norm{call.weight, call.epsilon, call.rounds_first};
#pragma omp parallel for schedule(static) num_threads(std::max(1, call.num_threads))
  for (int64_t row = 0; row < call.num_rows; row++)
    normalise(static_cast<const X*>(call.x) + row * call.x_row, call.size, norm,
              static_cast<X*>(call.y) + row * call.size);
}

}  // namespace

extern "C" {

// Numbers in the packed form of a weight [outputs, inputs].
int64_t tokenmill_packed_size(int64_t outputs, int64_t inputs) {
  return ceil_div(outputs, PANEL) * PANEL * even(inputs);
}

// Into every `step`-th panel from `first` on.
void tokenmill_pack(const float* weight, int64_t outputs, int64_t inputs, int64_t first,
                    int64_t step, void* packed, int32_t as_bfloat16, int32_t num_threads) {
  const Packing p{outputs, inputs, first, step};
  if (as_bfloat16) pack(weight, p, static_cast<bfloat16*>(packed), num_threads);
  else pack(weight, p, static_cast<float*>(packed), num_threads);
}

int32_t tokenmill_fits_bfloat16(const float* numbers, int64_t count, int32_t num_threads) {
  return fits_bfloat16(numbers, count, num_threads);
}

void tokenmill_unpack(const void* packed, int64_t outputs, int64_t inputs, int64_t first,
                      int64_t step, float* weight, int32_t as_bfloat16) {
  const Packing p{outputs, inputs, first, step};
  if (as_bfloat16) unpack(static_cast<const bfloat16*>(packed), p, weight);
  else unpack(static_cast<const float*>(packed), p, weight);
}

void tokenmill_linear(const Linear* call) {
  if (call->is_bfloat16) {
    if (call->packed_as_bfloat16) Product<bfloat16, bfloat16>(*call).run();
    else Product<bfloat16, float>(*call).run();
  } else {
    if (call->packed_as_bfloat16) Product<float, bfloat16>(*call).run();
    else Product<float, float>(*call).run();
  }
}

void tokenmill_rms_norm(const RmsNorm* call) {
  if (call->is_bfloat16) normalise_rows<bfloat16>(*call);
  else normalise_rows<float>(*call);
}

}  // extern "C"

// y = x · Wᵀ + b on a CPU, with W packed once.
//
// W [N, K] is cut into panels of PANEL output columns, each stored as [K, PANEL], so that the inner
// loop reads it front to back; the last panel is padded with zeros. A register block of MOST_ROWS rows
// and one panel runs over all of K (the micro-kernel of Goto and van de Geijn, 2008). A panel
// is at most a few hundred kilobytes and stays in the L2 cache for all rows of a row block.
//
// A weight whose numbers are all exact in bfloat16 may be stored so: the result is the same bit
// by bit, and half as many bytes are read, which is what a batch of few rows waits for.
//
// The sum of an output runs over K in order, whatever the number of rows: no row depends on others.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vectors.h"

extern "C" {

// x and y are both float32 or both bfloat16, dense in the last dimension; a null bias is none.
struct Linear {
  const void *x, *weight;
  const float* bias;  // [N]
  void* y;            // [M, N], dense
  int64_t num_rows, x_row, inputs, outputs;  // M, stride of a row of x in elements, K, N
  int32_t is_bfloat16, packed_as_bfloat16, num_threads;
};

}  // extern "C"

namespace {

using namespace tokenmill;

constexpr int PANEL = 2 * W;
constexpr int ROW_BLOCK = 72;       // rows for which a panel stays in the cache; divides by 6 and 12
constexpr int PANELS_PER_TASK = 2;  // small tasks: threads that were held up are overtaken
constexpr int WIDE = 4;             // panels of a single row at once: enough sums under way

// ROWS × (PANELS · PANEL) outputs; `weight` is the first of adjacent panels.
template <int ROWS, int PANELS, class T>
void register_block(const float* x, int64_t x_row, const T* weight, int64_t inputs,
                    const float* bias, float* y, int64_t y_row) {
  vfloat sum[ROWS][2 * PANELS];
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < 2 * PANELS; j++) sum[m][j] = bias ? load(bias + j * W) : vfloat{};
  for (int64_t k = 0; k < inputs; k++) {
    vfloat row[2 * PANELS];
    for (int j = 0; j < 2 * PANELS; j++)
      row[j] = load(weight + (j / 2 * inputs + k) * PANEL + j % 2 * W);
    for (int m = 0; m < ROWS; m++) {
      const vfloat factor = all(x[m * x_row + k]);
      for (int j = 0; j < 2 * PANELS; j++) sum[m][j] += factor * row[j];
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < 2 * PANELS; j++) store(y + m * y_row + j * W, sum[m][j]);
}

template <int ROWS, class T>
void last_rows(int64_t rows, const float* x, int64_t x_row, const T* weight, int64_t inputs,
               const float* bias, float* y, int64_t y_row) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) register_block<ROWS, 1>(x, x_row, weight, inputs, bias, y, y_row);
    else last_rows<ROWS - 1>(rows, x, x_row, weight, inputs, bias, y, y_row);
  }
}

// One panel for all rows of a row block.
template <class T>
void panel_rows(int64_t rows, const float* x, int64_t x_row, const T* weight, int64_t inputs,
                const float* bias, float* y, int64_t y_row) {
  int64_t m = 0;
  for (; m + MOST_ROWS <= rows; m += MOST_ROWS)
    register_block<MOST_ROWS, 1>(x + m * x_row, x_row, weight, inputs, bias, y + m * y_row, y_row);
  last_rows<MOST_ROWS - 1>(rows - m, x + m * x_row, x_row, weight, inputs, bias, y + m * y_row,
                           y_row);
}

// One thread's memory: a panel made float32, a bias padded to whole panels, and outputs before
// they are cut to N columns or rounded.
struct Scratch { std::vector<float> panel, bias, y; };

// X is the type of x and y, T that of the packed weight.
template <class X, class T>
class Product {
 public:
  explicit Product(const Linear& call)
      : call_(call), panels_((call.outputs + PANEL - 1) / PANEL),
        x_(static_cast<const float*>(call.x)), x_row_(call.x_row) {}

  void run() {
    const int64_t rows = call_.num_rows, inputs = call_.inputs;
    const int64_t row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const int64_t width = rows == 1 ? WIDE : PANELS_PER_TASK;
    const int64_t groups = (panels_ + width - 1) / width;
    if (sizeof(X) != sizeof(float)) {
      widened_.resize(rows * inputs);
      x_ = widened_.data();
      x_row_ = inputs;
    }
#pragma omp parallel num_threads(std::max(1, call_.num_threads))
    {
      Scratch scratch;
      if (sizeof(X) != sizeof(float)) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) widen(row);
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < row_blocks * groups; task++) {
        const int64_t row = task / groups * ROW_BLOCK, first = task % groups * width;
        compute(row, std::min<int64_t>(ROW_BLOCK, rows - row), first,
                std::min(width, panels_ - first), scratch);
      }
    }
  }

 private:
  void widen(int64_t row) {
    const X* x = static_cast<const X*>(call_.x) + row * call_.x_row;
    for (int64_t k = 0; k < call_.inputs; k++) widened_[row * call_.inputs + k] = to_float(x[k]);
  }

  void compute(int64_t row, int64_t rows, int64_t first, int64_t count, Scratch& scratch) const {
    const int64_t column = first * PANEL, columns = count * PANEL;
    const int64_t real = std::min(columns, call_.outputs - column);
    const float* bias = call_.bias ? call_.bias + column : nullptr;
    if (bias && real < columns) {
      scratch.bias.assign(columns, 0.0f);
      std::copy_n(bias, real, scratch.bias.data());
      bias = scratch.bias.data();
    }
    X* out = static_cast<X*>(call_.y) + row * call_.outputs + column;
    if (sizeof(X) == sizeof(float) && real == columns) {
      multiply(row, rows, first, count, bias, reinterpret_cast<float*>(out), call_.outputs,
               scratch);
      return;
    }
    scratch.y.resize(rows * columns);
    multiply(row, rows, first, count, bias, scratch.y.data(), columns, scratch);
    for (int64_t m = 0; m < rows; m++)
      for (int64_t n = 0; n < real; n++)
        from_float(scratch.y[m * columns + n], out + m * call_.outputs + n);
  }

  void multiply(int64_t row, int64_t rows, int64_t first, int64_t count, const float* bias,
                float* y, int64_t y_row, Scratch& scratch) const {
    const int64_t inputs = call_.inputs, size = inputs * PANEL;
    const float* x = x_ + row * x_row_;
    const T* weight = static_cast<const T*>(call_.weight) + first * size;
    if (rows == 1 && count == WIDE) {
      register_block<1, WIDE>(x, x_row_, weight, inputs, bias, y, y_row);
      return;
    }
    for (int64_t p = 0; p < count; p++, weight += size, y += PANEL) {
      const float* panel_bias = bias ? bias + p * PANEL : nullptr;
      if (sizeof(T) != sizeof(float) && rows >= 3 * MOST_ROWS) {  // widened once for all rows
        scratch.panel.resize(size);
        for (int64_t i = 0; i < size; i += W) store(&scratch.panel[i], load(weight + i));
        panel_rows(rows, x, x_row_, scratch.panel.data(), inputs, panel_bias, y, y_row);
      } else {
        panel_rows(rows, x, x_row_, weight, inputs, panel_bias, y, y_row);
      }
    }
  }

  const Linear& call_;
  const int64_t panels_;
  const float* x_;
  int64_t x_row_;
  std::vector<float> widened_;
};

// To packed order, or back.
template <class T, class Move>
void for_each_weight(int64_t outputs, int64_t inputs, T* packed, Move move) {
  for (int64_t n = 0; n < (outputs + PANEL - 1) / PANEL * PANEL; n++)
    for (int64_t k = 0; k < inputs; k++)
      move(n, k, packed[(n / PANEL * inputs + k) * PANEL + n % PANEL]);
}

template <class T>
void pack(const float* weight, int64_t outputs, int64_t inputs, T* packed) {
  for_each_weight(outputs, inputs, packed, [&](int64_t n, int64_t k, T& place) {
    from_float(n < outputs ? weight[n * inputs + k] : 0.0f, &place);
  });
}

template <class T>
void unpack(const T* packed, int64_t outputs, int64_t inputs, float* weight) {
  for_each_weight(outputs, inputs, packed, [&](int64_t n, int64_t k, const T& place) {
    if (n < outputs) weight[n * inputs + k] = to_float(place);
  });
}

}  // namespace

extern "C" {

// Numbers in the packed form of a weight [outputs, inputs].
int64_t tokenmill_packed_size(int64_t outputs, int64_t inputs) {
  return (outputs + PANEL - 1) / PANEL * PANEL * inputs;
}

void tokenmill_pack(const float* weight, int64_t outputs, int64_t inputs, void* packed,
                    int32_t as_bfloat16) {
  if (as_bfloat16) pack(weight, outputs, inputs, static_cast<bfloat16*>(packed));
  else pack(weight, outputs, inputs, static_cast<float*>(packed));
}

void tokenmill_unpack(const void* packed, int64_t outputs, int64_t inputs, float* weight,
                      int32_t as_bfloat16) {
  if (as_bfloat16) unpack(static_cast<const bfloat16*>(packed), outputs, inputs, weight);
  else unpack(static_cast<const float*>(packed), outputs, inputs, weight);
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

}  // extern "C"

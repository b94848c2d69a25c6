// y = x · Wᵀ + b on a CPU, with W packed once, and what surrounds it in a transformer's layer: RMS
// normalisation of x before, a gated activation or a residual sum after.
//
// W [N, K] is cut into panels of PANEL output columns, each stored front to back in the order in which
// the inner loop reads it (packing.h); the last panel is padded with zeros. Blocks of registers
// (blocks.h) or of tiles (tiles.h) run over K, which for registers is cut so that
// its part of the panel stays in the L1 cache for all rows of a row block, and these in the L2 cache.
//
// A weight whose numbers are all exact in bfloat16 may be stored so: with x in float32 the result is
// the same bit by bit, and half as many bytes are read. With x in bfloat16 the processor's own products
// are taken where it has any: tiles, or pairs of k.
//
// The sum of an output runs over K in order, whatever the number of rows: no row depends on others.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "ahead.h"
#include "blocks.h"
#include "kept.h"
#include "linear_call.h"
#include "packing.h"
#include "pointwise.h"
#include "tiled_rows.h"
#include "vectors.h"

extern "C" {

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

// X is the type of x and y, T that of the packed weight, and Method what multiplies.
template <class X, class T, class Method>
class Product {
 public:
  using P = typename Method::Number;
  using InThread = typename Method::InThread;

  explicit Product(const Linear& call)
      : call_(call), panels_(ceil_div(call.outputs, PANEL) * (call.gate ? 2 : 1)),
        threads_(std::max(1, call.num_threads)), method_(call.num_rows, call.inputs) {}

  void run() const {
    const bool prepares = !std::is_same_v<P, X> || call_.norm || !method_.takes(call_.x_row);
    const int64_t rows = call_.num_rows;
    // A pass prepares no more of x than its threads compute with before the next.
    const int64_t most = prepares ? std::min(rows, method_.pass_rows(threads_)) : rows;
    P* prepared = prepares ? kept<P>(PREPARED, most * method_.row_size()) : nullptr;
    Tasks tasks;
#pragma omp parallel num_threads(threads_)
    {
      Thread thread(method_);
      thread.task = tasks.take();
      int64_t first_task = 0;
      for (int64_t row = 0; row < rows; row += most)
        first_task = run({row, std::min(row + most, rows)}, prepared, first_task, tasks, thread);
    }
  }

 private:
  struct RowRange { int64_t begin, end; };
  struct PanelRange { int64_t first, count; };

  // Numbered through all passes. Each thread knows the one it does next, and fetches what that one reads.
  struct Tasks {
    int64_t taken = 0;
    int64_t take() {
      int64_t number;
#pragma omp atomic capture
      number = taken++;
      return number;
    }
  };

  // Sums of some rows that are still to become results.
  struct Pending {
    float* sums = nullptr;
    RowRange rows{0, 0};
    PanelRange panels{0, 0};
    int buffer = 0;
  };

  struct Thread {
    explicit Thread(const Method& method) : method(method) {}
    InThread method;
    Pending pending;
    int64_t task;  // that it does next
  };

  // A part of x by all of W, on all threads. Returns the number of the first task of the next part.
  int64_t run(RowRange part, P* prepared, int64_t first_task, Tasks& tasks, Thread& thread) const {
    Matrix<const P> x{prepared, method_.row_size()};
    if (prepared) {
#pragma omp for schedule(static)
      for (int64_t row = part.begin; row < part.end; row++)
        prepare(row, prepared + (row - part.begin) * x.row);
    } else if constexpr (std::is_same_v<P, X>) {
      x = {static_cast<const P*>(call_.x) + part.begin * call_.x_row, call_.x_row};
    }
    const int64_t rows = part.end - part.begin, size = method_.block_rows();
    const int64_t width = std::max<int64_t>(method_.task_panels(panels_, threads_), call_.gate ? 2 : 1);
    const int64_t groups = ceil_div(panels_, width), end_task = first_task + ceil_div(rows, size) * groups;
    const auto panels = [&](int64_t task) {
      const int64_t first = task % groups * width;
      return PanelRange{first, std::min(width, panels_ - first)};
    };
    while (thread.task < end_task) {
      const int64_t task = std::exchange(thread.task, tasks.take());
      const int64_t begin = (task - first_task) / groups * size, end = std::min(begin + size, rows);
      Ahead ahead;
      if (thread.task < end_task || part.end < call_.num_rows) add_weight(panels(thread.task), ahead);
      ahead.spread(method_.calls_beside(end - begin, panels(task).count));
      const int64_t step = method_.rows_at_once();
      for (int64_t row = begin; row < end; row += step)
        compute({x.at + row * x.row, x.row}, {part.begin + row, part.begin + std::min(row + step, end)},
                panels(task), ahead, thread);
    }
    while (finish_row(thread.pending)) {}
#pragma omp barrier
    return end_task;
  }

  const T* weight(int64_t panel) const {
    return static_cast<const T*>(call_.weight) + panel * PANEL * padded(call_.inputs);
  }
  void add_weight(PanelRange panels, Ahead& ahead) const {
    ahead.add(weight(panels.first), panels.count * PANEL * padded(call_.inputs) * sizeof(T));
  }

  // A row as it is multiplied, its K padded with zeros.
  void prepare(int64_t row, P* out) const {
    const X* x = static_cast<const X*>(call_.x) + row * call_.x_row;
    if (call_.norm)
      normalise(x, call_.inputs, {call_.norm, call_.epsilon, call_.norm_rounds_first}, out);
    else copy(x, call_.inputs, out);
    std::fill(out + call_.inputs, out + method_.row_size(), P{});
  }

  // The last sums become results beside these products, which are pending afterwards.
  void compute(Matrix<const P> x, RowRange part, PanelRange panels, Ahead& ahead, Thread& thread) const {
    Pending& pending = thread.pending;
    const int64_t columns = panels.count * PANEL, column = panels.first * PANEL;
    const int64_t rows = part.end - part.begin;
    const int other = !pending.buffer;
    const Matrix<float> sums{kept<float>(other ? MORE_SUMS : SUMS, rows * columns), columns};
    if (call_.bias) {
      const int64_t real = std::min(columns, call_.outputs - column);
      for (int64_t m = 0; m < rows; m++) {
        float* sum = std::copy_n(call_.bias + column, real, sums.at + m * columns);
        std::fill_n(sum, columns - real, 0.0f);
      }
    }
    const auto beside = [&] { finish_row(pending), ahead(); };
    method_.multiply(thread.method, x, rows, weight(panels.first), panels.count, sums, call_.bias, beside);
    while (finish_row(pending)) {}
    pending = {sums.at, part, panels, other};
    if (!Method::HAS_BESIDE) while (finish_row(pending)) {}
  }

  // False if there is none.
  bool finish_row(Pending& pending) const {
    if (pending.rows.begin == pending.rows.end) return false;
    finish(pending.rows.begin++, pending.panels.first, pending.panels.count, pending.sums);
    pending.sums += pending.panels.count * PANEL;
    return true;
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
    if (call_.residual) add(static_cast<const X*>(call_.residual) + place, real, sums);
    copy(sums, real, y);
  }

  // A model adds what it keeps in its own type.
  void add(const X* residual, int64_t count, float* sums) const {
    int64_t n = 0;
    for (; n + W <= count; n += W) store(sums + n, load(residual + n) + rounded<X>(load(sums + n)));
    for (; n < count; n++) sums[n] = to_float(residual[n]) + rounded<X>(sums[n]);
  }

  void gate(const float* sums, float* out) const {
    const vfloat gate = rounded<X>(load(sums)), up = rounded<X>(load(sums + PANEL));
    store(out, rounded<X>(activate<X>(gate, call_.gate)) * up);
  }

  const Linear& call_;
  const int64_t panels_, threads_;
  const Method method_;
};

// One method for a whole process: they differ in the last bits.
void multiply_bfloat16(const Linear& call) {
#if defined(TOKENMILL_TILES)
  if (tiles_permitted()) return Product<bfloat16, bfloat16, TiledRows>(call).run();
#endif
#if defined(__AVX512BF16__)
  if (multiplies_pairs()) return Product<bfloat16, bfloat16, Rows<bfloat16, bfloat16>>(call).run();
#endif
  Product<bfloat16, bfloat16, Rows<float, bfloat16>>(call).run();
}

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
  return ceil_div(outputs, PANEL) * PANEL * padded(inputs);
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

// How bfloat16 is multiplied by bfloat16 in this process: 0 in float32, for lack of anything else, 1 in
// float32, which is faster than pairs here, 2 by pairs, 3 by tiles.
int32_t tokenmill_bfloat16_products() {
#if defined(TOKENMILL_TILES)
  if (tiles_permitted()) return 3;
#endif
#if defined(__AVX512BF16__)
  return multiplies_pairs() ? 2 : 1;
#else
  return 0;
#endif
}

void tokenmill_linear(const Linear* call) {
  if (call->is_bfloat16) {
    if (call->packed_as_bfloat16) multiply_bfloat16(*call);
    else Product<bfloat16, float, Rows<float, float>>(*call).run();
  } else {
    if (call->packed_as_bfloat16) Product<float, bfloat16, Rows<float, bfloat16>>(*call).run();
    else Product<float, float, Rows<float, float>>(*call).run();
  }
}

void tokenmill_rms_norm(const RmsNorm* call) {
  if (call->is_bfloat16) normalise_rows<bfloat16>(*call);
  else normalise_rows<float>(*call);
}

}  // extern "C"

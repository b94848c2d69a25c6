// Paged attention on a CPU: writes a step's K and V into the cache, then attends over the cache in
// place, prompt chunks and decode rows alike.
//
// A work item is one KV head and up to a tile of adjacent rows of one sequence. With the G query
// heads that share the KV head, its query vectors form a small matrix Q. For each block of the
// block table: scores S = Q·K, an online softmax in float32 (Milakov and Gimelshein, 2018), and
// O += P·V. Both products run through one register-blocked kernel, because K is stored transposed:
// K is [block, Hkv, D, slot], V is [block, Hkv, slot, Dv].
//
// The result of a row depends on its own blocks only, visited in position order, and on no other
// row: it is the same bit by bit whatever the row is batched with.
//
// Plain C interface, no dependency: compiles in seconds, and fits every release of torch. OpenMP's
// symbols resolve to the runtime that torch has loaded, so there is one pool of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "pointwise.h"
#include "vectors.h"

namespace {

using namespace tokenmill;

constexpr int TILE_VECTORS = 48;  // query vectors of a work item: Q, S and O stay in the L2 cache
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// C[ROWS][VECTORS * W] += A[ROWS][k] · B[k][VECTORS * W]
template <int ROWS, int VECTORS, class T>
inline void register_block(const float* a, int64_t lda, const T* b, int64_t ldb, float* c,
                           int64_t ldc, int64_t k) {
  vfloat sum[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < VECTORS; j++) sum[m][j] = load(c + m * ldc + j * W);
  for (int64_t x = 0; x < k; x++) {
    vfloat row[VECTORS];
    for (int j = 0; j < VECTORS; j++) row[j] = load(b + x * ldb + j * W);
    for (int m = 0; m < ROWS; m++) {
      vfloat factor = all(a[m * lda + x]);
      for (int j = 0; j < VECTORS; j++) sum[m][j] += factor * row[j];
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < VECTORS; j++) store(c + m * ldc + j * W, sum[m][j]);
}

template <int VECTORS, class T>
inline void column_block(const float* a, int64_t lda, int64_t rows, const T* b, int64_t ldb,
                         float* c, int64_t ldc, int64_t k) {
  constexpr int MOST = VECTORS > 2 ? 3 : MOST_ROWS;
  int64_t m = 0;
  for (; m + MOST <= rows; m += MOST)
    register_block<MOST, VECTORS>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
  for (; m + 2 <= rows; m += 2)
    register_block<2, VECTORS>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
  for (; m < rows; m++)
    register_block<1, VECTORS>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, k);
}

// C[rows][n] += A[rows][k] · B[k][n]
template <class T>
void multiply(const float* a, int64_t lda, int64_t rows, const T* b, int64_t ldb, int64_t n,
              float* c, int64_t ldc, int64_t k) {
  int64_t j = 0;
  if (rows <= 3)  // few rows: wider blocks, so that enough sums are under way
    for (; j + 4 * W <= n; j += 4 * W) column_block<4>(a, lda, rows, b + j, ldb, c + j, ldc, k);
  for (; j + 2 * W <= n; j += 2 * W) column_block<2>(a, lda, rows, b + j, ldb, c + j, ldc, k);
  for (; j + W <= n; j += W) column_block<1>(a, lda, rows, b + j, ldb, c + j, ldc, k);
  for (; j < n; j++)
    for (int64_t m = 0; m < rows; m++) {
      float sum = c[m * ldc + j];
      for (int64_t x = 0; x < k; x++) sum += a[m * lda + x] * to_float(b[x * ldb + j]);
      c[m * ldc + j] = sum;
    }
}

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

extern "C" {

// What all attention calls of a step share; see `AttentionMetadata`.
struct Step {
  int64_t num_rows, num_seqs, block_size;
  const int64_t *cu_rows, *kv_lens, *block_ids, *cu_blocks, *slot_blocks, *slot_offsets;
};

// One attention call. Strides count elements; the last dimension is dense. 0 stands for "none" in
// window, chunk and softcap, a null pointer for no sinks.
struct Call {
  const void *query, *key, *value;  // [T, H, D] [T, Hkv, D] [T, Hkv, Dv]
  void *output;                     // [T, H, Dv], dense
  void *key_cache, *value_cache;
  const float *sinks;               // [H]
  // What is left to do with Q and K: RMS normalisation of each head, then rotary embedding of its
  // first `rotary_dim` numbers, the halves of which are pairs.
  const float *query_norm, *key_norm;  // [D]
  const void *cos, *sin;               // [T, rotary_dim], dense
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  int64_t num_heads, num_kv_heads, key_dim, value_dim, window, chunk;
  int64_t rotary_dim;
  float scaling, softcap, epsilon;
  int32_t norm_rounds_first, is_bfloat16, num_threads;
};

}  // extern "C"

namespace {

struct Item { int64_t seq, first_row, num_rows, first_position; };

// Adjacent rows of a sequence in tiles, those with the most keys first: the last to run are short.
std::vector<Item> work_items(const Step& step, int64_t tile_rows) {
  std::vector<Item> items;
  for (int64_t seq = 0; seq < step.num_seqs; seq++) {
    const int64_t begin = step.cu_rows[seq], end = step.cu_rows[seq + 1];
    const int64_t context = step.kv_lens[seq] - (end - begin);
    for (int64_t row = begin; row < end; row += tile_rows)
      items.push_back({seq, row, std::min(tile_rows, end - row), context + row - begin});
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.num_rows * (a.first_position + a.num_rows)
         > b.num_rows * (b.first_position + b.num_rows);
  });
  return items;
}

int64_t first_visible(const Call& call, int64_t position) {
  int64_t first = 0;
  if (call.window) first = std::max(first, position - call.window + 1);
  if (call.chunk) first = std::max(first, position / call.chunk * call.chunk);
  return first;
}

// One thread's memory: Q, S (which becomes P), O, and each query vector's maximum and sum.
struct Scratch {
  std::vector<float> query, score, output, maximum, total, key;

  void fit(int64_t vectors, int64_t key_dim, int64_t slots, int64_t value_dim) {
    query.resize(vectors * key_dim);
    score.resize(vectors * slots);
    output.assign(vectors * value_dim, 0.0f);
    maximum.assign(vectors, MINUS_INFINITY);
    total.assign(vectors, 0.0f);
  }
};

// Scores of one query vector to weights, in place; `begin` to `end` are the slots it sees. Returns
// the factor for what was summed up before this block.
float soften(float* score, int64_t slots, int64_t begin, int64_t end, float softcap,
             float* maximum, float* total) {
  if (softcap)
    for (int64_t s = begin; s < end; s++) score[s] = softcap * std::tanh(score[s] / softcap);
  std::fill(score, score + begin, MINUS_INFINITY);
  std::fill(score + end, score + slots, MINUS_INFINITY);
  vfloat highest = all(*maximum);
  for (int64_t s = 0; s < slots; s += W) highest = larger(load(score + s), highest);
  float top = highest[0];
  for (int i = 1; i < W; i++) top = std::max(top, highest[i]);
  vfloat sum{};
  for (int64_t s = 0; s < slots; s += W) {
    vfloat weight = exponential(load(score + s) - top);
    store(score + s, weight);
    sum += weight;
  }
  float added = 0.0f;
  for (int i = 0; i < W; i++) added += sum[i];
  const float factor = *maximum == MINUS_INFINITY ? 0.0f : std::exp(*maximum - top);
  *total = *total * factor + added;
  *maximum = top;
  return factor;
}

template <class T>
class Attention {
 public:
  Attention(const Step& step, const Call& call)
      : step_(step), call_(call), group_(call.num_heads / call.num_kv_heads),
        slots_(round_up(step.block_size, W)) {}

  void run() {
    const int threads = std::max(1, call_.num_threads);
    const int64_t rows = step_.num_rows, heads = call_.num_kv_heads;
    const auto items = work_items(step_, std::max<int64_t>(1, TILE_VECTORS / group_));
    const int64_t parts = int64_t(items.size()) * heads;
#pragma omp parallel num_threads(threads)
    {
      Scratch scratch;
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; row++) write(row, scratch);
      // The implicit barrier: every key of the step is in the cache before anybody reads it.
#pragma omp for schedule(dynamic, 1)
      for (int64_t part = 0; part < parts; part++)
        attend(items[part / heads], part % heads, scratch);
    }
  }

 private:
  // One head of one row as the model attends with it.
  void prepare(const T* x, const float* norm, int64_t row, float* out) const {
    const int64_t size = call_.key_dim, half = call_.rotary_dim / 2;
    if (norm) normalise(x, size, {norm, call_.epsilon, call_.norm_rounds_first}, out);
    else for (int64_t d = 0; d < size; d++) out[d] = to_float(x[d]);
    const T* cos = static_cast<const T*>(call_.cos) + row * call_.rotary_dim;
    const T* sin = static_cast<const T*>(call_.sin) + row * call_.rotary_dim;
    for (int64_t d = 0; d < half; d++) {
      const float a = out[d], b = out[d + half];
      out[d] = rounded<T>(rounded<T>(a * to_float(cos[d])) - rounded<T>(b * to_float(sin[d])));
      out[d + half] = rounded<T>(rounded<T>(b * to_float(cos[d + half]))
                                 + rounded<T>(a * to_float(sin[d + half])));
    }
  }

  void write(int64_t row, Scratch& scratch) const {
    const int64_t heads = call_.num_kv_heads, size = step_.block_size;
    const int64_t block = step_.slot_blocks[row], slot = step_.slot_offsets[row];
    const T* keys = static_cast<const T*>(call_.key) + row * call_.key_row;
    const T* values = static_cast<const T*>(call_.value) + row * call_.value_row;
    for (int64_t head = 0; head < heads; head++) {
      T* key = static_cast<T*>(call_.key_cache) + (block * heads + head) * call_.key_dim * size;
      scratch.key.resize(call_.key_dim);
      prepare(keys + head * call_.key_head, call_.key_norm, row, scratch.key.data());
      for (int64_t d = 0; d < call_.key_dim; d++)
        from_float(scratch.key[d], key + d * size + slot);
      T* value = static_cast<T*>(call_.value_cache)
               + ((block * heads + head) * size + slot) * call_.value_dim;
      std::copy_n(values + head * call_.value_head, call_.value_dim, value);
    }
  }

  void attend(const Item& item, int64_t head, Scratch& scratch) const {
    const int64_t size = step_.block_size;
    const int64_t last = item.first_position + item.num_rows - 1;
    scratch.fit(item.num_rows * group_, call_.key_dim, slots_, call_.value_dim);
    gather_queries(item, head, scratch.query.data());
    const int64_t* table = step_.block_ids + step_.cu_blocks[item.seq];
    const int64_t first = first_visible(call_, item.first_position) / size;
    for (int64_t block = first; block <= last / size; block++)
      visit(item, table[block] * call_.num_kv_heads + head, block * size, scratch);
    finish(item, head, scratch);
  }

  void gather_queries(const Item& item, int64_t head, float* out) const {
    for (int64_t row = 0; row < item.num_rows; row++)
      for (int64_t g = 0; g < group_; g++) {
        const T* query = static_cast<const T*>(call_.query)
                       + (item.first_row + row) * call_.query_row
                       + (head * group_ + g) * call_.query_head;
        prepare(query, call_.query_norm, item.first_row + row, out);
        for (int64_t d = 0; d < call_.key_dim; d++) *out++ *= call_.scaling;
      }
  }

  // `page` is the block of this KV head, `base` the position of its first slot.
  void visit(const Item& item, int64_t page, int64_t base, Scratch& scratch) const {
    const int64_t vectors = item.num_rows * group_, size = step_.block_size;
    const int64_t key_dim = call_.key_dim, value_dim = call_.value_dim;
    const T* keys = static_cast<const T*>(call_.key_cache) + page * key_dim * size;
    const T* values = static_cast<const T*>(call_.value_cache) + page * size * value_dim;
    float *score = scratch.score.data(), *output = scratch.output.data();
    std::fill_n(score, vectors * slots_, 0.0f);
    multiply(scratch.query.data(), key_dim, vectors, keys, size, size, score, slots_, key_dim);
    int64_t first = size, end = 0;  // slots that some vector sees: only those were ever written
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t position = item.first_position + v / group_;
      const int64_t lowest = std::max<int64_t>(first_visible(call_, position) - base, 0);
      const int64_t behind = std::min(position + 1 - base, size);
      if (lowest >= behind) {
        std::fill_n(score + v * slots_, slots_, 0.0f);
        continue;
      }
      first = std::min(first, lowest);
      end = std::max(end, behind);
      const float factor = soften(score + v * slots_, slots_, lowest, behind, call_.softcap,
                                  &scratch.maximum[v], &scratch.total[v]);
      if (factor != 1.0f)
        for (int64_t d = 0; d < value_dim; d++) output[v * value_dim + d] *= factor;
    }
    if (first < end)
      multiply(score + first, slots_, vectors, values + first * value_dim, value_dim, value_dim,
               output, value_dim, end - first);
  }

  void finish(const Item& item, int64_t head, Scratch& scratch) const {
    for (int64_t v = 0; v < item.num_rows * group_; v++) {
      const int64_t query_head = head * group_ + v % group_;
      float total = scratch.total[v];
      if (call_.sinks) total += std::exp(call_.sinks[query_head] - scratch.maximum[v]);
      T* out = static_cast<T*>(call_.output)
             + ((item.first_row + v / group_) * call_.num_heads + query_head) * call_.value_dim;
      for (int64_t d = 0; d < call_.value_dim; d++)
        from_float(scratch.output[v * call_.value_dim + d] / total, out + d);
    }
  }

  const Step& step_;
  const Call& call_;
  const int64_t group_, slots_;
};

}  // namespace

extern "C" void tokenmill_write_and_attend(const Step* step, const Call* call) {
  if (call->is_bfloat16) Attention<bfloat16>(*step, *call).run();
  else Attention<float>(*step, *call).run();
}

// Paged attention on a CPU: writes a step's K and V into the cache, then attends over the cache in
// place, prompt chunks and decode rows alike.
//
// A work item is one KV head and up to a tile of adjacent rows of one sequence. With the G query
// heads that share the KV head, its query vectors form a small matrix Q. For each stretch of the
// block table: scores S = Q·K by block, an online softmax, and O += P·V by block. Both products run
// through one register-blocked kernel, because K is stored transposed: K is [block, Hkv, D, slot], V
// is [block, Hkv, slot, Dv].
//
// Decode rows do little with what they read, so each product fetches the page that comes after its
// own, the last of a work item the first of the thread's next.
//
// The result of a row depends on its own blocks only, visited in position order, and on no other
// row: it is the same bit by bit whatever the row is batched with. Stretches begin at multiples of
// their size for that.
//
// Plain C interface, no dependency: compiles in seconds, and fits every release of torch. OpenMP's
// symbols resolve to the runtime that torch has loaded, so there is one pool of threads.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pointwise.h"
#include "products.h"
#include "softmax.h"
#include "vectors.h"

namespace {

using namespace tokenmill;

constexpr int TILE_VECTORS = 48;  // query vectors of a work item: Q, S and O stay in the L2 cache
constexpr int64_t STRETCH_SLOTS = 256;  // keys whose scores are all made before they become weights

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

struct Item { int64_t seq, first_row, num_rows, first_position; };  // adjacent rows of a sequence

// Rows of each sequence in tiles, those with the most keys first: the last to run are short.
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

// One thread's memory: Q, S (which becomes P), O, what each query vector has seen, and a key.
struct Scratch {
  std::vector<float> query, score, output, key;
  std::vector<Seen> seen;

  void fit(int64_t vectors, int64_t key_dim, int64_t slots, int64_t value_dim) {
    query.resize(vectors * key_dim);
    score.resize(vectors * slots);
    output.assign(vectors * value_dim, 0.0f);
    seen.assign(vectors, {MINUS_INFINITY, 0.0f});
  }
};

struct Part { const Item& item; int64_t head; };  // one KV head of an item
struct Stretch { int64_t begin, end; };           // blocks whose scores are made together
template <class T>
class Attention {
 public:
  Attention(const Step& step, const Call& call)
      : step_(step), call_(call), group_(call.num_heads / call.num_kv_heads),
        items_(work_items(step, std::max<int64_t>(1, TILE_VECTORS / group_))),
        parts_(int64_t(items_.size()) * call.num_kv_heads),
        blocks_(std::max<int64_t>(1, STRETCH_SLOTS / step.block_size)),
        slots_(round_up(blocks_ * step.block_size, W)) {}

  void run() {
    int64_t taken = 0;
#pragma omp parallel num_threads(std::max(1, call_.num_threads))
    {
      Scratch scratch;
      const auto take = [&taken] {
        int64_t number;
#pragma omp atomic capture
        number = taken++;
        return number;
      };
      int64_t number = take();
#pragma omp for schedule(static)
      for (int64_t row = 0; row < step_.num_rows; row++)
        for (int64_t head = 0; head < call_.num_kv_heads; head++) write(row, head, scratch.key);
      // The implicit barrier: every key of the step is in the cache before anybody reads it. From
      // here on each thread knows one part more than it works at.
      while (number < parts_) {
        const int64_t next = take();
        attend(part(number), part(next < parts_ ? next : number), scratch);
        number = next;
      }
    }
  }

 private:
  Part part(int64_t number) const {
    return {items_[number / call_.num_kv_heads], number % call_.num_kv_heads};
  }
  // One head of one row as the model attends with it.
  void prepare(const T* x, const float* norm, int64_t row, float* out) const {
    const int64_t size = call_.key_dim, first = row * call_.rotary_dim;
    if (norm) normalise(x, size, {norm, call_.epsilon, call_.norm_rounds_first}, out);
    else for (int64_t d = 0; d < size; d++) out[d] = to_float(x[d]);
    if (call_.rotary_dim)
      rotate(static_cast<const T*>(call_.cos) + first, static_cast<const T*>(call_.sin) + first,
             call_.rotary_dim, out);
  }

  // Where a row's key and value of a head belong; the numbers of the key are a block size apart.
  T* key_place(int64_t row, int64_t head) const {
    const int64_t page = step_.slot_blocks[row] * call_.num_kv_heads + head;
    return static_cast<T*>(call_.key_cache) + page * call_.key_dim * step_.block_size
         + step_.slot_offsets[row];
  }
  T* value_place(int64_t row, int64_t head) const {
    const int64_t page = step_.slot_blocks[row] * call_.num_kv_heads + head;
    return static_cast<T*>(call_.value_cache)
         + (page * step_.block_size + step_.slot_offsets[row]) * call_.value_dim;
  }

  void write(int64_t row, int64_t head, std::vector<float>& made) const {
    const int64_t dim = call_.key_dim, size = step_.block_size;
    if (row + 1 < step_.num_rows) {  // each number of a key has a line of its own, in no order
      const T* next = key_place(row + 1, head);
      for (int64_t d = 0; d < dim; d++) prefetch_to_write(next + d * size);
    }
    made.resize(dim);
    const T* source = static_cast<const T*>(call_.key) + row * call_.key_row + head * call_.key_head;
    prepare(source, call_.key_norm, row, made.data());
    T* key = key_place(row, head);
    for (int64_t d = 0; d < dim; d++) from_float(made[d], key + d * size);
    source = static_cast<const T*>(call_.value) + row * call_.value_row + head * call_.value_head;
    std::copy_n(source, call_.value_dim, value_place(row, head));
  }

  // `then` is what this thread does next.
  void attend(Part part, Part then, Scratch& scratch) const {
    const Item& item = part.item;
    scratch.fit(item.num_rows * group_, call_.key_dim, slots_, call_.value_dim);
    gather_queries(part, scratch.query.data());
    const int64_t end = (item.first_position + item.num_rows - 1) / step_.block_size + 1;
    for (int64_t block = first_block(item); block < end;) {
      const int64_t behind = std::min(block / blocks_ * blocks_ + blocks_, end);
      const T* after = behind < end ? keys(part, behind) : keys(then, first_block(then.item));
      visit(part, {block, behind}, after, scratch);
      block = behind;
    }
    finish(part, scratch);
  }

  int64_t first_block(const Item& item) const {
    return first_visible(call_, item.first_position) / step_.block_size;
  }

  void gather_queries(Part part, float* out) const {
    const int64_t first = part.item.first_row, head = part.head * group_;
    for (int64_t row = first; row < first + part.item.num_rows; row++)
      for (int64_t g = 0; g < group_; g++) {
        const T* query = static_cast<const T*>(call_.query) + row * call_.query_row
                       + (head + g) * call_.query_head;
        prepare(query, call_.query_norm, row, out);
        for (int64_t d = 0; d < call_.key_dim; d++) *out++ *= call_.scaling;
      }
  }

  const T* keys(Part part, int64_t block) const {
    return static_cast<const T*>(call_.key_cache)
         + page(part, block) * step_.block_size * call_.key_dim;
  }
  const T* values(Part part, int64_t block) const {
    return static_cast<const T*>(call_.value_cache)
         + page(part, block) * step_.block_size * call_.value_dim;
  }
  int64_t page(Part part, int64_t block) const {
    const int64_t id = step_.block_ids[step_.cu_blocks[part.item.seq] + block];
    return id * call_.num_kv_heads + part.head;
  }

  // `after` is the page of keys to be read next.
  void visit(Part part, Stretch stretch, const T* after, Scratch& scratch) const {
    const int64_t vectors = part.item.num_rows * group_, size = step_.block_size;
    const int64_t first = stretch.begin / blocks_ * blocks_, dim = call_.value_dim;
    const Slots scored{(stretch.begin - first) * size, (stretch.end - first) * size};
    float *score = scratch.score.data(), *output = scratch.output.data();
    for (int64_t v = 0; v < vectors; v++)
      std::fill(score + v * slots_ + scored.begin, score + v * slots_ + scored.end, 0.0f);
    for (int64_t block = stretch.begin; block < stretch.end; block++) {
      const bool last = block + 1 == stretch.end;
      multiply(scratch.query.data(), call_.key_dim, vectors, keys(part, block), size, size,
               score + (block - first) * size, slots_, call_.key_dim,
               last ? values(part, stretch.begin) : keys(part, block + 1));
    }
    const Slots visible = weigh(part.item, first * size, scored, scratch);
    for (int64_t block = stretch.begin; block < stretch.end; block++) {
      const bool last = block + 1 == stretch.end;
      const int64_t slot = (block - first) * size;
      const int64_t begin = std::max(visible.begin, slot);
      const int64_t end = std::min(visible.end, slot + size);
      if (begin < end)
        multiply(score + begin, slots_, vectors, values(part, block) + (begin - slot) * dim, dim,
                 dim, output, dim, end - begin, last ? after : values(part, block + 1));
    }
  }

  // Scores to weights, `base` being the position of slot 0. Returns the slots that some vector
  // sees: only those were ever written.
  Slots weigh(const Item& item, int64_t base, Slots scored, Scratch& scratch) const {
    Slots any{scored.end, scored.begin};
    for (int64_t v = 0; v < item.num_rows * group_; v++) {
      const int64_t position = item.first_position + v / group_;
      const Slots visible{std::max(first_visible(call_, position) - base, scored.begin),
                          std::min(position + 1 - base, scored.end)};
      float* score = scratch.score.data() + v * slots_;
      if (visible.begin >= visible.end) {
        std::fill(score + scored.begin, score + scored.end, 0.0f);
        continue;
      }
      any = {std::min(any.begin, visible.begin), std::max(any.end, visible.end)};
      const float factor = soften(score, visible, scored, call_.softcap, scratch.seen[v]);
      float* output = scratch.output.data() + v * call_.value_dim;
      if (factor != 1.0f)
        for (int64_t d = 0; d < call_.value_dim; d++) output[d] *= factor;
    }
    return any;
  }

  void finish(Part part, const Scratch& scratch) const {
    const Item& item = part.item;
    for (int64_t v = 0; v < item.num_rows * group_; v++) {
      const int64_t query_head = part.head * group_ + v % group_;
      float total = scratch.seen[v].total;
      if (call_.sinks) total += std::exp(call_.sinks[query_head] - scratch.seen[v].maximum);
      T* out = static_cast<T*>(call_.output)
             + ((item.first_row + v / group_) * call_.num_heads + query_head) * call_.value_dim;
      for (int64_t d = 0; d < call_.value_dim; d++)
        from_float(scratch.output[v * call_.value_dim + d] / total, out + d);
    }
  }

  const Step& step_;
  const Call& call_;
  const int64_t group_;
  const std::vector<Item> items_;
  const int64_t parts_, blocks_, slots_;  // the latter of a stretch
};

}  // namespace

extern "C" void tokenmill_write_and_attend(const Step* step, const Call* call) {
  if (call->is_bfloat16) Attention<bfloat16>(*step, *call).run();
  else Attention<float>(*step, *call).run();
}

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
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention_call.h"
#include "kept.h"
#include "plain_pages.h"
#include "pointwise.h"
#include "softmax.h"
#include "tiled_pages.h"

namespace {

using namespace tokenmill;

// Method is how pages are laid out and multiplied.
template <class Method>
class Attention {
 public:
  using T = typename Method::Number;

  Attention(const Step& step, const Call& call)
      : step_(step), call_(call), method_(step, call), pages_(step, call),
        group_(call.num_heads / call.num_kv_heads),
        parts_(parts_of(step, call.num_kv_heads,
                        std::max<int64_t>(1, Method::MOST_VECTORS / group_))),
        blocks_(std::max<int64_t>(1, Method::STRETCH_SLOTS / step.block_size)),
        slots_(round_up(blocks_ * step.block_size, W) + W) {}  // apart in the sets of a cache

  void run() const {
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
      const int64_t count = parts_.size();
#pragma omp for schedule(static)
      for (int64_t row = 0; row < step_.num_rows; row++)
        for (int64_t head = 0; head < call_.num_kv_heads; head++) write(row, head);
      // The implicit barrier: every key of the step is in the cache before anybody reads it. From
      // here on each thread knows one part more than it works at.
      while (number < count) {
        const int64_t next = take();
        attend(parts_[number], parts_[next < count ? next : number], scratch);
        number = next;
      }
    }
  }

 private:
  // One thread's memory: S (which becomes P), O, and what each query vector has seen.
  struct Scratch {
    Matrix<float> score, output;
    std::vector<Seen> seen;
    typename Method::InThread method;
  };

  // One head of one row as the model attends with it.
  float* prepare(const T* x, const float* norm, int64_t row) const {
    const int64_t size = call_.key_dim, first = row * call_.rotary_dim;
    float* out = kept<float>(ROW, size);
    if (norm) normalise(x, size, {norm, call_.epsilon, call_.norm_rounds_first}, out);
    else copy(x, size, out);
    if (call_.rotary_dim)
      rotate(static_cast<const T*>(call_.cos) + first, static_cast<const T*>(call_.sin) + first,
             call_.rotary_dim, out);
    return out;
  }

  void write(int64_t row, int64_t head) const {
    const int64_t block = step_.slot_blocks[row], slot = step_.slot_offsets[row];
    if (row + 1 < step_.num_rows) {
      const int64_t next = step_.slot_blocks[row + 1];
      method_.prefetch_slot(pages_.keys(next, head), pages_.values(next, head),
                            step_.slot_offsets[row + 1]);
    }
    const T* key = static_cast<const T*>(call_.key) + row * call_.key_row + head * call_.key_head;
    method_.put_key(prepare(key, call_.key_norm, row), pages_.keys(block, head), slot);
    const T* value = static_cast<const T*>(call_.value) + row * call_.value_row
                   + head * call_.value_head;
    method_.put_value(value, pages_.values(block, head), slot);
  }

  // `then` is what this thread does next.
  void attend(const Part& part, const Part& then, Scratch& scratch) const {
    start(part, scratch);
    const int64_t end = end_block(part);
    for (int64_t block = first_block(part); block < end;) {
      const Work work = stretch_from(part, block);
      block = work.stretch.end;
      visit(work, block < end ? stretch_from(part, block) : stretch_from(then, first_block(then)),
            scratch);
    }
    finish(part, scratch);
  }

  int64_t first_block(const Part& part) const {
    return first_visible(call_, part.first_position) / step_.block_size;
  }
  int64_t end_block(const Part& part) const {
    return (part.first_position + part.num_rows - 1) / step_.block_size + 1;
  }
  // Stretches end at multiples of their size.
  Work stretch_from(const Part& part, int64_t block) const {
    return {part, {block, std::min(block / blocks_ * blocks_ + blocks_, end_block(part))}};
  }

  void start(const Part& part, Scratch& scratch) const {
    const int64_t vectors = part.num_rows * group_;
    scratch.score = {kept<float>(SCORES, vectors * slots_), slots_};
    scratch.output = {kept<float>(OUTPUTS, vectors * call_.value_dim), call_.value_dim};
    std::fill_n(scratch.output.at, vectors * call_.value_dim, 0.0f);
    scratch.seen.assign(vectors, {MINUS_INFINITY, 0.0f});
    method_.start(scratch.method, vectors);
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t row = part.first_row + v / group_, head = part.head * group_ + v % group_;
      const T* query = static_cast<const T*>(call_.query) + row * call_.query_row
                     + head * call_.query_head;
      method_.put_query(scratch.method, v, prepare(query, call_.query_norm, row));
    }
  }

  void visit(const Work& work, const Work& next, Scratch& scratch) const {
    const auto [begin, end] = work.stretch;
    const int64_t vectors = work.part.num_rows * group_, size = step_.block_size;
    // Slots are counted from the multiple: a sum over lanes is the same wherever a window begins.
    const int64_t first = begin / blocks_ * blocks_;
    const Slots scored{(begin - first) * size, (end - first) * size};
    const Matrix<float> score{scratch.score.at + scored.begin, slots_};
    method_.score(scratch.method, work, vectors, score);
    const auto weights = method_.weights(scratch.method, scratch.score);
    const Slots visible = weigh(work.part, first * size, scored, scratch, weights);
    if (visible.begin < visible.end)
      method_.mix(scratch.method, work, next, vectors,
                  {visible.begin - scored.begin, visible.end - scored.begin},
                  {weights.at + scored.begin, weights.row}, scratch.output);
  }

  // Scores to weights, `base` being the position of slot 0. Returns the slots that some vector
  // sees: only those were ever written.
  template <class Y>
  Slots weigh(const Part& part, int64_t base, Slots scored, Scratch& scratch,
              Matrix<Y> weights) const {
    Slots any{scored.end, scored.begin};
    for (int64_t v = 0; v < part.num_rows * group_; v++) {
      const int64_t position = part.first_position + v / group_;
      const Slots visible{std::max(first_visible(call_, position) - base, scored.begin),
                          std::min(position + 1 - base, scored.end)};
      Y* weight = weights.at + v * weights.row;
      if (visible.begin >= visible.end) {
        std::fill(weight + scored.begin, weight + scored.end, Y{});
        continue;
      }
      any = {std::min(any.begin, visible.begin), std::max(any.end, visible.end)};
      const float factor = soften(scratch.score.at + v * slots_, visible, scored, method_.scale(),
                                  call_.softcap, scratch.seen[v], weight);
      float* output = scratch.output.at + v * call_.value_dim;
      if (factor != 1.0f)
        for (int64_t d = 0; d < call_.value_dim; d++) output[d] *= factor;
    }
    return any;
  }

  void finish(const Part& part, const Scratch& scratch) const {
    for (int64_t v = 0; v < part.num_rows * group_; v++) {
      const int64_t query_head = part.head * group_ + v % group_;
      float total = scratch.seen[v].total;
      if (call_.sinks) total += std::exp(call_.sinks[query_head] - scratch.seen[v].maximum);
      T* out = static_cast<T*>(call_.output)
             + ((part.first_row + v / group_) * call_.num_heads + query_head) * call_.value_dim;
      float* output = scratch.output.at + v * call_.value_dim;
      const float share = 1.0f / total;
      for (int64_t d = 0; d < call_.value_dim; d++) output[d] *= share;
      copy(output, call_.value_dim, out);
    }
  }

  const Step& step_;
  const Call& call_;
  const Method method_;
  const Pages<T> pages_;
  const int64_t group_;
  const std::vector<Part> parts_;
  const int64_t blocks_, slots_;  // the latter of a stretch
};

void attend_in_bfloat16(const Step& step, const Call& call) {
#if defined(TOKENMILL_TILES)
  if (TiledPages::takes(step, call)) return Attention<TiledPages>(step, call).run();
#endif
  Attention<PlainPages<bfloat16>>(step, call).run();
}

}  // namespace

extern "C" void tokenmill_write_and_attend(const Step* step, const Call* call) {
  if (call->is_bfloat16) attend_in_bfloat16(*step, *call);
  else Attention<PlainPages<float>>(*step, *call).run();
}

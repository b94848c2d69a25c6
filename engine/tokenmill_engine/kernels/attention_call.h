// What a call of paged attention is told, and how its work is divided.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vectors.h"

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

namespace tokenmill {

// Adjacent rows of a sequence, and one KV head.
struct Part { int64_t seq, head, first_row, num_rows, first_position; };
struct Stretch { int64_t begin, end; };  // blocks whose scores are made together
struct Work { Part part; Stretch stretch; };

// Sequences with the most rows and keys go first: the last to run are short. Parts that read the same
// keys follow each other, while these are in a cache.
inline std::vector<Part> parts_of(const Step& step, int64_t num_kv_heads, int64_t tile_rows) {
  const auto rows = [&](int64_t seq) { return step.cu_rows[seq + 1] - step.cu_rows[seq]; };
  std::vector<int64_t> seqs(step.num_seqs);
  for (int64_t seq = 0; seq < step.num_seqs; seq++) seqs[seq] = seq;
  std::stable_sort(seqs.begin(), seqs.end(), [&](int64_t a, int64_t b) {
    return rows(a) * step.kv_lens[a] > rows(b) * step.kv_lens[b];
  });
  std::vector<Part> parts;
  for (const int64_t seq : seqs) {
    const int64_t begin = step.cu_rows[seq], end = step.cu_rows[seq + 1];
    const int64_t context = step.kv_lens[seq] - rows(seq);
    for (int64_t head = 0; head < num_kv_heads; head++)
      for (int64_t row = begin; row < end; row += tile_rows)
        parts.push_back({seq, head, row, std::min(tile_rows, end - row), context + row - begin});
  }
  return parts;
}

inline int64_t first_visible(const Call& call, int64_t position) {
  int64_t first = 0;
  if (call.window) first = std::max(first, position - call.window + 1);
  if (call.chunk) first = std::max(first, position / call.chunk * call.chunk);
  return first;
}

// Where the pages of one KV head are: a block of K, and one of V.
template <class T>
class Pages {
 public:
  Pages(const Step& step, const Call& call) : step_(step), call_(call) {}

  T* keys(const Part& part, int64_t block) const { return keys(id(part, block), part.head); }
  T* values(const Part& part, int64_t block) const { return values(id(part, block), part.head); }
  T* keys(int64_t id, int64_t head) const {
    return static_cast<T*>(call_.key_cache)
         + (id * call_.num_kv_heads + head) * step_.block_size * call_.key_dim;
  }
  T* values(int64_t id, int64_t head) const {
    return static_cast<T*>(call_.value_cache)
         + (id * call_.num_kv_heads + head) * step_.block_size * call_.value_dim;
  }

 private:
  int64_t id(const Part& part, int64_t block) const {
    return step_.block_ids[step_.cu_blocks[part.seq] + block];
  }

  const Step& step_;
  const Call& call_;
};

}  // namespace tokenmill

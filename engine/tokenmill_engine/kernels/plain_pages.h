// Pages of K as [D, slot] and of V as [slot, Dv], multiplied in float32.
//
// Decode rows do little with what they read, so each product fetches the page that comes after its
// own, the last of a work item the first of the thread's next.

#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_call.h"
#include "kept.h"
#include "products.h"
#include "softmax.h"

namespace tokenmill {

template <class T>
class PlainPages {
 public:
  using Number = T;
  struct InThread { float* query; };
  static constexpr int64_t MOST_VECTORS = 48;  // of a work item: Q, S and O stay in the L2 cache
  static constexpr int64_t STRETCH_SLOTS = 256;

  PlainPages(const Step& step, const Call& call)
      : pages_(step, call), size_(step.block_size), key_dim_(call.key_dim),
        value_dim_(call.value_dim), scaling_(call.scaling) {}

  float scale() const { return 1.0f; }  // Q is scaled

  void prefetch_slot(const T* keys, const T*, int64_t slot) const {
    // Each number of a key has a line of its own, in no order.
    for (int64_t d = 0; d < key_dim_; d++) prefetch_to_write(keys + d * size_ + slot);
  }
  void put_key(const float* key, T* page, int64_t slot) const {
    for (int64_t d = 0; d < key_dim_; d++) from_float(key[d], page + d * size_ + slot);
  }
  void put_value(const T* value, T* page, int64_t slot) const {
    std::copy_n(value, value_dim_, page + slot * value_dim_);
  }

  void start(InThread& thread, int64_t vectors) const {
    thread.query = kept<float>(QUERIES, vectors * key_dim_);
  }
  void put_query(InThread& thread, int64_t v, const float* query) const {
    for (int64_t d = 0; d < key_dim_; d++) thread.query[v * key_dim_ + d] = query[d] * scaling_;
  }

  Matrix<float> weights(InThread&, Matrix<float> scores) const { return scores; }

  void score(InThread& thread, const Work& work, int64_t vectors, Matrix<float> scores) const {
    const auto& [part, stretch] = work;
    for (int64_t v = 0; v < vectors; v++)
      std::fill_n(scores.at + v * scores.row, (stretch.end - stretch.begin) * size_, 0.0f);
    for (int64_t block = stretch.begin; block < stretch.end; block++, scores.at += size_) {
      const bool last = block + 1 == stretch.end;
      multiply(thread.query, key_dim_, vectors, pages_.keys(part, block), size_, size_, scores.at,
               scores.row, key_dim_,
               last ? pages_.values(part, stretch.begin) : pages_.keys(part, block + 1));
    }
  }

  void mix(InThread&, const Work& work, const Work& next, int64_t vectors, Slots visible,
           Matrix<float> weights, Matrix<float> output) const {
    const auto& [part, stretch] = work;
    for (int64_t block = stretch.begin; block < stretch.end; block++) {
      const bool last = block + 1 == stretch.end;
      const int64_t slot = (block - stretch.begin) * size_;
      const int64_t begin = std::max(visible.begin, slot);
      const int64_t end = std::min(visible.end, slot + size_);
      if (begin < end)
        multiply(weights.at + begin, weights.row, vectors,
                 pages_.values(part, block) + (begin - slot) * value_dim_, value_dim_, value_dim_,
                 output.at, output.row, end - begin,
                 last ? pages_.keys(next.part, next.stretch.begin) : pages_.values(part, block + 1));
    }
  }

 private:
  const Pages<T> pages_;
  const int64_t size_, key_dim_, value_dim_;
  const float scaling_;
};

}  // namespace tokenmill

// An online softmax in float32 (Milakov and Gimelshein, 2018), a stretch of scores at a time.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "exponential.h"
#include "vectors.h"

namespace tokenmill {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Adjacent slots, counted from the first of a stretch.
struct Slots { int64_t begin, end; };

// What a query vector has seen so far.
struct Seen { float maximum, total; };

inline float highest(const float* score, int64_t begin, int64_t end, float scale, float least) {
  vfloat top[4];  // a maximum has some latency: four are under way
  for (vfloat& each : top) each = all(MINUS_INFINITY);
  int64_t s = begin;
  for (; s + 4 * W <= end; s += 4 * W)
    for (int j = 0; j < 4; j++) top[j] = larger(load(score + s + j * W), top[j]);
  for (; s < end; s += W) top[0] = larger(load(score + s), top[0]);
  const vfloat lanes = larger(larger(top[0], top[1]), larger(top[2], top[3]));
  return std::max(largest_of(lanes) * scale, least);
}

// e^(score · scale - top), or what is as good once rounded to bfloat16.
inline vfloat weight_of(vfloat score, float scale, float top, const float*) {
  return exponential(score * scale - top);
}
inline vfloat weight_of(vfloat score, float scale, float top, const bfloat16*) {
  constexpr float LOG2_E = 1.44269504088896341f;
  return power_of_two(score * (scale * LOG2_E) - top * LOG2_E);
}

// Hides the slots of a vector that are not in begin:end. It is written as a whole, since it is read so soon.
inline void hide_outside(float* score, int64_t begin, int64_t end) {
  vint lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  const vint seen = (lane >= int32_t(begin)) & (lane < int32_t(end));
  store(score, choose(seen, load(score), all(MINUS_INFINITY)));
}

// Scores of one query vector, times `scale`, to weights, which may take their place: 0 for those of `scored`
// that it does not see. Both are rounded to whole vectors. Returns the factor for what was summed up before.
template <class Y>
float soften(float* score, Slots visible, Slots scored, float scale, float softcap, Seen& seen,
             Y* weights) {
  const int64_t begin = visible.begin / W * W, end = round_up(visible.end, W);
  if (softcap) {
    for (int64_t s = visible.begin; s < visible.end; s++)
      score[s] = softcap * std::tanh(score[s] * scale / softcap);
    scale = 1.0f;
  }
  if (begin < visible.begin) hide_outside(score + begin, visible.begin - begin, W);
  if (visible.end < end) hide_outside(score + end - W, 0, visible.end - (end - W));
  const float top = highest(score, begin, end, scale, seen.maximum);
  vfloat sum[2] = {};
  int64_t s = begin;
  for (; s + 2 * W <= end; s += 2 * W) {
    const vfloat even = weight_of(load(score + s), scale, top, weights);
    const vfloat odd = weight_of(load(score + s + W), scale, top, weights);
    store(weights + s, even, odd);
    sum[0] += even, sum[1] += odd;
  }
  if (s < end) {
    const vfloat last = weight_of(load(score + s), scale, top, weights);
    store(weights + s, last);
    sum[0] += last;
  }
  for (s = scored.begin / W * W; s < begin; s += W) store(weights + s, vfloat{});
  for (s = end; s < scored.end; s += W) store(weights + s, vfloat{});
  const float factor = seen.maximum == MINUS_INFINITY ? 0.0f : std::exp(seen.maximum - top);
  seen = {top, seen.total * factor + sum_of(sum[0] + sum[1])};
  return factor;
}

}  // namespace tokenmill

// An online softmax in float32 (Milakov and Gimelshein, 2018), a stretch of scores at a time.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "vectors.h"

namespace tokenmill {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Adjacent slots, counted from the first of a stretch.
struct Slots { int64_t begin, end; };

// What a query vector has seen so far.
struct Seen { float maximum, total; };

inline float highest(const float* score, int64_t begin, int64_t end, float least) {
  vfloat top[4];  // a maximum has some latency: four are under way
  for (vfloat& each : top) each = all(least);
  int64_t s = begin;
  for (; s + 4 * W <= end; s += 4 * W)
    for (int j = 0; j < 4; j++) top[j] = larger(load(score + s + j * W), top[j]);
  for (; s < end; s += W) top[0] = larger(load(score + s), top[0]);
  const vfloat lanes = larger(larger(top[0], top[1]), larger(top[2], top[3]));
  float result = lanes[0];
  for (int i = 1; i < W; i++) result = std::max(result, lanes[i]);
  return result;
}

// Scores of one query vector to weights, in place: 0 for those of `scored` that it does not see.
// `scored` is rounded to whole vectors. Returns the factor for what was summed up before.
inline float soften(float* score, Slots visible, Slots scored, float softcap, Seen& seen) {
  const int64_t begin = scored.begin / W * W, end = round_up(scored.end, W);
  if (softcap)
    for (int64_t s = visible.begin; s < visible.end; s++)
      score[s] = softcap * std::tanh(score[s] / softcap);
  std::fill(score + begin, score + visible.begin, MINUS_INFINITY);
  std::fill(score + visible.end, score + end, MINUS_INFINITY);
  const float top = highest(score, begin, end, seen.maximum);
  vfloat sum{};
  for (int64_t s = begin; s < end; s += W) {
    const vfloat weight = exponential(load(score + s) - top);
    store(score + s, weight);
    sum += weight;
  }
  const float factor = seen.maximum == MINUS_INFINITY ? 0.0f : std::exp(seen.maximum - top);
  seen = {top, seen.total * factor + sum_of(sum)};
  return factor;
}

}  // namespace tokenmill

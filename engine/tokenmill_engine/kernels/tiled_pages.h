// Pages of bfloat16 in the order of a packed weight, multiplied by tiles (tiles.h).
//
// Slots go in groups of PANEL. Those of K are panels of D pairs: [group, D / 2, slot, 2]. V is a panel for
// each PANEL columns, of pairs of slots: [Dv / PANEL, slot / 2, column, 2].
//
// Scores are summed up and become weights in float32, and these are rounded to bfloat16.
//
// Few rows do little with what they read: meanwhile what they read next is brought near, V beside the scores and
// the next K beside the mixing.

#pragma once

#include "tiles.h"

#if defined(TOKENMILL_TILES)

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "ahead.h"
#include "attention_call.h"
#include "kept.h"
#include "pointwise.h"
#include "softmax.h"

namespace tokenmill {

class TiledPages {
 public:
  using Number = bfloat16;
  static constexpr int64_t MOST_VECTORS = 64;
  static constexpr int64_t STRETCH_SLOTS = 256, MOST_GROUPS = STRETCH_SLOTS / PANEL;
  static_assert(MOST_GROUPS <= Ahead::MOST_PIECES);
  static constexpr int64_t WEIGHTS_ROW = STRETCH_SLOTS + PANEL;  // apart in the sets of a cache

  struct InThread {
    TileRegisters registers;
    bfloat16 *query, *weights, *edges;
  };

  static bool takes(const Step& step, const Call& call) {
    return tiles_permitted() && step.block_size % PANEL == 0 && step.block_size <= STRETCH_SLOTS
        && call.key_dim % DEPTH == 0 && call.value_dim % PANEL == 0;
  }

  TiledPages(const Step& step, const Call& call)
      : pages_(step, call), size_(step.block_size), key_dim_(call.key_dim),
        value_dim_(call.value_dim), scaling_(call.scaling) {}

  float scale() const { return scaling_; }

  void prefetch_slot(const bfloat16* keys, const bfloat16*, int64_t slot) const {
    const bfloat16* place = keys + key_place(slot);
    for (int64_t d = 0; d < key_dim_; d += 2, place += 2 * PANEL) prefetch_to_write(place);
  }
  void put_key(const float* key, bfloat16* page, int64_t slot) const {
    bfloat16* halves = kept<bfloat16>(HALVES, key_dim_);
    copy(key, key_dim_, halves);
    bfloat16* out = page + key_place(slot);
    for (int64_t d = 0; d < key_dim_; d += 2, out += 2 * PANEL)
      std::memcpy(out, halves + d, 2 * sizeof *out);
  }
  void put_value(const bfloat16* value, bfloat16* page, int64_t slot) const {
    // Only its own halves of words: another thread may write the others.
    const __mmask32 halves = slot % 2 ? 0xaaaaaaaa : 0x55555555;
    bfloat16* out = page + slot / 2 * 2 * PANEL;
    for (int64_t d = 0; d < value_dim_; d += PANEL, value += PANEL, out += size_ * PANEL)
      for (int64_t column = 0; column < PANEL; column += W) {
        const __m512i odd = (__m512i)load(value + column);
        const __m512i words = slot % 2 ? odd : _mm512_srli_epi32(odd, 16);
        _mm512_mask_storeu_epi16(out + 2 * column, halves, words);
      }
  }

  void start(InThread& thread, int64_t vectors) const {
    thread.query = kept<bfloat16>(QUERIES, vectors * key_dim_);
    thread.weights = kept<bfloat16>(WEIGHTS, vectors * WEIGHTS_ROW);
    thread.edges = kept<bfloat16>(EDGES, 2 * PANEL * value_dim_);
  }
  void put_query(InThread& thread, int64_t v, const float* query) const {
    copy(query, key_dim_, thread.query + v * key_dim_);
  }

  Matrix<bfloat16> weights(InThread& thread, Matrix<float>) const {
    return {thread.weights, WEIGHTS_ROW};
  }

  void score(InThread& thread, const Work& work, int64_t vectors, Matrix<float> scores) const {
    const auto& [part, stretch] = work;
    std::array<const bfloat16*, MOST_GROUPS> keys;
    int64_t count = 0;
    Ahead ahead;
    if (vectors <= TILE_ROWS)
      for (int64_t block = stretch.begin; block < stretch.end; block++)
        ahead.add(pages_.values(part, block), size_ * value_dim_ * sizeof(bfloat16));
    for (int64_t block = stretch.begin; block < stretch.end; block++)
      for (int64_t slot = 0; slot < size_; slot += PANEL)
        keys[count++] = pages_.keys(part, block) + slot * key_dim_;
    const int64_t steps = key_dim_ / DEPTH;
    ahead.spread(calls_beside(vectors, steps, count));
    tile_products(thread.registers, {thread.query, key_dim_}, vectors, steps,
                  [&](int64_t step, int64_t group) { return keys[group] + step * PANEL_STEP; },
                  count, scores, false, [&] { ahead(); });
  }

  void mix(InThread& thread, const Work& work, const Work& next, int64_t vectors, Slots visible,
           Matrix<bfloat16> weights, Matrix<float> output) const {
    const int64_t begin = visible.begin / PANEL * PANEL, end = round_up(visible.end, PANEL);
    std::array<Group, MOST_GROUPS> values;
    int64_t count = 0;
    Ahead ahead;
    if (vectors <= TILE_ROWS)
      for (int64_t block = next.stretch.begin; block < next.stretch.end; block++)
        ahead.add(pages_.keys(next.part, block), size_ * key_dim_ * sizeof(bfloat16));
    for (int64_t slot = begin; slot < end; slot += PANEL) {
      const int64_t block = work.stretch.begin + slot / size_;
      Group group{pages_.values(work.part, block) + slot % size_ * PANEL, size_ * PANEL};
      if (slot < visible.begin || slot + PANEL > visible.end)
        group = written(group, {visible.begin - slot, visible.end - slot},
                        thread.edges + (slot == begin ? 0 : PANEL * value_dim_));
      values[count++] = group;
    }
    const int64_t panels = value_dim_ / PANEL;
    ahead.spread(calls_beside(vectors, count, panels));
    tile_products(thread.registers, {weights.at + begin, weights.row}, vectors, count,
                  [&](int64_t step, int64_t p) { return values[step].at + p * values[step].panel; },
                  panels, output, true, [&] { ahead(); });
  }

 private:
  struct Group { const bfloat16* at; int64_t panel; };  // V of PANEL slots, and numbers from panel to panel

  int64_t key_place(int64_t slot) const {
    return slot / PANEL * PANEL * key_dim_ + slot % PANEL * 2;
  }

  // A copy with zeros where nobody looks: a weight of zero does not silence what an unwritten slot may
  // hold, for 0 · NaN is NaN.
  Group written(Group group, Slots visible, bfloat16* out) const {
    for (int64_t p = 0; p < value_dim_ / PANEL; p++)
      for (int64_t slot = 0; slot < PANEL; slot += 2) {
        const bool even = visible.begin <= slot && slot < visible.end;
        const bool odd = visible.begin <= slot + 1 && slot + 1 < visible.end;
        const int32_t mask = (even ? 0xffff : 0) | (odd ? int32_t(0xffff0000) : 0);
        for (int64_t half = 0; half < 2; half++) {
          const int64_t place = slot * PANEL + half * 2 * W;
          const vint words = load_words(group.at + p * group.panel + place) & mask;
          std::memcpy(out + p * PANEL_STEP + place, &words, sizeof words);
        }
      }
    return {out, PANEL_STEP};
  }

  const Pages<bfloat16> pages_;
  const int64_t size_, key_dim_, value_dim_;
  const float scaling_;
};

}  // namespace tokenmill

#endif

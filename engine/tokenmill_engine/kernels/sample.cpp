// One token per row of logits on a CPU: the most likely one, the lowest id among ties. Rows are
// split over threads; what a row gives depends on nothing but the row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "vectors.h"

extern "C" {

struct Sample {
  const float* logits;  // [N, V], dense in the last dimension
  int64_t* token_ids;   // [N]; NO_TOKEN for a row whose maximum is not a finite number
  int64_t num_rows, logits_row, vocab;  // N, stride of a row in elements, V
  int32_t num_threads;
};

}  // extern "C"

namespace {

using namespace tokenmill;

constexpr int64_t NO_TOKEN = -1;
constexpr int NUM_MAXIMA = 1024;  // of a row
constexpr int NUM_BLOCKS = NUM_MAXIMA / W;
constexpr int CHAINS = 4;  // of comparisons under way at once
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LARGEST = std::numeric_limits<float>::max();

inline float largest_of(vfloat x) {
  float most = x[0];
  for (int i = 1; i < W; i++) most = std::max(most, x[i]);
  return most;
}

// Up to W numbers, with minus infinity behind them.
inline vfloat load_part(const float* p, int64_t count) {
  if (count >= W) return load(p);
  float part[W];
  std::fill_n(part, W, -INFINITE);
  std::copy_n(p, count, part);
  return load(part);
}

// A row of logits, cut into blocks; of each block, the largest number in every lane of a vector.
class Row {
 public:
  Row(const float* logits, int64_t vocab)
      : logits_(logits), vocab_(vocab), block_((vocab + NUM_MAXIMA - 1) / NUM_MAXIMA * W) {
    vint is_fine = ~vint{};
    vfloat peaks = all(-INFINITE);
    for (int block = 0; block < NUM_BLOCKS; block++) {
      const vfloat most = scan(begin(block), begin(block + 1), is_fine);
      store(maxima_ + block * W, most);
      peaks = larger(most, peaks);
    }
    peak_ = largest_of(peaks);
    is_usable_ = peak_ > -INFINITE;
    for (int i = 0; i < W; i++) is_usable_ &= is_fine[i] != 0;
  }

  // The lowest id among the most likely tokens.
  int64_t most_likely() const {
    if (!is_usable_) return NO_TOKEN;
    const int64_t where = std::find(maxima_, maxima_ + NUM_MAXIMA, peak_) - maxima_;
    return std::find(logits_ + begin(where / W), logits_ + vocab_, peak_) - logits_;
  }

 private:
  int64_t begin(int64_t block) const { return std::min(block * block_, vocab_); }

  // `is_fine` loses the lanes with a NaN or plus infinity.
  vfloat scan(int64_t k, int64_t end, vint& is_fine) const {
    vfloat most[CHAINS];
    vint fine[CHAINS];
    for (int c = 0; c < CHAINS; c++) most[c] = all(-INFINITE), fine[c] = ~vint{};
    for (; k + CHAINS * W <= end; k += CHAINS * W)
      for (int c = 0; c < CHAINS; c++) take(load(logits_ + k + c * W), most[c], fine[c]);
    for (; k < end; k += W) take(load_part(logits_ + k, end - k), most[0], fine[0]);
    for (int c = 1; c < CHAINS; c++) most[0] = larger(most[c], most[0]), fine[0] &= fine[c];
    is_fine &= fine[0];
    return most[0];
  }

  static void take(vfloat x, vfloat& most, vint& fine) {
    fine &= x <= LARGEST;  // not so for a NaN
    most = x > most ? x : most;
  }

  const float* logits_;
  const int64_t vocab_, block_;
  float peak_, maxima_[NUM_MAXIMA];
  bool is_usable_;
};

}  // namespace

extern "C" void tokenmill_sample(const Sample* call) {
  const int threads = int(std::clamp<int64_t>(call->num_rows, 1, std::max(1, call->num_threads)));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < call->num_rows; row++)
    call->token_ids[row] = Row(call->logits + row * call->logits_row, call->vocab).most_likely();
}

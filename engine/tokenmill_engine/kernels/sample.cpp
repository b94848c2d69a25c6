// One token per row of logits on a CPU, by the rules of `draw.py` and with its very numbers: rows are
// split over threads, and what a row gives depends on nothing but the row.
//
// Floating-point numbers are only compared, or come from single IEEE operations (`build.py` keeps the
// compiler from fusing them in this source), among them a fixed polynomial for exp. Sums are of
// integers. So the tokens are the same whatever the width of a vector, and the same as numpy's.
//
// The smallest set of tokens that a filter keeps is found by counting over the digits of their bit
// patterns, as in a radix sort, without sorting anything.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "vectors.h"

extern "C" {

// `settings` has six rows of 8-byte words, see `pack_settings`: seed, position and top-k as
// integers, temperature (0: the most likely token), log of min-p and top-p as float64.
struct Sample {
  const void* logits;       // [N, V] float32 or bfloat16, dense in the last dimension
  const int64_t* settings;  // [6, N], dense; null: all temperatures are 0
  int64_t* token_ids;       // [N]; NO_TOKEN for a row whose maximum is not a finite number
  int64_t num_rows, logits_row, vocab;  // N, stride of a row in elements, V
  int32_t is_bfloat16, num_threads;
};

}  // extern "C"

namespace {

using namespace tokenmill;

constexpr int64_t NO_TOKEN = -1;
constexpr int NUM_MAXIMA = 1024;  // of a row
constexpr int NUM_BLOCKS = NUM_MAXIMA / W;
constexpr int CHAINS = 4;       // of comparisons under way at once
constexpr int64_t RUN = 256;    // tokens whose shares are added up as one
constexpr int64_t NUCLEUS = 512;  // tokens that a nucleus rarely exceeds
constexpr float LOWEST = -28.0f;  // exp(-28) · 2^40 is below 1
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LARGEST = std::numeric_limits<float>::max();

typedef double vdouble __attribute__((vector_size(VECTOR_BYTES)));
typedef float vfloats __attribute__((vector_size(VECTOR_BYTES / 2), aligned(4), may_alias));

inline vdouble load_wide(const float* p) {  // W / 2 numbers
#if defined(__AVX512F__)
  return (vdouble)_mm512_cvtps_pd(_mm256_loadu_ps(p));
#else
  return __builtin_convertvector(*reinterpret_cast<const vfloats*>(p), vdouble);
#endif
}

// Up to W numbers, with minus infinity behind them.
inline vfloat load_part(const float* p, int64_t count) {
  if (count >= W) return load(p);
  float part[W];
  std::fill_n(part, W, -INFINITE);
  std::copy_n(p, count, part);
  return load(part);
}

// Bit i says whether a comparison holds in lane i.
inline uint32_t bits_of(vint holds) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds);
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)holds);
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= uint32_t(holds[i] & 1) << i;
  return bits;
#endif
}

// Code for SSE, such as an interpreter's, is slow while the upper parts of registers are in use, and
// GCC 12 does not see all ways out of a function on which they are.
inline void leave_vectors() {
#if defined(__AVX__)
  _mm256_zeroupper();
#endif
}

struct Settings {
  uint64_t seed, position;
  int64_t top_k;
  double temperature, log_min_p, top_p;

  Settings(const int64_t* words, int64_t stride)
      : seed(words[0]), position(words[stride]), top_k(words[2 * stride]),
        temperature(number(words[3 * stride])), log_min_p(number(words[4 * stride])),
        top_p(number(words[5 * stride])) {}

 private:
  static double number(int64_t word) {
    double result;
    std::memcpy(&result, &word, sizeof result);
    return result;
  }
};

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
    is_usable_ = peak_ > -INFINITE && bits_of(is_fine) == bits_of(~vint{});
  }

  bool is_usable() const { return is_usable_; }
  float peak() const { return peak_; }
  int64_t vocab() const { return vocab_; }
  const float* logits() const { return logits_; }

  // The lowest id among the most likely tokens.
  int64_t most_likely() const {
    const int64_t where = std::find(maxima_, maxima_ + NUM_MAXIMA, peak_) - maxima_;
    return std::find(logits_ + begin(where / W), logits_ + vocab_, peak_) - logits_;
  }

  // A logit above `low` that at least `count` tokens reach, not far below the `count`-th largest;
  // `low` if none is found.
  float reached_by(int64_t count, float low) const {
    float high = peak_;
    for (int halving = 0; halving < 10; halving++) {
      const float middle = low + (high - low) / 2;
      int64_t reaching = 0;  // maxima, each of which is a token's logit or minus infinity
      for (int i = 0; i < NUM_MAXIMA; i += W)
        reaching += __builtin_popcount(bits_of(load(maxima_ + i) >= middle));
      (reaching >= count ? low : high) = middle;
    }
    return low;
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

// trunc(exp(z) · 2^40) for z up to 0: the steps of `shares.py`, one rounding each.
inline vfloat share_of(vfloat z) {
  const float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  z = larger(z, all(-29.0f));
  const vfloat shifted = z * 1.44269504088896341f + MAGIC;
  const vfloat n = shifted - MAGIC;
  const vfloat r = z - n * 0.693359375f + n * 2.12194440e-4f;
  vfloat p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vfloat share = p * (vfloat)(((vint)shifted << 23) + ((127 + 40) << 23));
  // From 2^23 on a float has no fraction.
  const vfloat whole = __builtin_convertvector(__builtin_convertvector(share, vint), vfloat);
  return share < 8388608.0f ? whole : share;
}

// Of so few whole numbers up to 2^40, float64 holds the exact sum.
inline int64_t sum_of_run(const float* shares) {
  vdouble sums[CHAINS] = {};
  for (int64_t i = 0; i < RUN; i += CHAINS * W / 2)
    for (int c = 0; c < CHAINS; c++) sums[c] += load_wide(shares + i + c * (W / 2));
  for (int c = 1; c < CHAINS; c++) sums[0] += sums[c];
  double sum = 0.0;
  for (int lane = 0; lane < W / 2; lane++) sum += sums[0][lane];
  return int64_t(sum);
}

// The number of `noise.uniform` for choice 0.
double uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t first = uint64_t(c[0]) * 0xD2511F53u, second = uint64_t(c[2]) * 0xCD9E8D57u;
    c[0] = uint32_t(second >> 32) ^ c[1] ^ key[0];
    c[1] = uint32_t(second);
    c[2] = uint32_t(first >> 32) ^ c[3] ^ key[1];
    c[3] = uint32_t(first);
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = uint64_t(c[0]) << 20 | c[1] >> 12;
  return (double(bits) + 0.5) * 0x1p-52;
}

// Some tokens of a row in vocabulary order, or all; behind the last, shares of zero end its run.
struct Tokens {
  std::vector<int32_t> ids;  // unless they are all
  std::vector<float> scaled, shares;
  std::vector<int64_t> sums;  // of the shares of runs
  int64_t count = 0;
  bool are_all = false;

  void make_room(int64_t vocab) {
    const int64_t num_runs = (vocab + RUN - 1) / RUN;
    if (int64_t(sums.size()) >= num_runs) return;
    sums.resize(num_runs);
    ids.resize(num_runs * RUN), scaled.resize(num_runs * RUN), shares.resize(num_runs * RUN);
  }

  int64_t total() {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i += RUN) total += sums[i / RUN] = sum_of_run(&shares[i]);
    return total;
  }

  void keep_from(float floor) {  // what is below gets a share of zero
    for (int64_t i = 0; i < count; i += W)
      store(&shares[i], load(&scaled[i]) >= floor ? load(&shares[i]) : vfloat{});
  }

  // The scaled logit of the last token of the smallest set of most likely ones that has `needed`
  // of the mass, or so many members; minus infinity if all have not.
  float floor_of(int64_t needed, bool of_mass) const {
    int64_t sums[2][2048];  // side by side, for neighbours often meet in one place
    uint32_t found = 0;
    for (int digit = 20; digit >= 0; digit -= 10) {  // 11 bits, then twice 10
      std::memset(sums, 0, sizeof sums);
      for (int64_t i = 0; i < count; i++) {
        uint32_t bits;  // the smaller, the likelier the token
        std::memcpy(&bits, &scaled[i], sizeof bits);
        bits &= 0x7fffffff;
        if (digit < 20 && bits >> (digit + 10) != found) continue;
        sums[i & 1][digit < 20 ? bits >> digit & 1023 : bits >> 20] += of_mass ? int64_t(shares[i]) : 1;
      }
      uint32_t place = 0;
      for (; place < 2048; place++) {
        const int64_t sum = sums[0][place] + sums[1][place];
        if (sum >= needed) break;
        needed -= sum;
      }
      if (place == 2048) return -INFINITE;
      found = found << 10 | place;
    }
    float distance;
    std::memcpy(&distance, &found, sizeof distance);
    return -distance;
  }

  // The first token at which the sum of the shares exceeds `target`.
  int64_t invert(int64_t target) const {
    int64_t run = 0;
    while (target >= sums[run]) target -= sums[run++];
    int64_t i = run * RUN;
    while (target >= int64_t(shares[i])) target -= int64_t(shares[i++]);
    return are_all ? i : ids[i];
  }
};

class Draw {
 public:
  Draw(const Row& row, const Settings& settings)
      : row_(row), settings_(settings), temperature_(std::max(float(settings.temperature), 1e-30f)) {}

  int64_t token() {
    const int64_t top_k = settings_.top_k < row_.vocab() ? settings_.top_k : 0;
    const bool has_top_p = settings_.top_p < 1.0;
    const bool is_short = top_k || settings_.log_min_p > -INFINITE;
    Tokens* tokens;
    if (is_short) {
      float floor = std::max(LOWEST, float(settings_.log_min_p));
      tokens = &few(top_k ? std::max(floor, reached_by(top_k)) : floor);
      if (top_k) tokens->keep_from(std::max(floor, tokens->floor_of(top_k, false)));
    } else {
      tokens = &all();
    }
    int64_t total = tokens->total();
    if (has_top_p) {
      const int64_t needed = std::max<int64_t>(std::ceil(settings_.top_p * double(total)), 1);
      if (!is_short) tokens = &enough(needed);
      tokens->keep_from(tokens->floor_of(needed, true));
      total = tokens->total();
    }
    const double number = uniform(settings_.seed, settings_.position) * double(total);
    return tokens->invert(std::min(int64_t(number), total - 1));  // it may round up to the total
  }

 private:
  // The peak goes first: a tiny temperature then overflows to -inf, never to inf - inf.
  float scaled(float logit) const { return (logit - row_.peak()) / temperature_; }
  vfloat scaled(vfloat logits) const { return (logits - row_.peak()) / temperature_; }

  float reached_by(int64_t count) const {
    return scaled(row_.reached_by(count, row_.peak() + LOWEST * temperature_));
  }

  // Tokens that hold `needed` of the mass: some of the most likely, as a rule.
  Tokens& enough(int64_t needed) {
    Tokens& likely = few(std::max(LOWEST, reached_by(NUCLEUS)));
    if (likely.total() >= needed) return likely;
    Tokens& tokens = every_token;
    for (int64_t k = 0; k < tokens.count; k += W)
      store(&tokens.scaled[k], scaled(load_part(row_.logits() + k, row_.vocab() - k)));
    return tokens;
  }

  // All tokens, for the time being without their scaled logits.
  Tokens& all() {
    Tokens& tokens = every_token;
    tokens.make_room(row_.vocab());
    tokens.count = row_.vocab(), tokens.are_all = true;
    for (int64_t k = 0; k < tokens.count; k += W)
      store(&tokens.shares[k], share_of(scaled(load_part(row_.logits() + k, tokens.count - k))));
    end_run(tokens);
    return tokens;
  }

  // The tokens whose scaled logit is at least `floor`; others may be among them, without a share.
  Tokens& few(float floor) {
    Tokens& tokens = some_tokens;
    tokens.make_room(row_.vocab());
    // By the logit itself, by a bound so low that no rounding matters, and only then scaled.
    const double peak = row_.peak(), exact = peak + double(floor) * temperature_;
    const double slack = 0x1p-20 * (std::abs(peak) + std::abs(exact)) + 0x1p-126 * temperature_;
    const vfloat least = tokenmill::all(float(std::max<double>(exact - slack, -LARGEST)));
    int64_t count = 0;
    for (int64_t k = 0; k < row_.vocab(); k += W) {
      uint32_t bits = bits_of(load_part(row_.logits() + k, row_.vocab() - k) >= least);
      for (; bits; bits &= bits - 1, count++) {
        tokens.ids[count] = int32_t(k + __builtin_ctz(bits));
        tokens.scaled[count] = row_.logits()[tokens.ids[count]];
      }
    }
    tokens.count = count;
    for (int64_t i = 0; i < count; i += W) {
      const vfloat z = scaled(load(&tokens.scaled[i]));
      store(&tokens.scaled[i], z);
      store(&tokens.shares[i], share_of(z));
    }
    tokens.keep_from(floor);
    end_run(tokens);
    return tokens;
  }

  static void end_run(Tokens& tokens) {
    for (int64_t i = tokens.count; i % RUN; i++) tokens.shares[i] = 0.0f;
  }

  // Memory that a thread keeps from row to row.
  static thread_local Tokens every_token, some_tokens;
  const Row& row_;
  const Settings& settings_;
  const float temperature_;
};

thread_local Tokens Draw::every_token, Draw::some_tokens;

// Logits in float32; those in bfloat16 are widened into memory that a thread keeps.
const float* logits_of(const Sample& call, int64_t number) {
  const int64_t place = number * call.logits_row;
  if (!call.is_bfloat16) return static_cast<const float*>(call.logits) + place;
  static thread_local std::vector<float> wide;
  wide.resize(call.vocab);
  copy(static_cast<const bfloat16*>(call.logits) + place, call.vocab, wide.data());
  return wide.data();
}

int64_t token_of(const Sample& call, int64_t number) {
  const Row row(logits_of(call, number), call.vocab);
  if (!row.is_usable()) return NO_TOKEN;
  if (!call.settings) return row.most_likely();
  const Settings settings(call.settings + number, call.num_rows);
  return settings.temperature > 0.0 ? Draw(row, settings).token() : row.most_likely();
}

}  // namespace

extern "C" {

void tokenmill_sample(const Sample* call) {
  const int threads = int(std::clamp<int64_t>(call->num_rows, 1, std::max(1, call->num_threads)));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < call->num_rows; row++) {
    call->token_ids[row] = token_of(*call, row);
    leave_vectors();
  }
}

// The shares of scaled logits up to 0: what tests hold against those of numpy.
void tokenmill_shares(const float* scaled, int64_t count, float* shares) {
  for (int64_t i = 0; i < count; i += W) {
    const vfloat some = share_of(load_part(scaled + i, count - i));
    std::copy_n(reinterpret_cast<const float*>(&some), std::min<int64_t>(W, count - i), shares + i);
  }
}

}  // extern "C"

// What the kernels share: the widest vectors of this processor, and bfloat16.

#pragma once

#include <cstdint>
#include <cstring>

namespace tokenmill {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
constexpr int MOST_ROWS = 12;  // of a register block two vectors wide: 24 accumulators of 32
#else
constexpr int VECTOR_BYTES = 32;
constexpr int MOST_ROWS = 6;  // 12 accumulators of 16
#endif
constexpr int W = VECTOR_BYTES / sizeof(float);

typedef float vfloat __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vint __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vuint __attribute__((vector_size(VECTOR_BYTES)));
// In memory: at any address, and through pointers to other types.
typedef float vfloat_u __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t vint_u __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t vhalf_u __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));

struct bfloat16 { uint16_t bits; };

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bfloat16* out) {  // round to nearest, ties to even, as torch does
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline vfloat load(const float* p) { return *reinterpret_cast<const vfloat_u*>(p); }
inline vint load_words(const void* p) { return *static_cast<const vint_u*>(p); }
inline vfloat load(const bfloat16* p) {
  const vint wide = __builtin_convertvector(*reinterpret_cast<const vhalf_u*>(p), vint);
  return (vfloat)(wide << 16);
}
inline void store(float* p, vfloat x) { *reinterpret_cast<vfloat_u*>(p) = x; }
inline vfloat all(float x) { return x - vfloat{}; }
inline vfloat choose(vint mask, vfloat yes, vfloat no) {
  return (vfloat)((mask & (vint)yes) | (~mask & (vint)no));
}
inline vfloat larger(vfloat a, vfloat b) { return choose(a > b, a, b); }
inline float sum_of(vfloat x) {
  float sum = 0.0f;
  for (int i = 0; i < W; i++) sum += x[i];
  return sum;
}

// Keeps a value in a register where the compiler would rather read it from memory at each use.
inline void keep(vfloat& x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  (void)x;
#endif
}

constexpr int LINE_BYTES = 64;  // of the caches; where they are longer, some hints are idle

// Brings the line of this address into the L2 cache, or near to be written. Any address may be given.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }

// Cephes' expf: 2^n · P(r) with r = x - n·ln 2. Below -87 the result is 0, for -infinity too; NaN
// stays NaN, so that a broken model shows. x is at most 88.
inline vfloat exponential(vfloat x) {
  const float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  vfloat shifted = x * 1.44269504088896341f + MAGIC;
  vfloat n = shifted - MAGIC;
  vfloat r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vfloat p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  vint scale = ((vint)shifted << 23) + 0x3f800000;
  return choose(x < -87.0f, vfloat{}, p * (vfloat)scale);
}

}  // namespace tokenmill

// What the kernels share: the widest vectors of this processor, and bfloat16.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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

typedef uint16_t vhalf __attribute__((vector_size(VECTOR_BYTES / 2)));

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
#if defined(__AVX512F__)  // one instruction, of which compilers make several
  __m256i halves;
  std::memcpy(&halves, p, sizeof halves);
  return (vfloat)((vint)_mm512_cvtepu16_epi32(halves) << 16);
#else
  const vint wide = __builtin_convertvector(*reinterpret_cast<const vhalf_u*>(p), vint);
  return (vfloat)(wide << 16);
#endif
}
inline void store(float* p, vfloat x) { *reinterpret_cast<vfloat_u*>(p) = x; }
inline vfloat all(float x) { return x - vfloat{}; }
inline vfloat choose(vint mask, vfloat yes, vfloat no) {
  return (vfloat)((mask & (vint)yes) | (~mask & (vint)no));
}
// A whole vector rounded as from_float() does, but for numbers below 2^-126, which some processors take
// for zero here.
inline void store(bfloat16* p, vfloat x) {
#if defined(__AVX512BF16__)
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &halves, sizeof halves);
#else
  const vuint bits = (vuint)x, kept = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const vint halves = x == x ? (vint)kept : vint{} + 0x7fc0;
  *reinterpret_cast<vhalf_u*>(p) = __builtin_convertvector(halves, vhalf);
#endif
}
inline void store(float* p, vfloat x, vfloat y) { store(p, x), store(p + W, y); }
inline void store(bfloat16* p, vfloat x, vfloat y) {
#if defined(__AVX512BF16__)
  const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
  std::memcpy(p, &halves, sizeof halves);
#else
  store(p, x), store(p + W, y);
#endif
}
inline vfloat in_bfloat16(vfloat x) {
#if defined(__AVX512BF16__)
  return (vfloat)((vint)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)) << 16);
#else
  bfloat16 halves[W];
  store(halves, x);
  return load(halves);
#endif
}
// 1 / x, but for the last bit or two.
inline vfloat reciprocal(vfloat x) {
#if defined(__AVX512F__)  // a division takes as long as a dozen products
  const vfloat guess = (vfloat)_mm512_rcp14_ps((__m512)x);
  return guess * (2.0f - x * guess);
#else
  return 1.0f / x;
#endif
}
// Numbers to another type, or the same.
template <class X, class Y>
void copy(const X* x, int64_t count, Y* out) {
  int64_t k = 0;
  for (; k + W <= count; k += W) store(out + k, load(x + k));
  for (; k < count; k++) from_float(to_float(x[k]), out + k);
}

inline vfloat larger(vfloat a, vfloat b) {  // b where either is NaN
#if defined(__AVX512F__)
  return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return choose(a > b, a, b);
#endif
}
inline float sum_of(vfloat x) {
#if defined(__AVX512F__)  // half by half, in fewer steps one after the other
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0.0f;
  for (int i = 0; i < W; i++) sum += x[i];
  return sum;
#endif
}
inline float largest_of(vfloat x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float largest = x[0];
  for (int i = 1; i < W; i++) largest = x[i] > largest ? x[i] : largest;
  return largest;
#endif
}

// Keeps a value in a register where the compiler would rather read it from memory at each use.
inline void keep(vfloat& x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  (void)x;
#endif
}

// Where rows of numbers start, and how many numbers apart they lie.
template <class T>
struct Matrix { T* at; int64_t row; };

constexpr int LINE_BYTES = 64;  // of the caches; where they are longer, some hints are idle

// Brings the line of this address into the L2 cache, or near to be written. Any address may be given.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }

}  // namespace tokenmill

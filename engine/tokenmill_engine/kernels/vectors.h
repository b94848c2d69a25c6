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
// In memory: at any address, and through pointers to other types.
typedef float vfloat_u __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
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

}  // namespace tokenmill

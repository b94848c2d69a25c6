// Exponential functions of whole vectors.

#pragma once

#include <cstdint>

#include "vectors.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace tokenmill {

// 2^n · p for whole n, or 0 for n below -126. NaN stays NaN, so that a broken model shows.
#if defined(__AVX512DQ__)
inline vfloat nearest(vfloat x) { return (vfloat)_mm512_roundscale_ps((__m512)x, 0); }
inline vfloat remainder(vfloat x) { return (vfloat)_mm512_reduce_ps((__m512)x, 0); }
inline vfloat scaled(vfloat p, vfloat n) {
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)n, (__m512)all(-126.0f), _CMP_NLT_UQ);
  return (vfloat)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)n);
}
#else
constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
inline vfloat nearest(vfloat x) { return (x + MAGIC) - MAGIC; }
inline vfloat remainder(vfloat x) { return x - nearest(x); }
inline vfloat scaled(vfloat p, vfloat n) {
  const vint scale = ((vint)(n + MAGIC) << 23) + 0x3f800000;
  return choose(n < -126.0f, vfloat{}, p * (vfloat)scale);
}
#endif

// Cephes' expf: 2^n · P(r) with r = x - n·ln 2. Below -87.6 the result is 0, for -infinity too.
// x is at most 88.
inline vfloat exponential(vfloat x) {
  const vfloat n = nearest(x * 1.44269504088896341f);
  vfloat r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vfloat p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return scaled(p, n);
}

// 2^x with a relative error of 3e-6, for what is rounded to bfloat16: the polynomial whose largest
// relative error over [-1/2, 1/2] is the smallest. Below -126.5 the result is 0, for -infinity too.
inline vfloat power_of_two(vfloat x) {
  const vfloat r = remainder(x);
  vfloat p = all(9.5701014e-3f);
  p = p * r + 5.5917860e-2f;
  p = p * r + 2.4024745e-1f;
  p = p * r + 6.9312181e-1f;
  p = p * r + 9.9999926e-1f;
  return scaled(p, x - r);
}

}  // namespace tokenmill

// Small matrix products over one page of the cache, in registers.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace tokenmill {

#if defined(__AVX512F__)
constexpr int MOST_WIDE_ROWS = 6;  // of a register block four vectors wide
#else
constexpr int MOST_WIDE_ROWS = 3;
#endif

// C[ROWS][VECTORS * W] += A[ROWS][k] · B[k][VECTORS * W], each sum in the order of k. On the way,
// what lies `ahead` bytes behind B is brought into the cache, row by row.
template <int ROWS, int VECTORS, class T>
inline void register_block(const float* a, int64_t lda, const T* b, int64_t ldb, float* c,
                           int64_t ldc, int64_t k, int64_t ahead) {
  constexpr int ROW_BYTES = VECTORS * W * int(sizeof(T));
  vfloat sum[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < VECTORS; j++) sum[m][j] = load(c + m * ldc + j * W);
  for (int64_t x = 0; x < k; x++) {
    vfloat row[VECTORS];
    const char* next = reinterpret_cast<const char*>(b + x * ldb) + ahead;
    for (int byte = 0; byte < ROW_BYTES; byte += LINE_BYTES) prefetch(next + byte);
    for (int j = 0; j < VECTORS; j++) row[j] = load(b + x * ldb + j * W);
    for (int m = 0; m < ROWS; m++) {
      const vfloat factor = all(a[m * lda + x]);
      for (int j = 0; j < VECTORS; j++) sum[m][j] += factor * row[j];
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int j = 0; j < VECTORS; j++) store(c + m * ldc + j * W, sum[m][j]);
}

template <int ROWS, int VECTORS, class T>
void few_rows(int64_t rows, const float* a, int64_t lda, const T* b, int64_t ldb, float* c,
              int64_t ldc, int64_t k, int64_t ahead) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) register_block<ROWS, VECTORS>(a, lda, b, ldb, c, ldc, k, ahead);
    else few_rows<ROWS - 1, VECTORS>(rows, a, lda, b, ldb, c, ldc, k, ahead);
  }
}

// All rows, in register blocks of nearly the same height.
template <int MOST, int VECTORS, class T>
void column_block(const float* a, int64_t lda, int64_t rows, const T* b, int64_t ldb, float* c,
                  int64_t ldc, int64_t k, int64_t ahead) {
  const int64_t tiles = (rows + MOST - 1) / MOST;
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t m = rows * tile / tiles, end = rows * (tile + 1) / tiles;
    few_rows<MOST, VECTORS>(end - m, a + m * lda, lda, b, ldb, c + m * ldc, ldc, k,
                            tile ? 0 : ahead);
  }
}

// C[rows][n] += A[rows][k] · B[k][n]; `next` is where a matrix like B lies that is wanted soon.
template <class T>
void multiply(const float* a, int64_t lda, int64_t rows, const T* b, int64_t ldb, int64_t n,
              float* c, int64_t ldc, int64_t k, const T* next) {
  const int64_t ahead = int64_t(reinterpret_cast<uintptr_t>(next))
                      - int64_t(reinterpret_cast<uintptr_t>(b));
  int64_t j = 0;
  if (rows <= MOST_WIDE_ROWS)  // few rows: wider blocks, so that enough sums are under way
    for (; j + 4 * W <= n; j += 4 * W)
      column_block<MOST_WIDE_ROWS, 4>(a, lda, rows, b + j, ldb, c + j, ldc, k, ahead);
  for (; j + 2 * W <= n; j += 2 * W)
    column_block<MOST_ROWS, 2>(a, lda, rows, b + j, ldb, c + j, ldc, k, ahead);
  for (; j + W <= n; j += W)
    column_block<MOST_ROWS, 1>(a, lda, rows, b + j, ldb, c + j, ldc, k, ahead);
  for (; j < n; j++)
    for (int64_t m = 0; m < rows; m++) {
      float sum = c[m * ldc + j];
      for (int64_t x = 0; x < k; x++) sum += a[m * lda + x] * to_float(b[x * ldb + j]);
      c[m * ldc + j] = sum;
    }
}

}  // namespace tokenmill

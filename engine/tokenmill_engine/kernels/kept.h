// Memory that threads keep from call to call.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace tokenmill {

enum Kept { PREPARED, SUMS, MORE_SUMS, ROW, HALVES, QUERIES, SCORES, WEIGHTS, EDGES, OUTPUTS, KINDS };

// Room for `count` numbers of type T at the start of a cache line, as they were left by the last
// caller of this thread who kept the same.
template <class T>
T* kept(Kept which, int64_t count) {
  struct alignas(LINE_BYTES) Line { char bytes[LINE_BYTES]; };
  static thread_local std::vector<Line> buffers[KINDS];
  const size_t lines = (size_t(count) * sizeof(T) + LINE_BYTES - 1) / LINE_BYTES;
  if (buffers[which].size() < lines) buffers[which].resize(lines);
  return reinterpret_cast<T*>(buffers[which].data());
}

}  // namespace tokenmill

// What is read soon, brought near a few lines at a time, beside other work: a core has few requests to memory
// under way, and whoever asks for many at once waits for them like a reader.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "vectors.h"

namespace tokenmill {

class Ahead {
 public:
  static constexpr int64_t MOST_PIECES = 8;

  // All pieces are of one size.
  void add(const void* piece, int64_t bytes) {
    pieces_[count_++] = static_cast<const char*>(piece);
    bytes_ = bytes;
  }
  // Ask for all of it in this many calls, or for as much as they reach with a piece in each.
  void spread(int64_t calls) {
    if (!count_) return;
    const int64_t calls_each = std::max<int64_t>(1, calls / count_);
    const int64_t lines = (bytes_ + LINE_BYTES - 1) / LINE_BYTES;
    portion_ = (lines + calls_each - 1) / calls_each * LINE_BYTES;
    go_to(0);
  }
  void operator()() {
    if (at_ == end_) return;
    const char* stop = std::min(at_ + portion_, end_);
    for (; at_ < stop; at_ += LINE_BYTES) prefetch(at_);
    if (stop == end_) go_to(piece_ + 1);
  }

 private:
  void go_to(int64_t piece) {
    piece_ = piece;
    at_ = piece < count_ ? pieces_[piece] : nullptr;
    end_ = at_ ? at_ + bytes_ : nullptr;
  }

  std::array<const char*, MOST_PIECES> pieces_;
  int64_t count_ = 0, bytes_ = 0, portion_ = 0, piece_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;  // of the piece where the next call goes on
};

}  // namespace tokenmill

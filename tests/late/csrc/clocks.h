// Agents (streams of every device, and the host), their vector clocks, and ranges of memory.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace late {

constexpr int kDevices = 4;
// Torch's: the default stream, and for each priority a pool of 32 that is given out in turn.
constexpr int kPool = 32, kPriorities = 3;
constexpr int kStreamsEach = 1 + kPriorities * kPool;
constexpr int kStreams = kDevices * kStreamsEach;
constexpr int kHost = kStreams;
constexpr int kAgents = kStreams + 1;

// clock[a]: the last task of agent a that is known to be over.
using Clock = std::array<uint64_t, kAgents>;

inline void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kAgents; i++) into[i] = std::max(into[i], other[i]);
}

// A moment of a stream: all its tasks up to `number`, and what they had waited for.
struct Event {
  int stream = -1;
  uint64_t number = 0;
  Clock clock{};
  double time = 0;  // seconds of simulated time
  const void* graph = nullptr;  // in whose capture it was recorded
};

// Bytes of visible addresses: [lo, hi), or rows of `width` bytes each `stride` bytes apart in it.
struct Span {
  char *lo, *hi;
  bool write;
  size_t width = 0, stride = 0;  // stride 0: every byte

  bool empty() const { return lo >= hi; }
  bool overlaps(const Span& other) const;
  bool covers(const Span& other) const;
};

inline bool Span::covers(const Span& other) const {
  if (other.lo < lo || other.hi > hi) return false;
  return !stride || (stride == other.stride && width >= other.width && lo == other.lo);
}

inline bool Span::overlaps(const Span& other) const {
  if (lo >= other.hi || other.lo >= hi) return false;
  if (!stride && !other.stride) return true;
  if (stride && other.stride && stride != other.stride) return true;  // taken as one range
  size_t step = stride ? stride : other.stride;
  size_t mine = stride ? width : size_t(hi - lo), theirs = other.stride ? other.width
                                                                       : size_t(other.hi - other.lo);
  if (mine >= step || theirs >= step) return true;
  ptrdiff_t apart = (other.lo - lo) % ptrdiff_t(step);
  size_t phase = size_t(apart < 0 ? apart + ptrdiff_t(step) : apart);
  return phase < mine || phase + theirs > step;
}

}  // namespace late

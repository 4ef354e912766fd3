// Division of a range into work items of threads, and pointers that Python passes as numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "pool.h"

namespace hfz {

// Call each(part, begin, end) for the parts of [0, numel); parts end where the index in the whole is a multiple of `size`.
template <class Each>
void over_parts(int64_t numel, int64_t first, const Each& each, int64_t size = kPart) {
    if (numel <= 0) return;
    const int64_t head = first % size;
    Pool::shared().run((head + numel + size - 1) / size, [&](int64_t part) {
        const int64_t begin = std::max<int64_t>(0, part * size - head), end = std::min(numel, (part + 1) * size - head);
        each(part, begin, end);
    });
}

// The same if the cut does not affect the result: parts as long as possible with a few for each
// thread, because the hardware prefetcher restarts at the beginning of each.
template <class Each>
void over_long_parts(int64_t numel, int64_t first, const Each& each) {
    const int64_t share = numel / (4 * Pool::shared().size()) / kPart * kPart;
    over_parts(numel, first, each, std::clamp<int64_t>(share, kPart, kLongPart));
}

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// From this size on an array exceeds the caches, and results may bypass them.
constexpr int64_t kLarge = int64_t{1} << 20;

}  // namespace hfz

// How a range is cut into turns of threads, and pointers that come from Python as numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "pool.h"

namespace hfz {

// Call each(part, begin, end) for the parts of [0, numel); parts end where the index in the whole is a multiple of kPart.
template <class Each>
void over_parts(int64_t numel, int64_t first, const Each& each) {
    if (numel <= 0) return;
    const int64_t head = first % kPart;
    Pool::shared().run((head + numel + kPart - 1) / kPart, [&](int64_t part) {
        const int64_t begin = std::max<int64_t>(0, part * kPart - head), end = std::min(numel, (part + 1) * kPart - head);
        each(part, begin, end);
    });
}

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// From here on an array is larger than the caches, and what is written need not pass through them.
constexpr int64_t kLarge = int64_t{1} << 20;

}  // namespace hfz

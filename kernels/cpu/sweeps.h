// Single passes over an array: norms, casts, sums, blocks. Included after tiles.h.
#pragma once

#include "tiles.h"

namespace hfz {
namespace HFZ_SET {

// Sum in double: 32 running sums, element i into sum i % 32, added up pair by pair at the end, so
// that every instruction set rounds equally.
static double squares(const Array& from, int64_t begin, int64_t end) {
    constexpr int half = W / 2, groups = 32 / half;
    typedef float Few __attribute__((vector_size(4 * half)));
    typedef double D __attribute__((vector_size(8 * half)));
    alignas(64) float room[kTile];
    D sums[groups] = {};
    const auto add = [&](const float* p) {
        for (int j = 0; j < groups; ++j) {
            Few x;
            __builtin_memcpy(&x, p + half * j, sizeof x);
            const D d = __builtin_convertvector(x, D);
            sums[j] += d * d;
        }
    };
    over_tiles(-begin, begin, end, [&](int64_t at, int n) {
        const float* p = as_floats(room, from, at, n);
        int i = 0;
        for (; i + 32 <= n; i += 32) add(p + i);
        if (i < n) {
            float last[32] = {};
            __builtin_memcpy(last, p + i, (n - i) * sizeof(float));
            add(last);
        }
    });
    double lanes[32];
    __builtin_memcpy(lanes, sums, sizeof lanes);
    for (int width = 16; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    return lanes[0];
}

static void cast(const Array& out, const Array& source, float scale, bool stream, int64_t begin, int64_t end) {
    alignas(64) float room[kTile];
    over_tiles(0, begin, end, [&](int64_t at, int n) {
        const float* p = as_floats(room, source, at, n);
        if (scale != 1.0f) {
            over_vectors(n, [&](int i, int k) { store(room + i, load<F>(p + i, k) * scale, k); });
            p = room;
        }
        narrow(out, p, at, n, stream);
    });
    end_of_stream(stream);
}

static void accumulate(float* out, const Array& source, float scale, int64_t begin, int64_t end) {
    alignas(64) float room[kTile];
    over_tiles(0, begin, end, [&](int64_t at, int n) {
        const float* p = as_floats(room, source, at, n);
        float* const sum = out + at;
        over_vectors(n, [&](int i, int k) { store(sum + i, load<F>(sum + i, k) + load<F>(p + i, k) * scale, k); });
    });
}

static void round_stochastically(uint16_t* out, const float* source, uint64_t key, int64_t first, int64_t begin, int64_t end) {
    over_tiles(first, begin, end, [&](int64_t at, int n) { keep_moment({out, BF16, nullptr}, source + at, at, n, first + at, key, false); });
}

static void encode(const Moment& out, const float* source, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kBlock)
        encode_any<false>(out, source + at, at, static_cast<int>(end - at < kBlock ? end - at : kBlock), {}, 0);
}

static void decode(float* out, const Moment& source, int64_t begin, int64_t end) {
    over_tiles(0, begin, end, [&](int64_t at, int n) { moment(out + at, source, at, n); });
}

}  // namespace HFZ_SET
}  // namespace hfz

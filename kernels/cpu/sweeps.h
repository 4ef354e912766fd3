// Single passes over an array: norms, non-finite values, casts, sums, checksums. Included after
// tiles.h.
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

template <class V, class T>
HFZ_INLINE bool no_exponent_is_full(const T* from, int64_t n, T exponent) {
    V full{};
    int64_t i = 0;
    for (; i + W <= n; i += W) full |= (V)((load<V>(from + i, W) & exponent) == exponent);
    if (i < n) full |= (V)((load<V>(from + i, static_cast<int>(n - i)) & exponent) == exponent);
    T found = 0;
    for (int j = 0; j < W; ++j) found |= full[j];
    return found == 0;
}

static bool finite(const Array& from, int64_t begin, int64_t end) {
    if (from.kind == F32) return no_exponent_is_full<U, uint32_t>(static_cast<const uint32_t*>(from.data) + begin, end - begin, 0x7f800000u);
    const uint16_t exponent = from.kind == BF16 ? 0x7f80 : 0x7c00;
    return no_exponent_is_full<H, uint16_t>(static_cast<const uint16_t*>(from.data) + begin, end - begin, exponent);
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

// Hash by eight lanes of XXH64's rounds (Collet, xxhash.com) and a finish that adds the remaining
// bytes one by one.
#if defined(__GNUC__) && !defined(__clang__) && HFZ_WIDTH < 16
__attribute__((optimize("no-tree-vectorize")))  // without a 64-bit product of vectors, lanes in general registers are faster
#endif
static uint64_t checksum(const uint8_t* data, int64_t bytes) {
    constexpr uint64_t p1 = 0x9e3779b185ebca87ull, p2 = 0xc2b2ae3d27d4eb4full, p3 = 0x165667b19e3779f9ull;
    uint64_t lanes[8];
    for (int j = 0; j < 8; ++j) lanes[j] = p3 * (j + 1);
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        uint64_t words[8];
        __builtin_memcpy(words, data + i, sizeof words);
        for (int j = 0; j < 8; ++j) {
            const uint64_t x = lanes[j] + words[j] * p2;
            lanes[j] = ((x << 31) | (x >> 33)) * p1;
        }
    }
    uint64_t sum = static_cast<uint64_t>(bytes) * p1;
    for (int j = 0; j < 8; ++j) {
        sum ^= lanes[j];
        sum = ((sum << 27) | (sum >> 37)) * p1 + p2;
    }
    for (; i < bytes; ++i) {
        sum ^= data[i] * p3;
        sum = ((sum << 11) | (sum >> 53)) * p1;
    }
    sum = (sum ^ (sum >> 33)) * p2;
    sum = (sum ^ (sum >> 29)) * p3;
    return sum ^ (sum >> 32);
}

}  // namespace HFZ_SET
}  // namespace hfz

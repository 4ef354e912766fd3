// Conversion of arrays of any kind by tiles: into fp32 in the first-level cache, and back. Included
// after rounding.h.
#pragma once

#include "rounding.h"

namespace hfz {
namespace HFZ_SET {

// Call each(at, n) for the tiles of [begin, end). Tiles end where the index in the whole is a
// multiple of kTile, however the range was cut, so that no tile crosses a multiple of 2^32.
template <class Each>
HFZ_INLINE void over_tiles(int64_t first, int64_t begin, int64_t end, Each each) {
    for (int64_t at = begin; at < end;) {
        const int64_t room = kTile - (first + at) % kTile;
        const int n = static_cast<int>(end - at < room ? end - at : room);
        each(at, n);
        at += n;
    }
}

HFZ_INLINE void widen(float* to, const Array& from, int64_t at, int n) {
    if (from.kind == F32) {
        const float* p = static_cast<const float*>(from.data) + at;
        over_vectors(n, [&](int i, int k) { store(to + i, load<F>(p + i, k), k); });
    } else if (from.kind == BF16) {
        const uint16_t* p = static_cast<const uint16_t*>(from.data) + at;
        over_vectors(n, [&](int i, int k) { store(to + i, from_bf16(load<H>(p + i, k)), k); });
    } else {
        const uint16_t* p = static_cast<const uint16_t*>(from.data) + at;
        over_vectors(n, [&](int i, int k) { store(to + i, from_f16(load<H>(p + i, k)), k); });
    }
}

// Return the elements in fp32: in place if they are fp32, else in `room`.
HFZ_INLINE const float* as_floats(float* room, const Array& from, int64_t at, int n) {
    if (from.kind == F32) return static_cast<const float*>(from.data) + at;
    widen(room, from, at, n);
    return room;
}

// Prefetch the element kAhead behind `here`. The address may be out of bounds: a prefetch does not
// fault.
HFZ_INLINE void soon(const float* here) { __builtin_prefetch(here + kAhead); }

// Store whole vectors past the caches: another reader uses them, and the cache lines need not be
// read before they are written.
template <class V, class T>
HFZ_INLINE void store_past(T* to, V x) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    if constexpr (sizeof(V) == 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)x);
    else
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)x);
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    if constexpr (sizeof(V) == 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)x);
    else
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)x);
#elif HFZ_WIDTH == 4 && defined(__SSE2__)
    if constexpr (sizeof(V) == 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)x);
    else
        store(to, x, W);
#else
    store(to, x, W);
#endif
}

template <class V, class T, class Make>
HFZ_INLINE void fill(T* to, int n, bool stream, Make make) {
    if (stream && reinterpret_cast<uintptr_t>(to) % sizeof(V) == 0) {
        int i = 0;
        for (; i + W <= n; i += W) store_past(to + i, make(i, W));
        if (i < n) store(to + i, make(i, n - i), n - i);
    } else {
        over_vectors(n, [&](int i, int k) { store(to + i, make(i, k), k); });
    }
}

HFZ_INLINE void narrow(const Array& to, const float* from, int64_t at, int n, bool stream) {
    if (to.kind == F32) {
        fill<F>(static_cast<float*>(to.data) + at, n, stream, [&](int i, int k) { return load<F>(from + i, k); });
    } else if (to.kind == BF16) {
        fill<H>(static_cast<uint16_t*>(to.data) + at, n, stream, [&](int i, int k) { return to_bf16(load<F>(from + i, k)); });
    } else {
        fill<H>(static_cast<uint16_t*>(to.data) + at, n, stream, [&](int i, int k) { return to_f16(load<F>(from + i, k)); });
    }
}

HFZ_INLINE void end_of_stream(bool stream) {
#if defined(__SSE2__)
    if (stream) _mm_sfence();
#else
    (void)stream;
#endif
}

HFZ_INLINE float* moment(float* room, const Moment& from, int64_t at, int n) {
    if (from.kind == F32) return static_cast<float*>(from.data) + at;
    if (from.kind == BF16) {
        widen(room, {from.data, BF16}, at, n);
        return room;
    }
    for (int i = 0; i < n; i += kBlock) decode_any(room + i, from, at + i, n - i < kBlock ? n - i : kBlock);
    return room;
}

// Write the moment back to its array; of two moments one takes the lower random bits, the one
// without a sign the upper.
HFZ_INLINE void keep_moment(const Moment& to, const float* x, int64_t at, int n, int64_t index, uint64_t key, bool upper) {
    if (to.kind == F32) return;
    const Key tile = key_of_tile(key, index);
    const uint32_t low = static_cast<uint32_t>(index);
    if (to.kind == BF16) {
        uint16_t* p = static_cast<uint16_t*>(to.data) + at;
        over_vectors(n, [&](int i, int k) {
            const U random = random_bits(tile, low + i);
            store(p + i, to_bf16_stochastic(load<F>(x + i, k), upper ? random >> 16 : random & 0xffffu), k);
        });
        return;
    }
    for (int i = 0; i < n; i += kBlock) encode_any<true>(to, x + i, at + i, n - i < kBlock ? n - i : kBlock, tile, low + i);
}

}  // namespace HFZ_SET
}  // namespace hfz

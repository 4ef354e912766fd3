// Stochastic rounding and 8-bit blocks; included inside each instruction set's file, after vec.h.
//
// Rounding up with the probability of the cut-off part keeps sums of small additions right on
// average where rounding to nearest would lose them (Gupta et al. 2015, arXiv:1502.02551). The
// random number of an element is a hash of the key and of the element's index in the whole, so it
// does not depend on how the work was cut.
//
// An 8-bit block is kBlock elements with one fp32 scale, the largest magnitude among them, and a
// code each: block-wise dynamic quantization (Dettmers et al. 2021, arXiv:2110.02861) with eight
// codes to an octave. The top code is 1, so the largest element is kept exactly; code 0 is 0; the
// smallest other code is 1.25 * 2^-16 with a sign bit and 1.25 * 2^-32 without. Without a sign, an
// element that is not 0 never becomes 0, since it is used in a divisor.
#pragma once

#include "vec.h"

namespace hfz {
namespace HFZ_SET {

struct Key {
    uint32_t a, b;
};

// SplitMix64's finalizer (Steele et al. 2014).
HFZ_INLINE Key key_of_tile(uint64_t key, int64_t index) {
    uint64_t x = key + (static_cast<uint64_t>(index) >> 32) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

// Return 32 random bits for W consecutive elements: the 32-bit finalizer of MurmurHash3, keyed at
// both ends.
HFZ_INLINE U random_bits(Key key, uint32_t index) {
    U lanes;
    for (int i = 0; i < W; ++i) lanes[i] = i;
    U x = (lanes + index) ^ key.a;
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13) ^ key.b) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// Round to bf16 stochastically; `random` is below 2^16.
HFZ_INLINE H to_bf16_stochastic(F x, U random) {
    const U bits = (U)x;
    const U rounded = choose((bits & 0x7f800000u) == 0x7f800000u, bits, bits + random) >> 16;
    const U quiet = (bits >> 16) | 0x40u;
    return narrowed(choose((bits & 0x7fffffffu) > 0x7f800000u, quiet, rounded));
}

constexpr float kSmallestScale = 0x1p-90f;  // below it a block is zero: its smallest codes would not be normal numbers

template <bool SIGNED>
struct Code {
    static constexpr uint32_t top = SIGNED ? 127 : 255;
    static constexpr uint32_t below = (0x3f800000u >> 20) - top;  // code k is the float with bits (k + below) << 20
    static constexpr float smallest = SIGNED ? 0x1.4p-16f : 0x1.4p-32f;
};

template <bool SIGNED>
HFZ_INLINE F decoded(U code, F scale) {
    const U magnitude = SIGNED ? code & 0x7fu : code;
    F x = (F)((magnitude + Code<SIGNED>::below) << 20);
    x = choose(magnitude == 0u, F{}, x);
    if (SIGNED) x = (F)((U)x | ((code & 0x80u) << 24));
    return x * scale;
}

// Return the codes of x / scale, |x| <= scale; `random` is below 2^16 and rounds, unused unless
// STOCHASTIC is set.
template <bool SIGNED, bool STOCHASTIC>
HFZ_INLINE U encoded(F x, F scale, U random) {
    using C = Code<SIGNED>;
    const F part = (F)((U)x & 0x7fffffffu) / scale;
    const U add = STOCHASTIC ? random << 4 : all(0x80000u);
    U code = (((U)part + add) >> 20) - C::below;
    U low;
    if (!SIGNED)
        low = (U)(part > 0.0f) & 1u;
    else if (STOCHASTIC)
        low = (U)(part * (65536.0f / C::smallest) > __builtin_convertvector((I)random, F)) & 1u;
    else
        low = (U)(part * 2.0f >= C::smallest) & 1u;
    code = choose(part < C::smallest, low, code);
    if (SIGNED) code |= choose(code == 0u, U{}, ((U)x >> 24) & 0x80u);
    return code;
}

HFZ_INLINE U magnitude(F x) { return (U)x & 0x7fffffffu; }

// Return the scale of a block of which `most` has the largest magnitudes, as bits: NaN if one is
// not finite, since that spoils its block, and 0 if all are too small.
HFZ_INLINE float scale_of(U most) {
    const uint32_t largest = largest_of(most);
    float scale;
    __builtin_memcpy(&scale, &largest, sizeof scale);
    return largest >= 0x7f800000u ? __builtin_nanf("") : scale < kSmallestScale ? 0.0f : scale;
}

HFZ_INLINE float scale_of(const float* x, int n) {
    U most{};
    over_vectors(n, [&](int i, int k) { most = larger(most, magnitude(load<F>(x + i, k))); });
    return scale_of(most);
}

// Encode n <= kBlock elements.
template <bool SIGNED, bool STOCHASTIC>
static void encode_block(uint8_t* codes, float scale, const float* x, int n, Key key, uint32_t index) {
    if (!(scale > 0.0f)) {
        __builtin_memset(codes, 0, n);
        return;
    }
    over_vectors(n, [&](int i, int k) {
        const U random = STOCHASTIC ? random_bits(key, index + i) : U{};
        const U code = encoded<SIGNED, STOCHASTIC>(load<F>(x + i, k), all(scale), SIGNED ? random & 0xffffu : random >> 16);
        store(codes + i, narrowed_to_bytes(code), k);
    });
}

template <bool SIGNED>
static void decode_block(float* x, const uint8_t* codes, float scale, int n) {
    over_vectors(n, [&](int i, int k) { store(x + i, decoded<SIGNED>(widened(load<B>(codes + i, k)), all(scale)), k); });
}

// Codes from a table: block-wise quantization as bitsandbytes has it, rounded to nearest.

constexpr uint32_t kZeroCode = 127;  // with a sign: negative values have lower codes, -1 has none

// Return for each magnitude the region in which it is, or the one below that. The upper half of a
// float is nearly its logarithm, with about 420 numbers to a decade; the first guess changes after
// every 409.6 of them, from kFirstHalf on.
constexpr uint32_t kFirstHalf = 0x3500;
HFZ_INLINE U guessed_region(F part) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    const __m512i above = _mm512_subs_epu16((__m512i)part, _mm512_set1_epi32(kFirstHalf << 16));
    return (U)_mm512_srli_epi32(_mm512_mulhi_epu16(above, _mm512_set1_epi32(160 << 16)), 16);
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    const __m256i above = _mm256_subs_epu16((__m256i)part, _mm256_set1_epi32(kFirstHalf << 16));
    return (U)_mm256_srli_epi32(_mm256_mulhi_epu16(above, _mm256_set1_epi32(160 << 16)), 16);
#else
    const U half = (U)part >> 16;
    const U above = choose(half > kFirstHalf, half - kFirstHalf, U{});
    return (above * 5u) >> 11;  // 160 / 2^16, in bits that SSE2 multiplies
#endif
}

// Return the codes of x, or with a sign the distances to kZeroCode: one too far for values below
// the lowest.
template <bool SIGNED>
HFZ_INLINE I dynamic_codes(const DynamicRegions& regions, F x, F inverse) {
    const F part = (F)magnitude(x) * inverse;
    const U guess = guessed_region(part);
    const U region = choose(part > gathered_of_8(regions.ends, guess), guess + 1u, guess);
    const F rank = part * gathered_of_8(regions.slopes, region) + gathered_of_8(regions.shifts, region);
    const F nearest = choose(part > regions.smallest, smaller(gathered_of_8(regions.tops, region), rank), F{});
    return __builtin_convertvector(SIGNED ? (F)((U)nearest | ((U)x & 0x80000000u)) : nearest, I);
}

template <bool SIGNED>
static void encode_dynamic_block(uint8_t* codes, float scale, const float* x, int n) {
    constexpr int zero = SIGNED ? kZeroCode : 0;
    if (!(scale > 0.0f)) {
        __builtin_memset(codes, zero, n);
        return;
    }
    const DynamicRegions regions = dynamic_maps[SIGNED].regions;  // in registers
    const F inverse = all(1.0f / scale);
    for (int i = 0; i < n; i += 4 * W) {
        I found[4];
        const int count = n - i < 4 * W ? n - i : 4 * W;
        if (count == 4 * W) {
            for (int j = 0; j < 4; ++j) found[j] = dynamic_codes<SIGNED>(regions, load<F>(x + i + W * j, W), inverse) + zero;
            store_as_bytes(codes + i, found);
        } else {
            alignas(64) uint8_t room[4 * W];
            for (int j = 0; W * j < count; ++j) {
                const int k = count - W * j < W ? count - W * j : W;
                found[j] = dynamic_codes<SIGNED>(regions, load<F>(x + i + W * j, k), inverse) + zero;
            }
            store_as_bytes(room, found);
            __builtin_memcpy(codes + i, room, count);
        }
    }
}

template <bool SIGNED>
HFZ_INLINE F dynamic_values(const uint8_t* codes, F scale, int n) {
    return gathered(dynamic_maps[SIGNED].values, widened(load<B>(codes, n))) * scale;
}

template <bool SIGNED>
static void decode_dynamic_block(float* x, const uint8_t* codes, float scale, int n) {
    over_vectors(n, [&](int i, int k) { store(x + i, dynamic_values<SIGNED>(codes + i, all(scale), k), k); });
}

template <bool STOCHASTIC>
HFZ_INLINE void encode_any(const Moment& to, const float* x, int64_t at, int n, Key key, uint32_t index) {
    uint8_t* const codes = static_cast<uint8_t*>(to.data) + at;
    const float scale = to.scales[at / kBlock] = scale_of(x, n);
    switch (to.kind) {
        case SIGNED_BLOCKS: return encode_block<true, STOCHASTIC>(codes, scale, x, n, key, index);
        case UNSIGNED_BLOCKS: return encode_block<false, STOCHASTIC>(codes, scale, x, n, key, index);
        case SIGNED_DYNAMIC: return encode_dynamic_block<true>(codes, scale, x, n);
        default: return encode_dynamic_block<false>(codes, scale, x, n);
    }
}

HFZ_INLINE void decode_any(float* x, const Moment& from, int64_t at, int n) {
    const uint8_t* const codes = static_cast<const uint8_t*>(from.data) + at;
    const float scale = from.scales[at / kBlock];
    switch (from.kind) {
        case SIGNED_BLOCKS: return decode_block<true>(x, codes, scale, n);
        case UNSIGNED_BLOCKS: return decode_block<false>(x, codes, scale, n);
        case SIGNED_DYNAMIC: return decode_dynamic_block<true>(x, codes, scale, n);
        default: return decode_dynamic_block<false>(x, codes, scale, n);
    }
}

}  // namespace HFZ_SET
}  // namespace hfz

// Stochastic rounding and 8-bit blocks; included inside each instruction set's file, after vec.h.
//
// Rounding up with the probability of the cut-off part keeps sums of small additions right on
// average where rounding to nearest would lose them (Gupta et al. 2015, arXiv:1502.02551). The
// random number of an element is a hash of the key and of the element's index in the whole, so it
// does not depend on how the work was cut.
//
// An 8-bit block is kBlock elements with one fp32 scale, the largest magnitude among them, and a
// code each: block-wise dynamic quantisation (Dettmers et al. 2021, arXiv:2110.02861) with eight
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

// SplitMix64's finaliser (Steele et al. 2014).
HFZ_INLINE Key key_of_tile(uint64_t key, int64_t index) {
    uint64_t x = key + (static_cast<uint64_t>(index) >> 32) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

// Return 32 random bits for W consecutive elements: the 32-bit finaliser of MurmurHash3, keyed at
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

// Set the scale of n <= kBlock elements. Return false if it is 0 or NaN: one value that is not
// finite spoils its block.
static bool scale_block(float* scale, const float* x, int n) {
    U most{};
    over_vectors(n, [&](int i, int k) { most = larger(most, load<U>(reinterpret_cast<const uint32_t*>(x + i), k) & 0x7fffffffu); });
    uint32_t largest = 0;
    for (int i = 0; i < W; ++i) largest = most[i] > largest ? most[i] : largest;
    float s;
    __builtin_memcpy(&s, &largest, sizeof s);
    const bool finite = largest < 0x7f800000u, zero = s < kSmallestScale;
    *scale = !finite ? __builtin_nanf("") : zero ? 0.0f : s;
    return finite && !zero;
}

// Encode n <= kBlock elements into codes and their scale.
template <bool SIGNED, bool STOCHASTIC>
static void encode_block(uint8_t* codes, float* scale, const float* x, int n, Key key, uint32_t index) {
    if (!scale_block(scale, x, n)) {
        __builtin_memset(codes, 0, n);
        return;
    }
    const float s = *scale;
    over_vectors(n, [&](int i, int k) {
        const U random = STOCHASTIC ? random_bits(key, index + i) : U{};
        const U code = encoded<SIGNED, STOCHASTIC>(load<F>(x + i, k), all(s), SIGNED ? random & 0xffffu : random >> 16);
        store(codes + i, narrowed_to_bytes(code), k);
    });
}

template <bool SIGNED>
static void decode_block(float* x, const uint8_t* codes, float scale, int n) {
    over_vectors(n, [&](int i, int k) { store(x + i, decoded<SIGNED>(widened(load<B>(codes + i, k)), all(scale)), k); });
}

// ---- codes from a table: block-wise quantisation as bitsandbytes has it, rounded to nearest ----

constexpr uint32_t kZeroCode = 127;  // with a sign: negative values have lower codes, -1 has none

// Return the ranks of the nearest magnitudes, as a float before it is cut to an integer.
HFZ_INLINE F rank_of(const DynamicMap& map, F part) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    const auto lookup = [](const float* table, __m512i at) {
        return _mm512_permutex2var_ps(_mm512_loadu_ps(table), at, _mm512_loadu_ps(table + 16));
    };
    const auto in_16 = [](const float* table, __m512i at) { return _mm512_permutexvar_ps(at, _mm512_loadu_ps(table)); };
    // the lower five bits of 96, ..., 127 count from 0
    const __m512i exponent = (__m512i)larger((U)part >> 23, all(96u));
    const __m512i start = _mm512_permutex2var_epi32(_mm512_loadu_si512(map.regions), exponent, _mm512_loadu_si512(map.regions + 16));
    const __mmask16 above = _mm512_cmp_ps_mask((__m512)part, lookup(map.ends, exponent), _CMP_GT_OQ);
    const __m512i region = _mm512_mask_add_epi32(start, above, start, _mm512_set1_epi32(1));
    const F slope = (F)in_16(map.slopes, region), shift = (F)in_16(map.shifts, region), top = (F)in_16(map.tops, region);
#else
    F slope = all(map.slopes[0]), shift = all(map.shifts[0]), top = all(map.tops[0]);
    for (int r = 1; r < kRegions; ++r) {
        const auto above = part > map.edges[r - 1];
        slope = choose(above, all(map.slopes[r]), slope);
        shift = choose(above, all(map.shifts[r]), shift);
        top = choose(above, all(map.tops[r]), top);
    }
#endif
    const F rank = part * slope + shift;
    return choose(rank > top, top, rank);
}

template <bool SIGNED>
static void encode_dynamic_block(uint8_t* codes, float* scale, const float* x, int n) {
    const DynamicMap& map = dynamic_maps[SIGNED];
    if (!scale_block(scale, x, n)) {
        __builtin_memset(codes, SIGNED ? kZeroCode : 0, n);
        return;
    }
    const F inverse = all(1.0f / *scale);
    over_vectors(n, [&](int i, int k) {
        const U bits = load<U>(reinterpret_cast<const uint32_t*>(x + i), k);
        U code = (U)__builtin_convertvector(rank_of(map, (F)(bits & 0x7fffffffu) * inverse), I);
        if (SIGNED) {
            const U below = kZeroCode - choose(code > kZeroCode, all(kZeroCode), code);
            code = choose((bits >> 31) != 0u, below, code + kZeroCode);
        }
        store(codes + i, narrowed_to_bytes(code), k);
    });
}

template <bool SIGNED>
static void decode_dynamic_block(float* x, const uint8_t* codes, float scale, int n) {
    const float* const values = dynamic_maps[SIGNED].values;
    over_vectors(n, [&](int i, int k) { store(x + i, gathered(values, widened(load<B>(codes + i, k))) * all(scale), k); });
}

// ---- blocks of any kind ----

template <bool STOCHASTIC>
HFZ_INLINE void encode_any(const Moment& to, const float* x, int64_t at, int n, Key key, uint32_t index) {
    uint8_t* const codes = static_cast<uint8_t*>(to.data) + at;
    float* const scale = to.scales + at / kBlock;
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

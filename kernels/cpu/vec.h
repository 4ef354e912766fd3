// Vectors of HFZ_WIDTH elements, in the compiler's own vector types, and their loads and stores.
//
// Included by one file per instruction set, each inside its own namespace (HFZ_SET) and with its
// own flags. Nothing here calls an inline function of the standard library: the linker keeps one
// copy of it, which might be the wide one.
//
// Sums and products are never contracted (-ffp-contract=off) and never reordered, so that all
// instruction sets give the same bits.
#pragma once

#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between functions that are always inlined
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 on its own _mm512_undefined_ps (bug 105593)
#endif
#define HFZ_INLINE static inline __attribute__((always_inline))

namespace hfz {
namespace HFZ_SET {

constexpr int W = HFZ_WIDTH;

typedef float F __attribute__((vector_size(4 * HFZ_WIDTH)));
typedef uint32_t U __attribute__((vector_size(4 * HFZ_WIDTH)));
typedef int32_t I __attribute__((vector_size(4 * HFZ_WIDTH)));
typedef uint16_t H __attribute__((vector_size(2 * HFZ_WIDTH)));
typedef uint8_t B __attribute__((vector_size(HFZ_WIDTH)));

HFZ_INLINE F all(float x) { return x - F{}; }  // not a sum: that would cost an addition, and lose the sign of -0
HFZ_INLINE U all(uint32_t x) { return U{} + x; }
template <class M, class V>
HFZ_INLINE V choose(M mask, V yes, V no) {
    return mask ? yes : no;
}
HFZ_INLINE U larger(U a, U b) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return (U)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    return (U)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
    return a > b ? a : b;
#endif
}
HFZ_INLINE uint32_t largest_of(U x) {
    uint32_t largest = 0;
    for (int i = 0; i < W; ++i) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

HFZ_INLINE F smaller(F a, F b) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return (F)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

// Load all W elements, or the first n of them followed by zeros.
template <class V, class T>
HFZ_INLINE V load(const T* from, int n) {
    V x{};
    if (n == W)
        __builtin_memcpy(&x, from, sizeof(V));
    else
        __builtin_memcpy(&x, from, n * sizeof(T));
    return x;
}
template <class V, class T>
HFZ_INLINE void store(T* to, V x, int n) {
    if (n == W)
        __builtin_memcpy(to, &x, sizeof(V));
    else
        __builtin_memcpy(to, &x, n * sizeof(T));
}

// Call each(i, k) for each vector of n elements; k is W except for the last.
template <class Each>
HFZ_INLINE void over_vectors(int n, Each each) {
    int i = 0;
    for (; i + W <= n; i += W) each(i, W);
    if (i < n) each(i, n - i);
}

HFZ_INLINE F root(F x) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return (F)_mm512_sqrt_ps((__m512)x);
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    return (F)_mm256_sqrt_ps((__m256)x);
#elif HFZ_WIDTH == 4 && defined(__SSE2__)
    return (F)_mm_sqrt_ps((__m128)x);
#elif HFZ_WIDTH == 4 && defined(__aarch64__)
    return (F)vsqrtq_f32((float32x4_t)x);
#else
    for (int i = 0; i < W; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

HFZ_INLINE bool any(U x) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    uint32_t found = 0;
    for (int i = 0; i < W; ++i) found |= x[i];
    return found != 0;
#endif
}

// Integers of other sizes: narrowed values must fit. Compilers lower __builtin_convertvector
// to many instructions.

HFZ_INLINE U widened(H x) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return (U)_mm512_cvtepu16_epi32((__m256i)x);
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    return (U)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, U);
#endif
}

HFZ_INLINE U widened(B x) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return (U)_mm512_cvtepu8_epi32((__m128i)x);
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    uint64_t bytes;
    __builtin_memcpy(&bytes, &x, sizeof bytes);
    return (U)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
#else
    return __builtin_convertvector(x, U);
#endif
}

HFZ_INLINE H narrowed(U x) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return (H)_mm512_cvtepi32_epi16((__m512i)x);
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    return (H)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#else
    return __builtin_convertvector(x, H);
#endif
}

HFZ_INLINE B narrowed_to_bytes(U x) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return (B)_mm512_cvtepi32_epi8((__m512i)x);
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    const __m128i halves = (__m128i)narrowed(x);
    const int64_t bytes = _mm_cvtsi128_si64(_mm_packus_epi16(halves, halves));
    B out;
    __builtin_memcpy(&out, &bytes, sizeof out);
    return out;
#else
    return __builtin_convertvector(x, B);
#endif
}

// Store four vectors as bytes, numbers below 0 as 0.
HFZ_INLINE void store_as_bytes(uint8_t* to, const I* x) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    const __m512i low = _mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]), high = _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    const __m256i low = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), high = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
#else
    for (int i = 0; i < 4; ++i) store(to + W * i, narrowed_to_bytes((U)choose(x[i] > 0, x[i], I{})), W);
#endif
}

HFZ_INLINE F gathered(const float* from, U at) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return (F)_mm512_i32gather_ps((__m512i)at, from, 4);
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    return (F)_mm256_i32gather_ps(from, (__m256i)at, 4);
#else
    F x{};
    for (int i = 0; i < W; ++i) x[i] = from[at[i]];
    return x;
#endif
}

// Return entries of a table of eight.
HFZ_INLINE F gathered_of_8(const float* from, U at) {
#if HFZ_WIDTH == 16 && defined(__AVX512F__)
    return (F)_mm512_permutexvar_ps((__m512i)at, _mm512_castps256_ps512(_mm256_loadu_ps(from)));
#elif HFZ_WIDTH == 8 && defined(__AVX2__)
    return (F)_mm256_permutevar8x32_ps(_mm256_loadu_ps(from), (__m256i)at);
#else
    return gathered(from, at);
#endif
}

HFZ_INLINE F from_bf16(H x) { return (F)(widened(x) << 16); }

// Round to nearest, ties to even; a NaN keeps its sign and its upper bits and becomes quiet.
HFZ_INLINE H to_bf16(F x) {
    const U bits = (U)x;
#if defined(__AVX512BF16__) && HFZ_WIDTH == 16
    // vcvtneps2bf16 rounds equally, but treats denormals as zeros: vectors with denormals take the
    // code below.
    const U magnitude = bits & 0x7fffffffu;
    if (__builtin_expect(_mm512_test_epi32_mask((__m512i)magnitude, (__m512i)magnitude) ==
                             _mm512_cmpge_epu32_mask((__m512i)magnitude, _mm512_set1_epi32(0x00800000)),
                         1))
        return (H)_mm512_cvtneps_pbh((__m512)x);
#endif
    const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const U quiet = (bits >> 16) | 0x40u;
    return narrowed(choose((bits & 0x7fffffffu) > 0x7f800000u, quiet, rounded));
}

#if HFZ_WIDTH == 16 && defined(__AVX512F__)
HFZ_INLINE F from_f16(H x) { return (F)_mm512_cvtph_ps((__m256i)x); }
HFZ_INLINE H to_f16(F x) { return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#elif HFZ_WIDTH == 8 && defined(__F16C__)
HFZ_INLINE F from_f16(H x) { return (F)_mm256_cvtph_ps((__m128i)x); }
HFZ_INLINE H to_f16(F x) { return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
HFZ_INLINE F from_f16(H x) {
    const U half = widened(x);
    const U sign = (half & 0x8000u) << 16;
    const U body = (half & 0x7fffu) << 13;
    const U exponent = body & (0x7c00u << 13);
    const U normal = body + (112u << 23);
    const U special = body + (224u << 23);  // infinity, NaN
    const U quiet = choose(special > 0x7f800000u, special | 0x400000u, special);
    // A denormal half is a multiple of 2^-24: a hidden bit is inserted as a whole 2^-14 and
    // subtracted again, exactly.
    const U small = (U)((F)(body + (113u << 23)) - (F)all(113u << 23));
    return (F)(sign | choose(exponent == (0x7c00u << 13), quiet, choose(exponent == 0u, small, normal)));
}
HFZ_INLINE H to_f16(F x) {
    const U bits = (U)x;
    const U sign = (bits >> 16) & 0x8000u;
    const U body = bits & 0x7fffffffu;
    const U nan = 0x7e00u | ((body >> 13) & 0x3ffu);
    // Below 2^-14, an addition whose last place is 2^-24 rounds.
    const U small = (U)((F)body + (F)all(126u << 23)) - (126u << 23);
    const U normal = (body - (112u << 23) + 0xfffu + ((body >> 13) & 1u)) >> 13;
    const U finite = choose(body < (113u << 23), small, normal);
    const U large = choose(body > 0x7f800000u, nan, all(0x7c00u));
    return narrowed(sign | choose(body >= (143u << 23), large, finite));
}
#endif

}  // namespace HFZ_SET
}  // namespace hfz

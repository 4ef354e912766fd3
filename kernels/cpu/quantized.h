// Symmetric blocks: codes of 4 or 8 bits and the scale of each block, as compressed collectives
// carry them. Included after tiles.h.
//
// The scale is the largest magnitude over 7 or 127 in bf16, a code the nearest multiple of it, ties
// to even. A block with a value that is not finite has the scale NaN; a block whose largest
// magnitude is below kSmallestScale is zero.
#pragma once

#include "tiles.h"

namespace hfz {
namespace HFZ_SET {

// Added to a small number, it leaves the nearest integer, ties to even, in the lower bits of the
// sum: in two's complement.
constexpr float kToInteger = 0x1.8p23f;

HFZ_INLINE float widened_scale(uint32_t bf16) {
    const uint32_t raw = bf16 << 16;
    float scale;
    __builtin_memcpy(&scale, &raw, sizeof scale);
    return scale;
}

static void quantize(const Quantized& out, const Array& source, const Array& minus, int64_t begin, int64_t end) {
    alignas(64) float room[kTile], other[kTile];
    alignas(64) uint8_t codes[kTile];
    const float top = out.bits == 4 ? 7.0f : 127.0f;
    for (int64_t at = begin; at < end; at += out.block) {
        const int n = static_cast<int>(end - at < out.block ? end - at : out.block);
        const float* x = as_floats(room, source, at, n);
        if (minus.data) {
            const float* y = as_floats(other, minus, at, n);
            over_vectors(n, [&](int i, int k) { store(room + i, load<F>(x + i, k) - load<F>(y + i, k), k); });
            x = room;
        }
        U most{};
        over_vectors(n, [&](int i, int k) { most = larger(most, load<U>(reinterpret_cast<const uint32_t*>(x + i), k) & 0x7fffffffu); });
        uint32_t largest = 0;
        for (int i = 0; i < W; ++i) largest = most[i] > largest ? most[i] : largest;
        float magnitude;
        __builtin_memcpy(&magnitude, &largest, sizeof magnitude);
        const bool finite = largest < 0x7f800000u, live = finite && magnitude >= kSmallestScale;
        const float exact = live ? magnitude / top : finite ? 0.0f : __builtin_nanf("");
        uint32_t scale;
        __builtin_memcpy(&scale, &exact, sizeof scale);
        scale += 0x7fffu + ((scale >> 16) & 1u);
        static_cast<uint16_t*>(out.scales)[at / out.block] = static_cast<uint16_t>(scale >> 16);
        if (live) {
            const F inverse = all(1.0f / widened_scale(scale >> 16));
            over_vectors(n, [&](int i, int k) {
                store(codes + i, narrowed_to_bytes((U)(load<F>(x + i, k) * inverse + all(kToInteger)) & 0xffu), k);
            });
        } else {
            __builtin_memset(codes, 0, n);
        }
        if (out.bits == 8) {
            __builtin_memcpy(out.codes + at, codes, n);
        } else {
            uint8_t* packed = out.codes + at / 2;
            for (int i = 0; i < n / 2; ++i) packed[i] = static_cast<uint8_t>((codes[2 * i] & 15) | (codes[2 * i + 1] << 4));
            if (n % 2) packed[n / 2] = codes[n - 1] & 15;
        }
    }
}

static void dequantize(const Array& out, const Quantized& source, bool add, int64_t begin, int64_t end) {
    alignas(64) float room[kTile], other[kTile];
    alignas(64) int8_t unpacked[kTile];
    for (int64_t at = begin; at < end; at += source.block) {
        const int n = static_cast<int>(end - at < source.block ? end - at : source.block);
        const int8_t* codes = reinterpret_cast<const int8_t*>(source.codes) + at;
        if (source.bits == 4) {
            const uint8_t* packed = source.codes + at / 2;
            for (int i = 0; i < n / 2; ++i) {
                unpacked[2 * i] = static_cast<int8_t>(static_cast<int8_t>(packed[i] << 4) >> 4);
                unpacked[2 * i + 1] = static_cast<int8_t>(static_cast<int8_t>(packed[i]) >> 4);
            }
            if (n % 2) unpacked[n - 1] = static_cast<int8_t>(static_cast<int8_t>(packed[n / 2] << 4) >> 4);
            codes = unpacked;
        }
        const float scale = widened_scale(static_cast<const uint16_t*>(source.scales)[at / source.block]);
        for (int i = 0; i < n; ++i) room[i] = static_cast<float>(codes[i]) * scale;
        if (add) {
            const float* before = as_floats(other, out, at, n);
            over_vectors(n, [&](int i, int k) { store(room + i, load<F>(before + i, k) + load<F>(room + i, k), k); });
        }
        narrow(out, room, at, n, false);
    }
}

}  // namespace HFZ_SET
}  // namespace hfz

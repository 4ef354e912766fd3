// Sign blocks: a bit an element and the root mean square of each block, at most twice its mean
// magnitude, as the 1-bit optimizers send momenta. Included after tiles.h.
//
// A range begins at a multiple of the block, or, in sign_apply, anywhere. Elements from `valid` on
// are padding: zero, and in no scale.
#pragma once

#include "tiles.h"

namespace hfz {
namespace HFZ_SET {

constexpr int kSumLanes = 32;

HFZ_INLINE float& scale_of(const Quantized& message, int64_t block) { return static_cast<float*>(message.scales)[block]; }

// Write `scale` with the signs of the elements [at, at + n) of a row into `to`, which has room for
// whole bytes of them; `at` is a multiple of 8.
HFZ_INLINE void signs(float* to, const Quantized& from, int64_t at, int n, float scale) {
    uint32_t magnitude;
    __builtin_memcpy(&magnitude, &scale, sizeof magnitude);
    const uint8_t* bits = from.codes + at / 8;
    for (int i = 0; i < n; i += 8) {
        const uint32_t byte = ~static_cast<uint32_t>(bits[i / 8]);
        uint32_t eight[8];
        for (int k = 0; k < 8; ++k) eight[k] = magnitude ^ (((byte >> k) & 1u) << 31);
        __builtin_memcpy(to + i, eight, sizeof eight);
    }
}

// Write the message of `wanted`, n elements at `at`, of which `inside` are no padding; write its
// decoded values into `said`.
HFZ_INLINE void send_signs(const Quantized& out, const float* wanted, float* said, int64_t at, int n, int inside) {
    // element i is added to sum i % 32, and the sums pair by pair at the end: every instruction set
    // rounds equally
    float lanes[kSumLanes] = {}, squares[kSumLanes] = {};
    const auto add = [&](int j, float value) {
        lanes[j] += __builtin_fabsf(value);
        squares[j] += value * value;
    };
    int i = 0;
    for (; i + kSumLanes <= inside; i += kSumLanes)
        for (int j = 0; j < kSumLanes; ++j) add(j, wanted[i + j]);
    for (int j = 0; i + j < inside; ++j) add(j, wanted[i + j]);
    for (int width = kSumLanes / 2; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) {
            lanes[j] += lanes[j + width];
            squares[j] += squares[j + width];
        }
    const float count = static_cast<float>(inside > 0 ? inside : 1);
    const float root = __builtin_sqrtf(squares[0] / count), most = 2.0f * (lanes[0] / count);
    const float scale = root < most ? root : most;
    scale_of(out, at / out.block) = scale;
    uint8_t* bits = out.codes + at / 8;
    for (i = 0; i < n; i += 8) {
        uint32_t byte = 0;
        for (int k = 0; k < 8; ++k) byte |= static_cast<uint32_t>(wanted[i + k] >= 0.0f) << k;
        bits[i / 8] = static_cast<uint8_t>(byte);
    }
    signs(said, out, at, n, scale);
}

HFZ_INLINE int count_inside(int64_t valid, int64_t at, int n) {
    return static_cast<int>(valid - at < 0 ? 0 : valid - at < n ? valid - at : n);
}

// Zero the elements from `inside` on; `wanted` has room for whole bytes.
HFZ_INLINE void clear_padding(float* wanted, int inside, int n) {
    for (int i = inside; i < (n + 7) / 8 * 8; ++i) wanted[i] = 0.0f;
}

static void sign_compress(const SignCompress& call, int64_t begin, int64_t end) {
    alignas(64) float wanted[kSignBlock + 8], said[kSignBlock + 8], room[kTile];
    for (int64_t at = begin; at < end; at += call.out.block) {
        const int n = static_cast<int>(end - at < call.out.block ? end - at : call.out.block);
        const int inside = count_inside(call.valid, at, n);
        signs(said, call.momentum, at, n, scale_of(call.momentum, at / call.out.block));
        for (int done = 0; done < n; done += kTile) {
            const int some = n - done < kTile ? n - done : kTile;
            const float *grad = as_floats(room, call.grad, at + done, some), *error = call.error + at + done, *before = said + done;
            over_vectors(some, [&](int i, int k) {
                const F z = (load<F>(error + i, k) + all(call.beta) * load<F>(before + i, k)) + all(call.factor) * load<F>(grad + i, k);
                store(wanted + done + i, z, k);
            });
        }
        clear_padding(wanted, inside, n);
        send_signs(call.out, wanted, said, at, n, inside);
        float* error = call.error + at;
        over_vectors(n, [&](int i, int k) { store(error + i, load<F>(wanted + i, k) - load<F>(said + i, k), k); });
        for (int i = inside; i < n; ++i) error[i] = 0.0f;
    }
}

static void sign_combine(const SignCombine& call, int64_t begin, int64_t end) {
    alignas(64) float wanted[kSignBlock + 8], said[kSignBlock + 8], total[kSignBlock + 8];
    for (int64_t at = begin; at < end; at += call.out.block) {
        const int n = static_cast<int>(end - at < call.out.block ? end - at : call.out.block);
        const int inside = count_inside(call.valid, at, n);
        const int64_t block = at / call.out.block;
        for (int64_t row = 0; row < call.rows; ++row) {
            Quantized from = call.came;
            from.codes += row * call.stride;
            const float scale = *reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(&scale_of(from, block)) + row * call.stride);
            signs(row ? said : total, from, at, n, scale);
            if (row) over_vectors(n, [&](int i, int k) { store(total + i, load<F>(total + i, k) + load<F>(said + i, k), k); });
        }
        signs(said, call.momentum, at, n, scale_of(call.momentum, block));
        float* average = call.average + at;
        over_vectors(n, [&](int i, int k) {
            const F kept = load<F>(average + i, k) - load<F>(said + i, k);
            store(wanted + i, load<F>(total + i, k) * all(call.share) + all(call.beta) * kept, k);
        });
        clear_padding(wanted, inside, n);
        send_signs(call.out, wanted, said, at, n, inside);
        over_vectors(n, [&](int i, int k) {
            const F sent = load<F>(said + i, k);
            store(average + i, sent + (load<F>(wanted + i, k) - sent) * all(call.inverse_beta), k);
        });
        for (int i = inside; i < n; ++i) average[i] = 0.0f;
    }
}

static void sign_apply(const SignApply& call, int64_t begin, int64_t end) {
    alignas(64) float said[kSignBlock + 8];
    const int64_t block = call.momentum.block;
    for (int64_t at = begin / block * block; at < end; at += block) {
        const int64_t first = at < begin ? begin : at, last = at + block < end ? at + block : end;
        const int64_t from = first / 8 * 8;
        signs(said, call.momentum, from, static_cast<int>(last - from), scale_of(call.momentum, at / block) * call.step);
        const float* sent = said + (first - from);
        float* weights = call.weights + first;
        const int8_t* exponents = call.exponents + first;
        for (int i = 0; i < last - first; ++i) {
            const uint32_t bits = static_cast<uint32_t>(508 - exponents[i]) << 21;
            float power;
            __builtin_memcpy(&power, &bits, sizeof power);
            weights[i] = weights[i] * call.keep - sent[i] * power;
        }
    }
}

}  // namespace HFZ_SET
}  // namespace hfz

// The updates of optimizers, a tile at a time. Included after tiles.h.
//
// The order of operations is that of torch.optim's single-tensor implementations;
// hf_zero/ops/reference.py has them line by line.
#pragma once

#include "tiles.h"

namespace hfz {
namespace HFZ_SET {

HFZ_INLINE const float* gradient(const Update& u, float* room, int64_t at, int n) {
    const float* g = as_floats(room, u.grad, at, n);
    if (u.divisor == 1.0f && !u.negate) return g;
    const F divisor = all(u.negate ? -u.divisor : u.divisor);
    over_vectors(n, [&](int i, int k) { store(room + i, load<F>(g + i, k) / divisor, k); });
    return room;
}

HFZ_INLINE void write_out(const Update& u, int64_t at, int n) {
    if (u.out.data != nullptr) narrow(u.out, u.master + at, at, n, u.stream);
}

// Update n elements in fp32 from the moments that mean_of(i, k) and square_of(i, k) read; write the
// new ones to m and v, and call seen(i, k). Constants are in registers: the compiler cannot
// know that stores do not alias `a`.
template <bool L2, bool LARGEST, class Mean, class Square, class Seen>
HFZ_INLINE void adam_elements(const Adam& a, int64_t at, int n, const float* g, float* m, float* v, Mean mean_of, Square square_of, Seen seen) {
    float *const w = a.update.master + at, *const x = LARGEST ? a.largest + at : nullptr;
    const F keep = all(a.keep), l2 = all(a.l2), beta1 = all(a.beta1), beta2 = all(a.beta2), eps = all(a.eps);
    const F rest1 = all(a.one_minus_beta1), rest2 = all(a.one_minus_beta2);
    const F root_scale = all(a.root_scale), step_size = all(a.minus_step_size);
    const bool near = a.one_minus_beta1 < 0.5f;  // torch.lerp's two forms
    over_vectors(n, [&](int i, int k) {
        soon(w + i);
        soon(g + i);
        F grad = load<F>(g + i, k), mean = mean_of(i, k), square = square_of(i, k);
        const F weight = load<F>(w + i, k) * keep;
        if (L2) grad += weight * l2;
        const F way = grad - mean;
        mean = near ? mean + way * rest1 : grad - way * beta1;
        square = square * beta2 + (grad * rest2) * grad;
        store(m + i, mean, k);
        store(v + i, square, k);
        seen(i, k);
        if (LARGEST) {
            const F before = load<F>(x + i, k);
            square = choose((before != before) | (before > square), before, square);
            store(x + i, square, k);
        }
        store(w + i, weight + (mean * step_size) / (root(square) * root_scale + eps), k);
    });
}

template <bool L2, bool LARGEST>
static void adam_tile(const Adam& a, int64_t at, int n, const float* g, float* m_room, float* v_room) {
    float *const m = moment(m_room, a.mean, at, n), *const v = moment(v_room, a.square, at, n);
    adam_elements<L2, LARGEST>(
        a, at, n, g, m, v,
        [&](int i, int k) {
            soon(m + i);
            return load<F>(m + i, k);
        },
        [&](int i, int k) {
            soon(v + i);
            return load<F>(v + i, k);
        },
        [](int, int) {});
    const int64_t index = a.update.first + at;
    keep_moment(a.mean, m, at, n, index, a.update.key, false);
    keep_moment(a.square, v, at, n, index, a.update.key, true);
}

// As adam_tile, with both moments in dynamic blocks: what reads them there, and finds the scales,
// runs while the update divides.
template <bool L2, bool LARGEST>
static void adam_tile_of_dynamic_blocks(const Adam& a, int64_t at, int n, const float* g, float* m, float* v) {
    uint8_t *const means = static_cast<uint8_t*>(a.mean.data) + at, *const squares = static_cast<uint8_t*>(a.square.data) + at;
    float *const mean_scales = a.mean.scales + at / kBlock, *const square_scales = a.square.scales + at / kBlock;
    const auto over_blocks = [n](auto each) {
        for (int from = 0; from < n; from += kBlock) each(from, n - from < kBlock ? n - from : kBlock);
    };
    over_blocks([&](int from, int count) {
        float &mean_scale = mean_scales[from / kBlock], &square_scale = square_scales[from / kBlock];
        const F mean_unit = all(mean_scale), square_unit = all(square_scale);
        U mean_most{}, square_most{};
        adam_elements<L2, LARGEST>(
            a, at + from, count, g + from, m + from, v + from,
            [&](int i, int k) { return dynamic_values<true>(means + from + i, mean_unit, k); },
            [&](int i, int k) { return dynamic_values<false>(squares + from + i, square_unit, k); },
            [&](int i, int k) {
                mean_most = larger(mean_most, magnitude(load<F>(m + from + i, k)));
                square_most = larger(square_most, magnitude(load<F>(v + from + i, k)));
            });
        mean_scale = scale_of(mean_most);
        square_scale = scale_of(square_most);
    });
    over_blocks([&](int from, int count) { encode_dynamic_block<true>(means + from, mean_scales[from / kBlock], m + from, count); });
    over_blocks([&](int from, int count) { encode_dynamic_block<false>(squares + from, square_scales[from / kBlock], v + from, count); });
}

template <bool L2, bool LARGEST>
static void adam_range(const Adam& a, int64_t begin, int64_t end) {
    alignas(64) float g_room[kTile], m_room[kTile], v_room[kTile];
    const bool dynamic = a.mean.kind == SIGNED_DYNAMIC && a.square.kind == UNSIGNED_DYNAMIC;
    const auto tile = dynamic ? adam_tile_of_dynamic_blocks<L2, LARGEST> : adam_tile<L2, LARGEST>;
    over_tiles(a.update.first, begin, end, [&](int64_t at, int n) {
        tile(a, at, n, gradient(a.update, g_room, at, n), m_room, v_room);
        write_out(a.update, at, n);
    });
    end_of_stream(a.update.stream);
}

static void adam(const Adam& a, int64_t begin, int64_t end) {
    const auto range = a.largest ? (a.l2 != 0.0f ? adam_range<true, true> : adam_range<false, true>)
                                 : (a.l2 != 0.0f ? adam_range<true, false> : adam_range<false, false>);
    range(a, begin, end);
}

static void lion(const Lion& a, int64_t begin, int64_t end) {
    alignas(64) float g_room[kTile], m_room[kTile];
    over_tiles(a.update.first, begin, end, [&](int64_t at, int n) {
        float* const w = a.update.master + at;
        const float* const g = gradient(a.update, g_room, at, n);
        float* const m = moment(m_room, a.mean, at, n);
        over_vectors(n, [&](int i, int k) {
            const F grad = load<F>(g + i, k), mean = load<F>(m + i, k);
            const F way = mean * a.beta1 + grad * a.one_minus_beta1;
            const F up = choose(way > 0.0f, all(1.0f), F{}), down = choose(way < 0.0f, all(1.0f), F{});
            // NaN has no sign, but it must not vanish: it propagates to the weight
            const F direction = choose(way == way, up - down, way);
            store(w + i, load<F>(w + i, k) * a.keep + direction * a.minus_lr, k);
            store(m + i, mean * a.beta2 + grad * a.one_minus_beta2, k);
        });
        keep_moment(a.mean, m, at, n, a.update.first + at, a.update.key, false);
        write_out(a.update, at, n);
    });
    end_of_stream(a.update.stream);
}

static void adagrad(const Adagrad& a, int64_t begin, int64_t end) {
    alignas(64) float g_room[kTile];
    over_tiles(a.update.first, begin, end, [&](int64_t at, int n) {
        float* const w = a.update.master + at;
        float* const total = a.total + at;
        const float* const g = gradient(a.update, g_room, at, n);
        over_vectors(n, [&](int i, int k) {
            const F weight = load<F>(w + i, k);
            F grad = load<F>(g + i, k);
            if (a.l2 != 0.0f) grad += weight * a.l2;
            const F sum = load<F>(total + i, k) + grad * grad;
            store(total + i, sum, k);
            store(w + i, weight + (grad * a.minus_step_size) / (root(sum) + a.eps), k);
        });
        write_out(a.update, at, n);
    });
    end_of_stream(a.update.stream);
}

static void sgd(const Sgd& a, int64_t begin, int64_t end) {
    alignas(64) float g_room[kTile], m_room[kTile];
    const bool moves = a.momentum_buffer.data != nullptr;
    over_tiles(a.update.first, begin, end, [&](int64_t at, int n) {
        float* const w = a.update.master + at;
        float* const kept = moves ? moment(m_room, a.momentum_buffer, at, n) : nullptr;
        const float* const g = gradient(a.update, g_room, at, n);
        over_vectors(n, [&](int i, int k) {
            const F weight = load<F>(w + i, k);
            F grad = load<F>(g + i, k);
            if (a.l2 != 0.0f) grad += weight * a.l2;
            if (kept != nullptr) {
                const F moving = a.first_step ? grad : load<F>(kept + i, k) * a.momentum + grad * a.one_minus_dampening;
                store(kept + i, moving, k);
                grad = a.nesterov ? grad + moving * a.momentum : moving;
            }
            store(w + i, weight + grad * a.minus_lr, k);
        });
        if (moves) keep_moment(a.momentum_buffer, kept, at, n, a.update.first + at, a.update.key, false);
        write_out(a.update, at, n);
    });
    end_of_stream(a.update.stream);
}

// Return the update that LAMB scales, from moments and weights.
HFZ_INLINE F lamb_update(const Lamb& a, F mean, F square, F weight) {
    const F below = a.eps_inside ? root(square + a.eps) : root(square) + a.eps;
    return mean / below + weight * a.decay;
}

// Return the sum of squares of a tile: 32 running sums in fp32, of at most 32 elements each, added
// up in double.
HFZ_INLINE double tile_squares(const float* p, int n) {
    constexpr int groups = 32 / W;
    F sums[groups] = {};
    int i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < groups; ++j) {
            const F x = load<F>(p + i + W * j, W);
            sums[j] += x * x;
        }
    double total = 0;
    for (; i < n; ++i) total += static_cast<double>(p[i] * p[i]);
    float lanes[32];
    __builtin_memcpy(lanes, sums, sizeof lanes);
    for (int j = 0; j < 32; ++j) total += lanes[j];
    return total;
}

static LambSums lamb_measure(const Lamb& a, int64_t begin, int64_t end) {
    alignas(64) float g_room[kTile], u_room[kTile];
    LambSums sums{0, 0};
    over_tiles(-begin, begin, end, [&](int64_t at, int n) {
        const float* const w = a.update.master + at;
        const float* const g = gradient(a.update, g_room, at, n);
        float *const m = a.mean + at, *const v = a.square + at;
        over_vectors(n, [&](int i, int k) {
            soon(w + i);
            soon(m + i);
            soon(v + i);
            soon(g + i);
            const F grad = load<F>(g + i, k);
            const F mean = load<F>(m + i, k) * a.beta1 + grad * a.one_minus_beta1;
            const F square = load<F>(v + i, k) * a.beta2 + (grad * a.one_minus_beta2) * grad;
            store(m + i, mean, k);
            store(v + i, square, k);
            store(u_room + i, lamb_update(a, mean, square, load<F>(w + i, k)), k);
        });
        sums.weights += tile_squares(w, n);
        sums.update += tile_squares(u_room, n);
    });
    return sums;
}

static void lamb_apply(const Lamb& a, int64_t begin, int64_t end) {
    over_tiles(0, begin, end, [&](int64_t at, int n) {
        float* const w = a.update.master + at;
        const float *const m = a.mean + at, *const v = a.square + at;
        over_vectors(n, [&](int i, int k) {
            soon(w + i);
            soon(m + i);
            soon(v + i);
            const F weight = load<F>(w + i, k);
            store(w + i, weight + lamb_update(a, load<F>(m + i, k), load<F>(v + i, k), weight) * a.minus_step_size, k);
        });
        write_out(a.update, at, n);
    });
    end_of_stream(a.update.stream);
}

}  // namespace HFZ_SET
}  // namespace hfz

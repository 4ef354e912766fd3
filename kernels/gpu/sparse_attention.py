"""Block-sparse attention, forward: FlashAttention-2 (arXiv:2307.08691) over lists of tiles."""

import torch
import triton
import triton.language as tl

from hf_zero.ops.triton_kernels.sparse_attention_tiles import (
    FORWARD,
    LN2,
    LOG2E,
    PLANNED,
    SUM_ROWS,
    TILE,
    exists,
    flat,
    kept,
    precision,
    row_lane,
    settings,
)


# Grid: programs of the plan × (sequences × heads), on one axis, because a second one ends at
# 65,535; longest lists first. Tile 64 queries × 64 keys. Per tile of the list: 4 · 64 · 64 · D
# FLOPs, 2 · 64 · D elements read (from L2 if neighboring rows share keys): 64 FLOPs a byte in
# bf16, so tensor cores are busy as long as three programs or more share a multiprocessor. Per row
# of tiles: 64 · D read, 64 · D + 64 · 4 bytes written. Registers at D = 64: 32 accumulator + 32
# scores + 16 probabilities, below 128.
@triton.jit(do_not_specialize=PLANNED)
def sparse_attention_forward(
    q,
    k,
    v,
    o,
    lse,
    parts_o,
    parts_lse,
    items,
    index,
    bits,
    padding,
    seed,
    qb,
    qh,
    qs,
    kb,
    kh,
    ks,
    vb,
    vh,
    vs,
    ob,
    oh,
    os,
    programs,
    heads,
    group,
    length,
    slots,
    scale,
    threshold,
    keep_scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    RAGGED: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    item = items + tl.program_id(0) % programs * 8
    lane = tl.program_id(0) // programs
    tile, start, count, slot = (
        tl.load(item),
        tl.load(item + 1),
        tl.load(item + 2),
        tl.load(item + 3),
    )
    batch, head = row_lane(tl.load(item + 4), lane, heads, PER_HEAD)
    kv_head = head // group
    local = tl.arange(0, TILE)
    d = tl.arange(0, WIDTH)
    rows = tile * TILE + local
    MASKED: tl.constexpr = (PARTS > 1) or CAUSAL or PADDED or RAGGED

    inside = rows[:, None] < length if RAGGED else rows[:, None] >= 0
    if WIDTH != D:
        inside = inside & (d < D)[None, :]
    q_tile = q + batch.to(tl.int64) * qb + head.to(tl.int64) * qh + tile.to(tl.int64) * TILE * qs
    queries = tl.load(q_tile + local[:, None] * qs + d[None, :], mask=inside, other=0.0)
    k_head = k + batch.to(tl.int64) * kb + kv_head.to(tl.int64) * kh
    v_head = v + batch.to(tl.int64) * vb + kv_head.to(tl.int64) * vh
    if DROPOUT:
        key = tl.load(seed)

    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, WIDTH), tl.float32)
    for turn in range(count):
        column = tl.load(index + start + turn)
        columns = column * TILE + local
        there = columns[:, None] < length if RAGGED else columns[:, None] >= 0
        if WIDTH != D:
            there = there & (d < D)[None, :]
        if RAGGED or WIDTH != D:
            keys = tl.load(
                k_head + column.to(tl.int64) * TILE * ks + local[:, None] * ks + d[None, :],
                mask=there,
                other=0.0,
            )
            values = tl.load(
                v_head + column.to(tl.int64) * TILE * vs + local[:, None] * vs + d[None, :],
                mask=there,
                other=0.0,
            )
        else:
            keys = tl.load(
                k_head + column.to(tl.int64) * TILE * ks + local[:, None] * ks + d[None, :]
            )
            values = tl.load(
                v_head + column.to(tl.int64) * TILE * vs + local[:, None] * vs + d[None, :]
            )
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * (scale * LOG2E)
        if MASKED:
            pad = (
                tl.load(
                    padding + batch.to(tl.int64) * length + columns, mask=columns < length, other=0
                )[None, :]
                if PADDED
                else 0
            )
            entry_bits = tl.load(bits + start + turn) if PARTS > 1 else 0
            keep = exists(
                rows[:, None],
                columns[None, :],
                local[:, None],
                local[None, :],
                entry_bits,
                pad,
                length,
                PARTS,
                CAUSAL,
                PADDED,
                RAGGED,
            )
            scores = tl.where(keep, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        p = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(key, batch * heads + head, tile, column, threshold), p, 0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * fade[:, None], input_precision=PRECISION)
        top = higher

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if DROPOUT:
        acc = acc * keep_scale
    log_total = (top + tl.log2(tl.where(empty, 1.0, total))) * LN2
    if slot < 0:
        o_tile = (
            o + batch.to(tl.int64) * ob + head.to(tl.int64) * oh + tile.to(tl.int64) * TILE * os
        )
        tl.store(o_tile + local[:, None] * os + d[None, :], acc.to(o.dtype.element_ty), mask=inside)
        row = (batch * heads + head).to(tl.int64) * length + rows
        tl.store(lse + row, tl.where(empty, float("inf"), log_total), mask=rows < length)
    else:
        part = (lane * slots + slot).to(tl.int64) * TILE + local
        tl.store(parts_o + part[:, None] * WIDTH + d[None, :], acc)
        tl.store(parts_lse + part, tl.where(empty, float("-inf"), log_total))


# Grid: rows of tiles that were cut × 4 quarters, sequences × heads. Reads each part once in fp32,
# writes the row: memory-bound, a few MB.
@triton.jit(do_not_specialize=PLANNED)
def sparse_attention_combine(
    parts_o,
    parts_lse,
    o,
    lse,
    splits,
    ob,
    oh,
    os,
    programs,
    heads,
    length,
    slots,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    split = splits + tl.program_id(0) % programs // (TILE // SUM_ROWS) * 4
    lane = tl.program_id(0) // programs
    batch, head = row_lane(tl.load(split), lane, heads, PER_HEAD)
    tile, slot, count = tl.load(split + 1), tl.load(split + 2), tl.load(split + 3)
    local = tl.program_id(0) % programs % (TILE // SUM_ROWS) * SUM_ROWS + tl.arange(0, SUM_ROWS)
    d = tl.arange(0, WIDTH)
    top = tl.full((SUM_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((SUM_ROWS,), tl.float32)
    acc = tl.zeros((SUM_ROWS, WIDTH), tl.float32)
    for turn in range(count):
        part = (lane * slots + slot + turn).to(tl.int64) * TILE + local
        log_total = tl.load(parts_lse + part)
        higher = tl.maximum(top, log_total)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp(top - base), tl.exp(log_total - base)
        total = total * fade + weight
        acc = (
            acc * fade[:, None]
            + tl.load(parts_o + part[:, None] * WIDTH + d[None, :]) * weight[:, None]
        )
        top = higher
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    rows = tile * TILE + local
    o_tile = o + batch.to(tl.int64) * ob + head.to(tl.int64) * oh + tile.to(tl.int64) * TILE * os
    tl.store(
        o_tile + local[:, None] * os + d[None, :],
        acc.to(o.dtype.element_ty),
        mask=(rows < length)[:, None] & (d < D)[None, :],
    )
    log_total = tl.where(empty, float("inf"), top + tl.log(tl.where(empty, 1.0, total)))
    tl.store(
        lse + (batch * heads + head).to(tl.int64) * length + rows, log_total, mask=rows < length
    )


def forward(q, k, v, plan, padding, seed, causal, scale, dropout):
    q, k, v = flat(q), flat(k), flat(v)
    batch, heads, length, width = q.shape
    o = torch.empty((batch, length, heads, width), dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    padded_width = max(16, triton.next_power_of_2(width))
    rows = plan.rows
    lanes = batch if plan.per_head else batch * heads
    parts_o = torch.empty(
        (lanes * rows.slots, TILE.value, padded_width), dtype=torch.float32, device=q.device
    )
    parts_lse = torch.empty((lanes * rows.slots, TILE.value), dtype=torch.float32, device=q.device)
    chosen = settings(FORWARD, padded_width, q.dtype, seed is not None)
    sparse_attention_forward[(len(rows.items) * lanes,)](
        q,
        k,
        v,
        o,
        lse,
        parts_o,
        parts_lse,
        rows.items,
        rows.index,
        rows.bits,
        rows.bits if padding is None else padding.contiguous().view(torch.uint8),
        rows.bits if seed is None else seed,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *o.stride()[:3],
        len(rows.items),
        heads,
        heads // k.shape[1],
        length,
        rows.slots,
        scale,
        int(dropout * 2**31),
        1 / (1 - dropout),
        D=width,
        WIDTH=padded_width,
        PARTS=plan.parts,
        PER_HEAD=plan.per_head,
        CAUSAL=causal,
        PADDED=padding is not None,
        RAGGED=length % TILE.value != 0,
        DROPOUT=seed is not None,
        PRECISION=precision(q.dtype),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    if rows.slots:
        programs = len(rows.splits) * (TILE.value // SUM_ROWS.value)
        sparse_attention_combine[(programs * lanes,)](
            parts_o,
            parts_lse,
            o,
            lse,
            rows.splits,
            *o.stride()[:3],
            programs,
            heads,
            length,
            rows.slots,
            D=width,
            WIDTH=padded_width,
            PER_HEAD=plan.per_head,
            num_warps=4,
        )
    return o, lse

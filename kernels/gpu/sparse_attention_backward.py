"""Block-sparse attention, backward: probabilities are recomputed from the log-sum-exp, as in
FlashAttention-2 (arXiv:2307.08691).
"""

import torch
import triton
import triton.language as tl

from hf_zero.ops.triton_kernels.sparse_attention_dkdv import sparse_attention_dkdv
from hf_zero.ops.triton_kernels.sparse_attention_tiles import (
    KEYS,
    LOG2E,
    PLANNED,
    QUERIES,
    SUM_ROWS,
    TILE,
    exists,
    flat,
    kept,
    precision,
    row_lane,
    settings,
)


# dq, and the statistics of each row for dk and dv, interleaved: its log-sum-exp to the base 2, and
# delta = rowsum(do · o), which costs this kernel one more tile of reads. Grid and lists as in the
# forward. Per tile of the list: 6 · 64 · 64 · D FLOPs, 2 · 64 · D elements read. Registers at D =
# 64: 32 accumulator + 32 scores + 32 gradients of probabilities, below 168: three programs a
# multiprocessor.
@triton.jit(do_not_specialize=PLANNED)
def sparse_attention_dq(
    grad,
    q,
    k,
    v,
    o,
    lse,
    statistics,
    dq,
    parts_q,
    items,
    index,
    bits,
    padding,
    seed,
    gb,
    gh,
    gs,
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
    dqb,
    dqh,
    dqs,
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
    tile, start, count, slot, part = (
        tl.load(item),
        tl.load(item + 1),
        tl.load(item + 2),
        tl.load(item + 3),
        tl.load(item + 5),
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
    row = tile.to(tl.int64) * TILE
    queries = tl.load(
        q
        + batch.to(tl.int64) * qb
        + head.to(tl.int64) * qh
        + row * qs
        + local[:, None] * qs
        + d[None, :],
        mask=inside,
        other=0.0,
    )
    grads = tl.load(
        grad
        + batch.to(tl.int64) * gb
        + head.to(tl.int64) * gh
        + row * gs
        + local[:, None] * gs
        + d[None, :],
        mask=inside,
        other=0.0,
    )
    outs = tl.load(
        o
        + batch.to(tl.int64) * ob
        + head.to(tl.int64) * oh
        + row * os
        + local[:, None] * os
        + d[None, :],
        mask=inside,
        other=0.0,
    )
    turned = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    place = (batch * heads + head).to(tl.int64) * length + rows
    log_total = tl.load(lse + place, mask=rows < length, other=float("inf")) * LOG2E
    if part == 0:
        tl.store(statistics + place * 2, log_total, mask=rows < length)
        tl.store(statistics + place * 2 + 1, turned, mask=rows < length)
    k_head = k + batch.to(tl.int64) * kb + kv_head.to(tl.int64) * kh
    v_head = v + batch.to(tl.int64) * vb + kv_head.to(tl.int64) * vh
    if DROPOUT:
        key = tl.load(seed)

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
        p = tl.exp2(scores - log_total[:, None])
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
            p = tl.where(keep, p, 0.0)
        dp = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(
                kept(key, batch * heads + head, tile, column, threshold), dp * keep_scale, 0.0
            )
        ds = p * (dp - turned[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision=PRECISION)

    acc = acc * scale
    if slot < 0:
        dq_tile = dq + batch.to(tl.int64) * dqb + head.to(tl.int64) * dqh + row * dqs
        tl.store(
            dq_tile + local[:, None] * dqs + d[None, :], acc.to(dq.dtype.element_ty), mask=inside
        )
    else:
        place = (lane * slots + slot).to(tl.int64) * TILE + local
        tl.store(parts_q + place[:, None] * WIDTH + d[None, :], acc)


# Sum the parts of a cut list in their order, so that a gradient has the same bits every time. Grid:
# lists cut × 4 quarters, lanes.
@triton.jit(do_not_specialize=PLANNED)
def sparse_attention_sum(
    parts,
    out,
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
    acc = tl.zeros((SUM_ROWS, WIDTH), tl.float32)
    for turn in range(count):
        part = (lane * slots + slot + turn).to(tl.int64) * TILE + local
        acc += tl.load(parts + part[:, None] * WIDTH + d[None, :])
    out_tile = (
        out + batch.to(tl.int64) * ob + head.to(tl.int64) * oh + tile.to(tl.int64) * TILE * os
    )
    inside = (tile * TILE + local < length)[:, None] & (d < D)[None, :]
    tl.store(out_tile + local[:, None] * os + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


def backward(grad, q, k, v, o, lse, plan, padding, seed, causal, scale, dropout):
    grad, q, k, v, o, lse = flat(grad), flat(q), flat(k), flat(v), flat(o), lse.contiguous()
    batch, heads, length, width = q.shape
    kv_heads = k.shape[1]
    dq = torch.empty((batch, length, heads, width), dtype=q.dtype, device=q.device).transpose(1, 2)
    dk = torch.empty((batch, length, kv_heads, width), dtype=q.dtype, device=q.device).transpose(
        1, 2
    )
    dv = torch.empty((batch, length, kv_heads, width), dtype=q.dtype, device=q.device).transpose(
        1, 2
    )
    statistics = torch.empty((*lse.shape, 2), dtype=torch.float32, device=q.device)
    padded_width = max(16, triton.next_power_of_2(width))
    flags = {
        "D": width,
        "WIDTH": padded_width,
        "PARTS": plan.parts,
        "PER_HEAD": plan.per_head,
        "CAUSAL": causal,
        "PADDED": padding is not None,
        "RAGGED": length % TILE.value != 0,
        "DROPOUT": seed is not None,
        "PRECISION": precision(q.dtype),
    }
    unused = plan.rows.bits
    mask = unused if padding is None else padding.contiguous().view(torch.uint8)
    key = unused if seed is None else seed
    numbers = scale, int(dropout * 2**31), 1 / (1 - dropout)

    rows, row_lanes = plan.rows, batch if plan.per_head else batch * heads
    parts_q = torch.empty(
        (row_lanes * rows.slots, TILE.value, padded_width), dtype=torch.float32, device=q.device
    )
    chosen = settings(QUERIES, padded_width, q.dtype, seed is not None)
    sparse_attention_dq[(len(rows.items) * row_lanes,)](
        grad,
        q,
        k,
        v,
        o,
        lse,
        statistics,
        dq,
        parts_q,
        rows.items,
        rows.index,
        rows.bits,
        mask,
        key,
        *grad.stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *o.stride()[:3],
        *dq.stride()[:3],
        len(rows.items),
        heads,
        heads // kv_heads,
        length,
        rows.slots,
        *numbers,
        **flags,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )

    columns, column_lanes = plan.columns, batch if plan.per_head else batch * kv_heads
    parts_k = torch.empty(
        (column_lanes * columns.slots, TILE.value, padded_width),
        dtype=torch.float32,
        device=q.device,
    )
    parts_v = torch.empty_like(parts_k)
    chosen = settings(KEYS, padded_width, q.dtype, seed is not None)
    sparse_attention_dkdv[(len(columns.items) * column_lanes,)](
        grad,
        q,
        k,
        v,
        statistics,
        dk,
        dv,
        parts_k,
        parts_v,
        columns.items,
        columns.index,
        columns.bits,
        mask,
        key,
        *grad.stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *dk.stride()[:3],
        len(columns.items),
        heads,
        kv_heads,
        length,
        plan.tiles,
        columns.slots,
        *numbers,
        **flags,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    _sum(parts_q, dq, rows, heads, row_lanes, plan.per_head)
    _sum(parts_k, dk, columns, kv_heads, column_lanes, plan.per_head)
    _sum(parts_v, dv, columns, kv_heads, column_lanes, plan.per_head)
    return dq, dk, dv


def _sum(parts, out, lists, heads, lanes, per_head):
    if not lists.slots:
        return
    programs = len(lists.splits) * (TILE.value // SUM_ROWS.value)
    sparse_attention_sum[(programs * lanes,)](
        parts,
        out,
        lists.splits,
        *out.stride()[:3],
        programs,
        heads,
        out.shape[2],
        lists.slots,
        D=out.shape[3],
        WIDTH=parts.shape[2],
        PER_HEAD=per_head,
        num_warps=4,
    )

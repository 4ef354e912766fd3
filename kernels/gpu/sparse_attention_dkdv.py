"""Block-sparse attention, backward of keys and values: one program for each column of tiles, or
part of one.
"""

import triton
import triton.language as tl

from hf_zero.ops.triton_kernels.sparse_attention_tiles import (
    LOG2E,
    PLANNED,
    TILE,
    exists,
    kept,
    row_lane,
)


# dk and dv. Grid: programs over columns × (sequences × heads of keys); a list holds all queries of
# all heads that share the keys. Scores are computed transposed, so that the next product reads
# probabilities from registers. Per tile: 8 · 64 · 64 · D FLOPs, 2 · 64 · D elements read. Registers
# at D = 64: 64 accumulators + 32 scores + 32 gradients, below 255: two programs a multiprocessor.
@triton.jit(do_not_specialize=PLANNED)
def sparse_attention_dkdv(
    grad,
    q,
    k,
    v,
    statistics,
    dk,
    dv,
    parts_k,
    parts_v,
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
    dkb,
    dkh,
    dks,
    programs,
    heads,
    kv_heads,
    length,
    tiles,
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
    batch, kv_head = row_lane(tl.load(item + 4), lane, kv_heads, PER_HEAD)
    first_head = kv_head * (heads // kv_heads)
    local = tl.arange(0, TILE)
    d = tl.arange(0, WIDTH)
    columns = tile * TILE + local
    MASKED: tl.constexpr = (PARTS > 1) or CAUSAL or PADDED or RAGGED

    inside = columns[:, None] < length if RAGGED else columns[:, None] >= 0
    if WIDTH != D:
        inside = inside & (d < D)[None, :]
    at = tile.to(tl.int64) * TILE
    keys = tl.load(
        k
        + batch.to(tl.int64) * kb
        + kv_head.to(tl.int64) * kh
        + at * ks
        + local[:, None] * ks
        + d[None, :],
        mask=inside,
        other=0.0,
    )
    values = tl.load(
        v
        + batch.to(tl.int64) * vb
        + kv_head.to(tl.int64) * vh
        + at * vs
        + local[:, None] * vs
        + d[None, :],
        mask=inside,
        other=0.0,
    )
    pad = (
        tl.load(padding + batch.to(tl.int64) * length + columns, mask=columns < length, other=0)[
            :, None
        ]
        if PADDED
        else 0
    )
    if DROPOUT:
        key = tl.load(seed)

    acc_k = tl.zeros((TILE, WIDTH), tl.float32)
    acc_v = tl.zeros((TILE, WIDTH), tl.float32)
    for turn in range(count):
        entry = tl.load(index + start + turn)
        head = first_head + entry // tiles
        query_tile = entry % tiles
        rows = query_tile * TILE + local
        row = query_tile.to(tl.int64) * TILE
        q_tile = q + batch.to(tl.int64) * qb + head.to(tl.int64) * qh + row * qs
        g_tile = grad + batch.to(tl.int64) * gb + head.to(tl.int64) * gh + row * gs
        # One load of 128 numbers goes through shared memory; two of 64 would be repeated by every
        # thread that needs them.
        pairs = (
            statistics
            + ((batch * heads + head).to(tl.int64) * length + row) * 2
            + local[:, None] * 2
            + tl.arange(0, 2)[None, :]
        )
        if RAGGED or WIDTH != D:
            there = rows[:, None] < length if RAGGED else rows[:, None] >= 0
            if WIDTH != D:
                there = there & (d < D)[None, :]
            queries = tl.load(q_tile + local[:, None] * qs + d[None, :], mask=there, other=0.0)
            grads = tl.load(g_tile + local[:, None] * gs + d[None, :], mask=there, other=0.0)
        else:
            queries = tl.load(q_tile + local[:, None] * qs + d[None, :])
            grads = tl.load(g_tile + local[:, None] * gs + d[None, :])
        if RAGGED:
            log_total, turned = tl.split(
                tl.load(pairs, mask=rows[:, None] < length, other=float("inf"))
            )
            turned = tl.where(rows < length, turned, 0.0)
        else:
            log_total, turned = tl.split(tl.load(pairs))
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * (scale * LOG2E)
        p = tl.exp2(scores - log_total[None, :])
        if MASKED:
            entry_bits = tl.load(bits + start + turn) if PARTS > 1 else 0
            keep = exists(
                rows[None, :],
                columns[:, None],
                local[None, :],
                local[:, None],
                entry_bits,
                pad,
                length,
                PARTS,
                CAUSAL,
                PADDED,
                RAGGED,
            )
            p = tl.where(keep, p, 0.0)
        dp = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
        if DROPOUT:
            drawn = tl.trans(kept(key, batch * heads + head, query_tile, tile, threshold))
            dropped = tl.where(drawn, p * keep_scale, 0.0)
            dp = tl.where(drawn, dp * keep_scale, 0.0)
        else:
            dropped = p
        acc_v = tl.dot(dropped.to(grads.dtype), grads, acc_v, input_precision=PRECISION)
        ds = p * (dp - turned[None, :])
        acc_k = tl.dot(ds.to(queries.dtype), queries, acc_k, input_precision=PRECISION)

    acc_k = acc_k * scale
    if slot < 0:
        place = (
            batch.to(tl.int64) * dkb
            + kv_head.to(tl.int64) * dkh
            + at * dks
            + local[:, None] * dks
            + d[None, :]
        )
        tl.store(dk + place, acc_k.to(dk.dtype.element_ty), mask=inside)
        tl.store(dv + place, acc_v.to(dv.dtype.element_ty), mask=inside)
    else:
        part = ((lane * slots + slot).to(tl.int64) * TILE + local)[:, None] * WIDTH + d[None, :]
        tl.store(parts_k + part, acc_k)
        tl.store(parts_v + part, acc_v)

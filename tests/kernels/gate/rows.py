"""Kernels over rows: activations, dropout, rotary embedding, norms and cross-entropy, at the widths
and heads of BERT, GPT-2, Llama, Gemma and Phi.
"""

from __future__ import annotations

from typing import Any

from hf_zero.ops.triton_kernels import activations, cross_entropy, norms, residual, rotary
from tests.helpers.aot_gate import Case
from tests.kernels.gate import case


def act(kernel: Any, name: str, tile: dict[str, int], occupancy: float, **constants: Any) -> Case:
    types = {"*fp32": "sums_ptr", "*i64": "seed_ptr", "fp32": "dropout scale"}
    return case(kernel, name, types, {**constants, **tile}, tile["num_warps"], occupancy)


FLAT, ROWS = activations.FLAT_TILE, activations.ROWS_TILE
FORWARD, BACKWARD = activations._bias_act, activations._bias_act_backward
DROP = {"BLOCK": residual.TILE["BLOCK"], "num_warps": residual.TILE["num_warps"]}
ACTIVATIONS = [
    *(
        act(kernel, f"{name} + bias, 4 × 512", ROWS, occupancy, ACT=name, BIAS=True, SUM=True)
        for kernel, occupancy in ((FORWARD, 0.75), (BACKWARD, 0.5))
        for name in ("gelu", "gelu_tanh")
    ),
    *(
        act(kernel, f"{name}, 2048", FLAT, occupancy, ACT=name)
        for kernel, occupancy in ((activations._gated, 0.75), (activations._gated_backward, 0.5))
        for name in ("silu", "gelu_tanh")
    ),
    act(residual._dropout_add, "dropout, 4 × 1024", DROP, 0.4),
    act(residual._dropout_add_backward, "dropout, 4 × 1024", DROP, 0.25),
]


def turn(
    name: str, heads: tuple[int, int], width: int, rotated: int, occupancy: float,
    backward: bool = False,
) -> Case:  # fmt: skip
    """``heads``: of queries and of keys."""
    tiles = rotary.tiles(*heads, width, rotated // 2)
    constants = {
        "WIDTH": width,
        "HALF": rotated // 2,
        "HEADS": heads[0],
        "KEY_HEADS": heads[1],
        "BACKWARD": backward,
        **tiles,
    }
    taken = [each for each in rotary._rotary.arg_names if each not in constants]
    aligned = " ".join(each for each in taken if each != "sequence")
    return case(rotary._rotary, name, {}, constants, tiles["num_warps"], occupancy, aligned)


ROTARY = [
    turn("Llama-1B, 32 + 8 heads × 64", (32, 8), 64, 64, 0.5),
    turn("Llama-1B, backward", (32, 8), 64, 64, 0.5, backward=True),
    turn("Llama-8B, 32 + 8 heads × 128", (32, 8), 128, 128, 0.5),
    turn("Gemma-2B, 8 + 1 heads × 256", (8, 1), 256, 256, 0.375),
]


NORM_TYPES = {
    "*bf16": "x residual weight bias y total dy saved d_total dx d_weight d_bias",
    "*fp32": "mean rstd partials",
    "fp32": "eps rate",
    "*i64": "seed",
}


def norm(
    width: int,
    occupancies: tuple[float, float],
    *,
    centered: bool,
    dropout: bool = False,
    added: bool = True,
) -> list[Case]:
    """Forward and backward, of a sum where ``added``."""
    rows, block, warps = norms.tile(width, dropout=dropout)
    constants = {
        "OFFSET": 0.0,
        "CENTERED": centered,
        "DROPOUT": dropout,
        "HAS_BIAS": centered,
        "WIDTH": width,
        "ROWS": rows,
        "BLOCK": block,
        "HAS_RESIDUAL": added,
        "KEEP_TOTAL": added,
        "WEIGHT_GRAD": True,
        **norms.shaped(block, warps, dropout=dropout),
    }
    words = ["layer" if centered else "RMS", "of a sum" * added, "dropout" * dropout]
    name = f"{', '.join(filter(None, words))}, {width} wide: {rows} × {block}"
    return [
        case(kernel, name, NORM_TYPES, constants, warps, occupancy)
        for kernel, occupancy in zip((norms._norm_forward, norms._norm_backward), occupancies)
    ]


PARTIALS = {"WIDTH": 1024, "PROGRAMS": 128, "COLUMNS": 32}
NORMS = [
    *norm(1024, (0.375, 0.12), centered=True, dropout=True),
    *norm(4096, (0.25, 0.25), centered=True, dropout=True),
    *norm(128, (0.5, 0.25), centered=False, added=False),
    *norm(4096, (0.5, 0.25), centered=False, added=False),
    *norm(1024, (0.5, 0.25), centered=True),
    *norm(16_384, (0.5, 0.25), centered=False, added=False),
    case(norms._norm_add_partials, "1024 wide", NORM_TYPES, PARTIALS, 4, 0.5),
]


def loss(name: str, dtype: str, width: int, **flags: bool) -> Case:
    block, warps = cross_entropy.tile(width)
    plain = dict.fromkeys(("FACTOR_A_ROW", "KNOWN", "SMOOTHED", "SOFTCAP"), False)
    constants: dict[str, Any] = {"GRADIENT": True, **plain, **flags, "BLOCK": block}
    constants["STAGES"] = cross_entropy.stages(constants["SMOOTHED"])
    types = {
        f"*{dtype}": "logits",
        "*i64": "labels",
        "fp32": "label_smoothing softcap scale",
    }
    types["*fp32"] = f"{types.get('*fp32', '')} factors losses lses"
    kernel, aligned = cross_entropy.cross_entropy_kernel, "logits stride width"
    return case(kernel, f"{name}, {dtype}", types, constants, warps, 0.5, aligned)


CASES = [
    *ACTIVATIONS,
    *ROTARY,
    *NORMS,
    loss("128,256 wide", "bf16", 128_256),
    loss("128,256 wide", "fp32", 128_256),
    loss("256,000 wide, capped", "bf16", 256_000, SOFTCAP=True),
    loss("128,256 wide, smoothed", "bf16", 128_256, SMOOTHED=True),
    loss("128,256 wide, of log-probabilities", "bf16", 128_256, FACTOR_A_ROW=True, KNOWN=True),
]

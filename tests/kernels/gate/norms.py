"""The norms at the widths of BERT, Llama and Gemma."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_zero.ops.triton_kernels import norms
from tests.helpers.aot_gate import Case

POINTERS = (
    "x",
    "residual",
    "weight",
    "bias",
    "y",
    "total",
    "dy",
    "d_total_in",
    "saved",
    "d_total",
    "dx",
)
TYPES = {
    **dict.fromkeys(POINTERS, "*bf16"),
    **dict.fromkeys(("mean", "rstd", "partials"), "*fp32"),
    **dict.fromkeys(
        (
            "rows",
            "x_stride",
            "residual_stride",
            "dy_stride",
            "d_total_in_stride",
            "saved_stride",
            "programs",
        ),
        "i32",
    ),
    **dict.fromkeys(("eps", "rate", "tiny"), "fp32"),
    "seed": "*i64",
    "d_weight": "*bf16",
    "d_bias": "*bf16",
}


def case(
    kernel: Any,
    name: str,
    constexprs: dict[str, Any],
    warps: int,
    occupancy: float,
    streams: bool | None = None,
) -> Case:
    signature = {
        argument: TYPES[argument] for argument in kernel.arg_names if argument not in constexprs
    }
    aligned = tuple(
        each for each, kind in signature.items() if kind.startswith("*") or each.endswith("stride")
    )
    return Case(
        kernel,
        name,
        signature,
        constexprs,
        aligned,
        warps,
        3,
        dot=False,
        min_occupancy=occupancy,
        streams=streams,
    )


def both(
    width: int,
    occupancies: tuple[float, float],
    *,
    centered: bool,
    dropout: bool = False,
    inverted: bool = False,
    added: bool = True,
) -> list[Case]:
    """Forward and backward, with the sum before the norm where ``added``."""
    rows, block, warps = norms.tile(width, dropout=dropout)
    shared = {
        "OFFSET": 0.0,
        "CENTERED": centered,
        "DROPOUT": dropout,
        "HAS_BIAS": centered,
        "WIDTH": width,
        "ROWS": rows,
        "BLOCK": block,
    }
    forward = {**shared, "HAS_RESIDUAL": added, "KEEP_TOTAL": added and not inverted}
    backward = {
        **shared,
        "INVERTED": inverted,
        "HAS_D_TOTAL": added and not dropout,
        "WEIGHT_GRAD": True,
        **norms.shaped(block, warps, dropout=dropout),
    }
    words = [
        "layer" if centered else "RMS",
        "of a sum" * added,
        "dropout" * dropout,
        "inverted" * inverted,
    ]
    name = f"{', '.join(filter(None, words))}, {width} wide: {rows} × {block}"
    return [
        case(norms._norm_forward, name, forward, warps, occupancies[0]),
        case(norms._norm_backward, name, backward, warps, occupancies[1]),
    ]


CASES = [
    *both(1024, (0.5, 0.25), centered=True),
    *both(1024, (0.375, 0.12), centered=True, dropout=True),
    *both(1024, (0.375, 0.12), centered=True, dropout=True, inverted=True),
    *both(768, (0.375, 0.12), centered=True, dropout=True),
    *both(4096, (0.25, 0.25), centered=True, dropout=True),
    *both(8192, (0.5, 0.25), centered=True),
    *both(128, (0.5, 0.25), centered=False, added=False),
    *both(2048, (0.5, 0.25), centered=False),
    *both(4096, (0.5, 0.25), centered=False),
    *both(8192, (0.5, 0.25), centered=False),
    # On sm_100 the backward of so wide a row spills 160 bytes.
    *(replace(each, archs=(80, 90)) for each in both(16_384, (0.5, 0.25), centered=False)),
    case(
        norms._norm_add_partials,
        "1024 wide",
        {"WIDTH": 1024, "PROGRAMS": 128, "COLUMNS": 32},
        4,
        0.5,
    ),
]

"""Momenta in one bit: compress of each gradient dtype, combine, apply."""

from __future__ import annotations

from hf_zero.ops.triton_kernels import sign_blocks
from tests.helpers.aot_gate import Case

MESSAGE = {"bits": "*u8", "scales": "*fp32"}
BEFORE = {"momentum": "*u8", "momentum_scales": "*fp32"}
STRIDES = {"count": "i32", "stride": "i32", "scales_stride": "i32"}
CONSTANTS = {"ALIGN": 8, "BLOCK": 2048, "TILE": sign_blocks.TILE}


def compress(grad: str) -> Case:
    return Case(
        sign_blocks.compress_kernel,
        f"of {grad}",
        {
            **MESSAGE,
            **BEFORE,
            "error": "*fp32",
            "grad": f"*{grad}",
            "factor": "*fp32",
            "beta": "fp32",
            "edges": "*i64",
            "chunk": "i32",
            **STRIDES,
        },
        CONSTANTS,
        ("bits", "scales", "momentum", "error", "grad", "chunk", "stride"),
        sign_blocks.WARPS,
        3,
        False,
        0.375,
        streams=False,
    )


CASES = [
    compress("bf16"),
    compress("fp32"),
    Case(
        sign_blocks.combine_kernel,
        "of ranks",
        {
            **MESSAGE,
            "came": "*u8",
            "came_scales": "*fp32",
            **BEFORE,
            "average": "*fp32",
            "beta": "fp32",
            "inverse_beta": "fp32",
            "share": "fp32",
            "edges": "*i64",
            "rows": "i32",
            **STRIDES,
        },
        CONSTANTS,
        ("bits", "scales", "came", "momentum", "average", "stride"),
        sign_blocks.WARPS,
        3,
        False,
        0.375,
        streams=False,
    ),
    Case(
        sign_blocks.apply_kernel,
        "to weights",
        {
            "weights": "*fp32",
            **MESSAGE,
            "exponents": "*i8",
            "keep": "*fp32",
            "step": "*fp32",
            "edges": "*i64",
            "chunk": "i32",
            **STRIDES,
        },
        CONSTANTS,
        ("weights", "bits", "scales", "exponents", "chunk", "stride"),
        sign_blocks.WARPS,
        3,
        False,
        0.375,
        streams=False,
    ),
]

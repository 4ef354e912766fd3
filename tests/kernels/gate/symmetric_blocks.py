"""Symmetric blocks of 4 and 8 bits, of each dtype that travels."""

from __future__ import annotations

from hf_zero.ops.triton_kernels import symmetric_blocks
from tests.helpers.aot_gate import Case

SIZES = {"numel": "i32", "stride": "i32", "scales_stride": "i32"}
CONSTANTS = {"BLOCK": 256, "TILE": symmetric_blocks.TILE}
ALIGNED = ("codes", "scales", "numel", "stride")


def quantise(bits: int, source: str, minus: str | None = None) -> Case:
    return Case(
        symmetric_blocks.quantise_kernel,
        f"int{bits} of {source}" + (f" minus {minus}" if minus else ""),
        {
            "codes": "*u8",
            "scales": "*fp32",
            "source": f"*{source}",
            "minus": f"*{minus or source}",
            **SIZES,
        },
        {"TOP": 7.0 if bits == 4 else 127.0, "HAS_MINUS": minus is not None, **CONSTANTS},
        (*ALIGNED, "source", "minus"),
        symmetric_blocks.WARPS,
        3,
        False,
        0.375,
    )


def dequantise(bits: int, out: str, add: bool) -> Case:
    return Case(
        symmetric_blocks.dequantise_kernel,
        f"int{bits} {'added to' if add else 'into'} {out}",
        {"out": f"*{out}", "codes": "*u8", "scales": "*fp32", **SIZES},
        {"FOUR": bits == 4, "ADD": add, **CONSTANTS},
        (*ALIGNED, "out"),
        symmetric_blocks.WARPS,
        3,
        False,
        0.5,
        streams=False,
    )


CASES = [
    quantise(4, "bf16"),
    quantise(4, "fp32"),
    quantise(4, "fp32", "bf16"),
    quantise(8, "bf16"),
    dequantise(8, "bf16", False),
    dequantise(4, "bf16", True),
    Case(
        symmetric_blocks.dequantise_sum_kernel,
        "int4",
        {"out": "*fp32", "codes": "*u8", "scales": "*fp32", **SIZES, "rows": "i32"},
        {"FOUR": True, **CONSTANTS},
        (*ALIGNED, "out"),
        symmetric_blocks.WARPS,
        3,
        False,
        0.5,
        streams=False,
    ),
]

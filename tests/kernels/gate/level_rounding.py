"""Weights rounded to levels, of the dtypes and ways that MoQ has."""

from __future__ import annotations

from hf_zero.ops.triton_kernels import level_rounding
from tests.helpers.aot_gate import Case


def case(values: str, symmetric: bool, stochastic: bool) -> Case:
    ends = ("symmetric" if symmetric else "asymmetric") + (", stochastic" if stochastic else "")
    return Case(
        level_rounding.round_kernel,
        f"{values}, {ends}",
        {
            "values": f"*{values}",
            "lowest": f"*{values}",
            "highest": f"*{values}",
            "noise": "*fp32" if stochastic else f"*{values}",
            "numel": "i32",
            "levels": "fp32",
            "share": "fp32",
        },
        {"SYMMETRIC": symmetric, "STOCHASTIC": stochastic, "TILE": level_rounding.TILE},
        ("values", "noise", "numel"),
        level_rounding.WARPS,
        3,
        False,
        0.5,
    )


CASES = [case("bf16", True, False), case("bf16", False, True), case("fp32", True, False)]

"""Bias + dropout + residual as BERT has them."""

from __future__ import annotations

from typing import Any

from hf_zero.ops.triton_kernels import residual
from tests.helpers.aot_gate import Case


def case(kernel: Any, name: str, constants: dict[str, Any], occupancy: float) -> Case:
    constants = {**constants, "BLOCK": residual.TILE["BLOCK"]}
    kinds = {"seed_ptr": "*i64", "sums_ptr": "*fp32", "dropout": "fp32", "scale": "fp32"}
    signature = {
        argument: kinds.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
        if argument not in constants
    }
    aligned = tuple(each for each in signature if each.endswith(("_ptr", "_stride", "width")))
    return Case(
        kernel,
        name,
        signature,
        constants,
        aligned,
        residual.TILE["num_warps"],
        3,
        dot=False,
        min_occupancy=occupancy,
    )


CASES = [
    case(residual._dropout_add, "bias, dropout, 4 × 1024", {"BIAS": True, "DROP": True}, 0.4),
    case(
        residual._dropout_add,
        "bias, 4 × 1024",
        {"BIAS": True, "DROP": False, "seed_ptr": None},
        0.4,
    ),
    case(
        residual._dropout_add_backward,
        "bias, dropout, 4 × 1024",
        {"DROP": True, "WRITE": True, "SUM": True},
        0.25,
    ),
]

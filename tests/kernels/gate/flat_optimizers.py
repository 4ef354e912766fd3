"""The flat optimizers with each gradient and copy that training has, LAMB, and sums of squares."""

from __future__ import annotations

from typing import Any

from hf_zero.ops import lamb_tiles
from hf_zero.ops.flat_tiles import TILE
from hf_zero.ops.triton_kernels import flat_norm, flat_optimizers
from hf_zero.ops.triton_kernels import lamb as lamb_kernels
from tests.helpers.aot_gate import Case

BUFFERS = ("master", "grad", "mean", "square", "out", "table", "coefficients")


def update(adam: bool, grad: str, out: str | None, occupancy: float) -> Case:
    signature = {
        **dict.fromkeys(
            ("master", "mean", "square", "coefficients", "divisor", "found_inf"), "*fp32"
        ),
        "grad": f"*{grad}",
        "out": f"*{out or 'fp32'}",
        "table": "*i64",
    }
    constexprs = {
        "ADAM": adam,
        "HAS_OUT": out is not None,
        "HAS_DIVISOR": True,
        "HAS_FOUND": True,
        "TILE": TILE,
        "BLOCK": flat_optimizers.BLOCK,
        "STAGES": flat_optimizers.STAGES,
    }
    name = f"{'Adam' if adam else 'Lion'}, {grad} gradient, {out or 'no'} copy"
    return Case(
        flat_optimizers.update_kernel,
        name,
        signature,
        constexprs,
        BUFFERS,
        flat_optimizers.WARPS,
        3,
        False,
        occupancy,
    )


def squares(base: str) -> Case:
    signature = {"base": f"*{base}", "table": "*i64", "partials": "*fp64"}
    constexprs = {"BLOCK": flat_norm.BLOCK}
    return Case(
        flat_norm.run_squares_kernel,
        base,
        signature,
        constexprs,
        tuple(signature),
        flat_norm.WARPS,
        3,
        False,
        0.375,
    )


def lamb(kernel: Any, others: dict[str, str]) -> Case:
    numbers = ("beta1", "rest1", "beta2", "rest2", "eps", "decay", "divisor")
    arguments = kernel.arg_names
    signature = {
        "table": "*i64",
        **others,
        **{name: "fp32" for name in numbers if name in arguments},
    }
    constexprs = {"EPS_INSIDE": False, "TILE": lamb_tiles.TILE, "BLOCK": lamb_kernels.BLOCK}
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return Case(kernel, "", signature, constexprs, pointers, lamb_kernels.WARPS, 3, False, 0.5)


CASES = [
    update(True, "fp32", None, 0.5),
    update(True, "fp32", "bf16", 0.5),
    update(True, "bf16", "bf16", 0.5),
    update(True, "fp16", "fp16", 0.5),
    update(False, "fp32", "bf16", 0.5),
    lamb(lamb_kernels.lamb_measure_kernel, {"partials": "*fp64", "tiles": "i32"}),
    lamb(lamb_kernels.lamb_apply_kernel, {"step_sizes": "*fp32"}),
    Case(
        flat_optimizers.advance_kernel,
        "4 groups",
        {
            "steps": "*fp32",
            "settings": "*fp64",
            "found_inf": "*fp32",
            "out": "*fp32",
            "rows": "i32",
        },
        {"HAS_FOUND": True, "ROWS": 4},
        ("steps", "settings", "out"),
        1,
        3,
        False,
        0.25,
        streams=False,
    ),
    squares("fp32"),
    squares("bf16"),
    Case(
        flat_norm.sum_runs_kernel,
        "",
        {"partials": "*fp64", "bounds": "*i64", "out": "*fp64"},
        {"BLOCK": flat_norm.PARTIALS},
        ("partials", "bounds", "out"),
        flat_norm.PARTIAL_WARPS,
        3,
        False,
        0.5,
        streams=False,
    ),
]

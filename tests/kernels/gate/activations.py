"""Activations over whole tensors and over rows with a bias."""

from __future__ import annotations

from typing import Any

from hf_zero.ops.triton_kernels import activations
from tests.helpers.aot_gate import Case


def case(
    kernel: Any, name: str, tile: dict[str, int], constants: dict[str, Any], occupancy: float
) -> Case:
    constants = {
        **constants,
        **{key: value for key, value in tile.items() if key in kernel.arg_names},
    }
    signature = {}
    for argument in kernel.arg_names:
        if argument not in constants:
            pointer = "*fp32" if argument == "sums_ptr" else "*bf16"
            signature[argument] = pointer if argument.endswith("_ptr") else "i32"
    aligned = tuple(each for each in signature if each.endswith(("_ptr", "_stride", "width")))
    return Case(
        kernel,
        name,
        signature,
        constants,
        aligned,
        tile["num_warps"],
        3,
        dot=False,
        min_occupancy=occupancy,
    )


FLAT, ROWS = activations.FLAT_TILE, activations.ROWS_TILE
CASES = [
    *(
        case(
            activations._bias_act, f"{act} + bias, 4 × 512", ROWS, {"ACT": act, "BIAS": True}, 0.75
        )
        for act in ("gelu", "gelu_tanh")
    ),
    *(
        case(
            activations._bias_act_backward,
            f"{act} + bias, 4 × 512",
            ROWS,
            {"ACT": act, "BIAS": True, "SUM": True},
            0.5,
        )
        for act in ("gelu", "gelu_tanh")
    ),
    case(
        activations._bias_act,
        "gelu, 2048",
        FLAT,
        {"ACT": "gelu", "BIAS": False, "bias_ptr": None},
        0.75,
    ),
    case(
        activations._bias_act_backward,
        "gelu, 2048",
        FLAT,
        {
            "ACT": "gelu",
            "BIAS": False,
            "SUM": False,
            "bias_ptr": None,
            "sums_ptr": None,
            "strip": 1,
        },
        0.75,
    ),
    *(
        case(activations._gated, f"{act}, 2048", FLAT, {"ACT": act}, 0.75)
        for act in ("silu", "gelu_tanh", "gelu")
    ),
    *(
        case(activations._gated_backward, f"{act}, 2048", FLAT, {"ACT": act}, 0.5)
        for act in ("silu", "gelu_tanh", "gelu")
    ),
]

"""Rotary embedding at the heads of Llama, Gemma and Phi."""

from __future__ import annotations

from hf_zero.ops.triton_kernels import rotary
from tests.helpers.aot_gate import Case


def case(
    name: str,
    heads: int,
    key_heads: int,
    width: int,
    rotated: int,
    *,
    values: bool,
    backward: bool,
    occupancy: float,
) -> Case:
    tiles = rotary.tiles(heads, key_heads, width, rotated // 2)
    constants = {
        "WIDTH": width,
        "HALF": rotated // 2,
        "HEADS": heads,
        "KEY_HEADS": key_heads,
        **{key: value for key, value in tiles.items() if key != "num_warps"},
        "BACKWARD": backward,
        "VALUES": values,
    }
    if not values:
        constants |= dict.fromkeys(("v_ptr", "v_out_ptr")) | dict.fromkeys(
            ("v_batch", "v_head", "v_token", "v_out_batch", "v_out_head", "v_out_token"), 0
        )
    signature = {
        argument: "*bf16" if argument.endswith("_ptr") else "i32"
        for argument in rotary._rotary.arg_names
        if argument not in constants
    }
    aligned = tuple(each for each in signature if each != "sequence")
    return Case(
        rotary._rotary,
        name,
        signature,
        constants,
        aligned,
        tiles["num_warps"],
        3,
        dot=False,
        min_occupancy=occupancy,
    )


CASES = [
    case("Llama-1B, 32 + 8 heads × 64", 32, 8, 64, 64, values=False, backward=False, occupancy=0.5),
    case("Llama-1B, with v", 32, 8, 64, 64, values=True, backward=False, occupancy=0.5),
    case("Llama-1B, with v, backward", 32, 8, 64, 64, values=True, backward=True, occupancy=0.5),
    case(
        "Llama-8B, 32 + 8 heads × 128, with v",
        32,
        8,
        128,
        128,
        values=True,
        backward=False,
        occupancy=0.5,
    ),
    case(
        "Phi-2, 32 heads × 80, 32 rotated",
        32,
        32,
        80,
        32,
        values=False,
        backward=False,
        occupancy=0.3,
    ),
    case(
        "Gemma-2B, 8 + 1 heads × 256", 8, 1, 256, 256, values=False, backward=False, occupancy=0.4
    ),
]

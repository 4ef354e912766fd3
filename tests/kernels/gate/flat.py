"""Kernels over flat buffers: optimizers with each gradient and copy that training has, also with
moments in 8 bits, LAMB, sums of squares, blocks of 1, 4 and 8 bits of each dtype that travels,
weights rounded to levels, and words of Philox.
"""

from __future__ import annotations

from typing import Any

from hf_zero.ops.flat_tiles import TILE
from hf_zero.ops.lamb import TILE as LAMB_TILE
from hf_zero.ops.triton_kernels import (
    eight_bit_adam,
    flat_norm,
    flat_optimizers,
    level_rounding,
    philox,
    sign_blocks,
    stochastic_rounding,
    symmetric_blocks,
)
from hf_zero.ops.triton_kernels import lamb as lamb_kernels
from tests.helpers.aot_gate import Case
from tests.kernels.gate import case


def update(adam: bool, grad: str, out: str | None) -> Case:
    types = {"*fp32": "master mean square coefficients divisor found_inf", "*i64": "table"}
    for argument, kind in (("grad", grad), ("out", out or "fp32")):
        types[f"*{kind}"] = f"{types.get(f'*{kind}', '')} {argument}"
    constants = {
        "ADAM": adam,
        "HAS_OUT": out is not None,
        "HAS_DIVISOR": True,
        "HAS_FOUND": True,
        "TILE": TILE,
        "BLOCK": flat_optimizers.BLOCK,
        "STAGES": flat_optimizers.STAGES,
    }
    name = f"{'Adam' if adam else 'Lion'}, {grad} gradient, {out or 'no'} copy"
    buffers = "master grad mean square out table coefficients"
    kernel, warps = flat_optimizers.update_kernel, flat_optimizers.WARPS
    return case(kernel, name, types, constants, warps, 0.5, buffers)


def squares(base: str) -> Case:
    types = {"*i64": "table", "*fp64": "partials", f"*{base}": "base"}
    block = {"BLOCK": flat_norm.BLOCK}
    return case(flat_norm.run_squares_kernel, base, types, block, flat_norm.WARPS, 0.375)


def lamb(kernel: Any) -> Case:
    numbers = "beta1 rest1 beta2 rest2 eps decay divisor"
    types = {"*i64": "table", "*fp64": "partials", "*fp32": "step_sizes", "fp32": numbers}
    constants = {"EPS_INSIDE": False, "TILE": LAMB_TILE, "BLOCK": lamb_kernels.BLOCK}
    return case(kernel, "", types, constants, lamb_kernels.WARPS, 0.5)


def eight_bit(grad: str, out: str | None) -> Case:
    types = {
        "*u8": "mean square",
        "*fp32": "master mean_scales square_scales mean_table square_table",
        "fp32": "divisor keep l2 beta1 rest1 beta2 rest2 root_scale eps step_size",
    }
    for argument, kind in (("grad", grad), ("out", out or "fp32")):
        types[f"*{kind}"] = f"{types.get(f'*{kind}', '')} {argument}"
    constants = {"NEAR": True, "HAS_L2": False, "HAS_OUT": out is not None}
    constants |= {"BLOCK": 256, "TILE": eight_bit_adam.TILE}
    name = f"{grad} gradient, {out or 'no'} copy"
    kernel, warps = eight_bit_adam.eight_bit_adam_kernel, eight_bit_adam.WARPS
    aligned = "master grad mean mean_scales square square_scales out numel"
    # a block a warp, eight elements a thread: on an H200 faster than tiles of twice the occupancy
    return case(kernel, name, types, constants, warps, 0.375, aligned)


OPTIMIZERS = [
    update(True, "fp32", None),
    update(True, "bf16", "bf16"),
    update(False, "fp32", "bf16"),
    eight_bit("fp32", None),
    eight_bit("bf16", "bf16"),
    lamb(lamb_kernels.lamb_measure_kernel),
    lamb(lamb_kernels.lamb_apply_kernel),
    case(
        flat_optimizers.advance_kernel, "",
        {"*fp32": "steps found_inf out", "*fp64": "settings"},
        {"HAS_FOUND": True, "ROWS": flat_optimizers.ROWS},
        1, 0.25, "steps settings out", streams=False,
    ),
    squares("fp32"),
    case(
        flat_norm.sum_runs_kernel, "", {"*fp64": "partials out", "*i64": "bounds"},
        {"BLOCK": flat_norm.PARTIALS}, flat_norm.PARTIAL_WARPS, 0.5, streams=False,
    ),
]  # fmt: skip


def signs(kernel: Any, name: str, aligned: str, grad: str = "fp32") -> Case:
    types = {
        "*u8": "bits momentum came",
        "*i64": "edges",
        "*i8": "exponents",
        "fp32": "beta inverse_beta share",
        "*fp32": "scales momentum_scales came_scales error factor average weights keep step",
    }
    types[f"*{grad}"] = f"{types.get(f'*{grad}', '')} grad"
    constants = {"ALIGN": 8, "BLOCK": 2048, "TILE": sign_blocks.TILE}
    return case(kernel, name, types, constants, sign_blocks.WARPS, 0.375, aligned, streams=False)


COMPRESSED = "bits scales momentum error grad chunk stride"
SIGNS = [
    signs(sign_blocks.compress_kernel, "of bf16", COMPRESSED, "bf16"),
    signs(sign_blocks.compress_kernel, "of fp32", COMPRESSED),
    signs(sign_blocks.combine_kernel, "of ranks", "bits scales came momentum average stride"),
    signs(sign_blocks.apply_kernel, "to weights", "weights bits scales exponents chunk stride"),
]


def blocks(kernel: Any, name: str, tensors: dict[str, str], *args: Any, **constants: Any) -> Case:
    """``tensors``: the dtype of each tensor; ``args``: the occupancy and what is aligned."""
    types = {"*u8": "codes"}
    for argument, kind in ({"scales": "fp32"} | tensors).items():
        types[f"*{kind}"] = f"{types.get(f'*{kind}', '')} {argument}"
    constants |= {"BLOCK": 256, "TILE": symmetric_blocks.TILE}
    occupancy, aligned = args
    aligned = f"codes scales numel stride {aligned}"
    streams = {} if kernel is symmetric_blocks.quantize_kernel else {"streams": False}
    warps = symmetric_blocks.WARPS
    return case(kernel, name, types, constants, warps, occupancy, aligned, **streams)


def quantize(bits: int, source: str, minus: str | None = None) -> Case:
    name = f"int{bits} of {source}" + (f" minus {minus}" if minus else "")
    tensors = {"source": source, "minus": minus or source}
    constants = {"TOP": 7.0 if bits == 4 else 127.0, "HAS_MINUS": minus is not None}
    kernel = symmetric_blocks.quantize_kernel
    return blocks(kernel, name, tensors, 0.375, "source minus", **constants)


def dequantize(bits: int, out: str, add: bool) -> Case:
    name = f"int{bits} {'added to' if add else 'into'} {out}"
    kernel = symmetric_blocks.dequantize_kernel
    return blocks(kernel, name, {"out": out}, 0.5, "out", FOUR=bits == 4, ADD=add)


def levels(values: str, symmetric: bool, stochastic: bool) -> Case:
    ends = ("symmetric" if symmetric else "asymmetric") + (", stochastic" if stochastic else "")
    types = {"fp32": "levels share", "*fp32": "noise" if stochastic else ""}
    also = "values lowest highest" + ("" if stochastic else " noise")
    types[f"*{values}"] = f"{types.get(f'*{values}', '')} {also}"
    constants = {"SYMMETRIC": symmetric, "STOCHASTIC": stochastic, "TILE": level_rounding.TILE}
    kernel, warps = level_rounding.round_kernel, level_rounding.WARPS
    return case(kernel, f"{values}, {ends}", types, constants, warps, 0.5, "values noise numel")


CASES = [
    *OPTIMIZERS,
    *SIGNS,
    quantize(4, "bf16"),
    quantize(4, "fp32", "bf16"),
    dequantize(8, "bf16", False),
    dequantize(4, "bf16", True),
    blocks(
        symmetric_blocks.dequantize_sum_kernel, "int4", {"out": "fp32"}, 0.5, "out", FOUR=True
    ),
    levels("bf16", True, False),
    levels("bf16", False, True),
    case(
        stochastic_rounding.stochastic_round_kernel, "fp32 to bf16",
        {"*bf16": "out", "*fp32": "source", "i64": "a b first"},
        {"TILE": stochastic_rounding.TILE}, stochastic_rounding.WARPS, 0.5, "out source numel",
    ),
    case(
        philox.first_words_kernel, "first words", {"*i64": "out", "i64": "seed c3"},
        {"BLOCK": philox.BLOCK}, philox.WARPS, 0.5, streams=False,
    ),
]  # fmt: skip

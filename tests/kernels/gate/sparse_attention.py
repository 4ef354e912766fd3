"""Block-sparse attention at the heads of BERT and GPT-2 (64 wide) and Llama (128), and with what
its masks add.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.ops.triton_kernels import sparse_attention, sparse_attention_backward
from hf_zero.ops.triton_kernels.sparse_attention_tiles import FORWARD, KEYS, QUERIES, settings
from tests.helpers.aot_gate import Case

HALVES = ("q", "k", "v", "o", "grad", "dq", "dk", "dv", "out")
SINGLES = ("lse", "statistics", "parts_o", "parts_lse", "parts_q", "parts_k", "parts_v", "parts")
TABLES = ("items", "index", "bits", "splits")
PLAIN = {
    "PARTS": 1,
    "PER_HEAD": False,
    "CAUSAL": False,
    "PADDED": False,
    "RAGGED": False,
    "DROPOUT": False,
    "PRECISION": "tf32",
}
TABLE_OF = {
    sparse_attention.sparse_attention_forward: FORWARD,
    sparse_attention_backward.sparse_attention_dq: QUERIES,
    sparse_attention_backward.sparse_attention_dkdv: KEYS,
}
SUMS = (sparse_attention.sparse_attention_combine, sparse_attention_backward.sparse_attention_sum)


def case(
    kernel: Any,
    name: str,
    width: int,
    occupancy: float,
    archs: tuple[int, ...] = (80, 90, 100),
    **flags: Any,
) -> Case:
    constants = {"D": width, "WIDTH": width, **PLAIN, **flags}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {
        **dict.fromkeys(HALVES, "*bf16"),
        **dict.fromkeys(SINGLES, "*fp32"),
        **dict.fromkeys(TABLES, "*i32"),
        **dict.fromkeys(("scale", "keep_scale"), "fp32"),
        "padding": "*u8" if flags.get("PADDED") else "*i32",
        "seed": "*i64" if flags.get("DROPOUT") else "*i32",
    }
    signature = {
        argument: types.get(argument, "i32")
        for argument in kernel.arg_names
        if argument not in constants
    }
    strides = {x + y for x in ("q", "k", "v", "o", "g", "dq", "dk") for y in "bhs"}
    aligned = tuple(
        each for each, kind in signature.items() if kind.startswith("*") or each in strides
    )
    table = TABLE_OF.get(kernel)
    warps, stages = 4, 3
    if table is not None:
        chosen = settings(table, width, torch.bfloat16, bool(flags.get("DROPOUT")))
        warps, stages = chosen.num_warps, chosen.num_stages
    return Case(
        kernel,
        name,
        signature,
        constants,
        aligned,
        warps,
        stages,
        dot=table is not None,
        min_occupancy=occupancy,
        archs=archs,
    )


# Two programs of four warps, or one of eight, are 0.125 of the warps of a multiprocessor; registers
# and shared memory set that, and what hides latency is that wgmma and the copies of the next tile
# run while a program computes.
CASES = [
    *(case(kernel, f"heads of {width}", width, 0.12) for kernel in TABLE_OF for width in (64, 128)),
    *(
        case(kernel, "heads of 64, causal and padded", 64, 0.12, CAUSAL=True, PADDED=True)
        for kernel in TABLE_OF
    ),
    *(
        case(kernel, "heads of 64, blocks of 16, ragged", 64, 0.12, (90,), PARTS=4, RAGGED=True)
        for kernel in TABLE_OF
    ),
    *(
        case(kernel, "heads of 64, dropout", 64, 0.12, (90,), DROPOUT=True, PADDED=True)
        for kernel in TABLE_OF
    ),
    *(case(kernel, f"heads of {width}", width, 0.5) for kernel in SUMS for width in (64, 128)),
]

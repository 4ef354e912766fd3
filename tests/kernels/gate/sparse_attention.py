"""Block-sparse attention at the heads of BERT and GPT-2 (64 wide) and Llama (128), and with what
its masks add.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.ops.triton_kernels import sparse_attention, sparse_attention_backward
from hf_zero.ops.triton_kernels.sparse_attention_tiles import FORWARD, KEYS, QUERIES, settings
from tests.helpers.aot_gate import ARCHS, Case
from tests.kernels.gate import case

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


TYPES = {
    "*bf16": "q k v o grad dq dk dv out",
    "*fp32": "lse statistics parts_o parts_lse parts_q parts_k parts_v parts",
    "*i32": "items index bits splits",
    "fp32": "scale keep_scale",
}
STRIDES = {x + y for x in ("q", "k", "v", "o", "g", "dq", "dk") for y in "bhs"}
Archs = tuple[int, ...]


def attend(
    kernel: Any, name: str, width: int, occupancy: float, archs: Archs = ARCHS, **flags: Any
) -> Case:
    constants, table = {"D": width, "WIDTH": width, **PLAIN, **flags}, TABLE_OF.get(kernel)
    types = {
        **TYPES,
        "*u8": "padding" if flags.get("PADDED") else "",
        "*i64": "seed" if flags.get("DROPOUT") else "",
    }
    types["*i32"] += "" if flags.get("PADDED") else " padding"
    types["*i32"] += "" if flags.get("DROPOUT") else " seed"
    pointers = {each for kind, names in types.items() if kind[0] == "*" for each in names.split()}
    aligned = [each for each in kernel.arg_names if each in pointers | STRIDES]
    aligned = [each for each in aligned if each not in constants]
    more: dict[str, Any] = {"archs": archs, "dot": table is not None}
    warps = 4
    if table is not None:
        chosen = settings(table, width, torch.bfloat16, bool(flags.get("DROPOUT")))
        warps, more["num_stages"] = chosen.num_warps, chosen.num_stages
    return case(kernel, name, types, constants, warps, occupancy, " ".join(aligned), **more)


# Two programs of four warps, or one of eight, are 0.125 of the warps of a multiprocessor; registers
# and shared memory set that, and what hides latency is that wgmma and the copies of the next tile
# run while a program computes.
WAYS: list[tuple[str, Archs, dict[str, Any]]] = [
    (", causal and padded", ARCHS, {"CAUSAL": True, "PADDED": True}),
    (", blocks of 16, ragged", (90,), {"PARTS": 4, "RAGGED": True}),
    (", dropout", (90,), {"DROPOUT": True, "PADDED": True}),
]
CASES = [
    *(attend(each, f"heads of {width}", width, 0.12) for each in TABLE_OF for width in (64, 128)),
    *(
        attend(kernel, f"heads of 64{way}", 64, 0.12, archs, **flags)
        for way, archs, flags in WAYS
        for kernel in TABLE_OF
    ),
    *(attend(kernel, f"heads of {width}", width, 0.5) for kernel in SUMS for width in (64, 128)),
]

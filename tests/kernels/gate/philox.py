"""Words of Philox: what tokens are drawn by."""

from __future__ import annotations

from hf_zero.ops.triton_kernels import philox
from tests.helpers.aot_gate import Case

CASES = [
    Case(
        philox.first_words_kernel,
        "first words",
        {"out": "*i64", "seed": "i64", "c1": "i32", "c2": "i32", "c3": "i64", "count": "i32"},
        {"BLOCK": philox.BLOCK},
        ("out",),
        philox.WARPS,
        3,
        False,
        0.5,
        streams=False,
    )
]

"""Cross-entropy at the vocabularies of BERT, GPT-2 and Llama 3, and Gemma's soft-capping."""

from __future__ import annotations

from hf_zero.ops.triton_kernels import cross_entropy
from tests.helpers.aot_gate import Case

KERNEL = cross_entropy.cross_entropy_kernel
NUMBERS = dict.fromkeys(("label_smoothing", "z_loss", "softcap", "scale"), "fp32")
SIZES = dict.fromkeys(("stride", "width", "vocabulary", "ignore_index"), "i32")
POINTERS = {"labels": "*i64", **dict.fromkeys(("factors", "losses", "lses"), "*fp32")}


def case(name: str, dtype: str, width: int, **flags: bool) -> Case:
    block, warps = cross_entropy.tile(width)
    constexprs = {
        "GRADIENT": True,
        "FACTOR_A_ROW": False,
        "KNOWN": False,
        "SMOOTHED": False,
        "SOFTCAP": False,
        **flags,
        "BLOCK": block,
    }
    constexprs["STAGES"] = cross_entropy.stages(constexprs["SMOOTHED"])
    signature = {"logits": f"*{dtype}", **POINTERS, **SIZES, **NUMBERS}
    aligned = ("logits", "stride", "width")
    return Case(
        KERNEL,
        f"{name}, {dtype}",
        signature,
        constexprs,
        aligned,
        warps,
        3,
        dot=False,
        min_occupancy=0.5,
    )


CASES = [
    case("128,256 wide", "bf16", 128_256),
    case("128,256 wide", "fp32", 128_256),
    case("30,528 wide", "bf16", 30_528),
    case("256,000 wide, capped", "bf16", 256_000, SOFTCAP=True),
    case("128,256 wide, smoothed", "bf16", 128_256, SMOOTHED=True),
    case("128,256 wide, without gradient", "bf16", 128_256, GRADIENT=False),
    case("128,256 wide, of log-probabilities", "bf16", 128_256, FACTOR_A_ROW=True, KNOWN=True),
]

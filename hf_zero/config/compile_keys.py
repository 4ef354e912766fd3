"""The rows of the key table about compiled blocks and the kernels of attention; DeepSpeed's
section ``compile`` is about DeepCompile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.kinds import BOOLEAN, TEXT, choice, integer
from hf_zero.config.rows import active, inert, unbuilt, under

ATTENTION_BACKENDS = ("auto", "flash", "cudnn", "efficient", "math")
_DEEPCOMPILE = "concerns DeepCompile"


def _idle(values: Mapping[str, Any]) -> str:
    return "" if values.get("compile.blocks") else "compile.blocks is false"


COMPILE = (
    *under(
        "compile",
        active(
            "blocks",
            BOOLEAN,
            False,
            "compile.blocks",
            "compile each block's forward with torch.compile; compile: blocks is short for it",
        ),
        # CUDA graphs fix the addresses of weights, which gathers at stage 3 and checkpoints do not.
        active(
            "mode",
            choice("default", "max-autotune-no-cudagraphs"),
            "default",
            "compile.mode",
            "mode of torch.compile",
            _idle,
        ),
        active(
            "dynamic",
            BOOLEAN,
            None,
            "compile.dynamic",
            "null: the first shapes get a graph of their own, all others one that fits any; false: "
            "a graph for all shapes; true: one for any",
            _idle,
        ),
        active("backend", TEXT, "inductor", "compile.backend", "backend of torch.compile", _idle),
        unbuilt("deepcompile", BOOLEAN, "DeepCompile; write compile: blocks"),
        unbuilt("enabled", BOOLEAN, "a compiled model; write compile: blocks"),
        *(
            inert(name, BOOLEAN, _DEEPCOMPILE)
            for name in [
                "free_activation",
                "offload_activation",
                "offload_opt_states",
                "offload_parameters",
                "double_buffer",
                "symmetric_memory",
                "debug_log",
                "sync_before_reduce",
                "sync_after_reduce",
                "sync_before_allgather",
                "sync_after_allgather",
                "keep_int_input_tensors",
                "keep_all_input_tensors",
            ]
        ),
        inert("offload_adam_states_threshold", integer(0), _DEEPCOMPILE),
    ),
    active(
        "attention_backend",
        choice(*ATTENTION_BACKENDS),
        "auto",
        note="kernels that scaled_dot_product_attention tries first, in the whole process; auto: "
        "what was measured faster on such a GPU, else torch's own order",
    ),
)

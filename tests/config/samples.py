"""Values that the kinds of keys accept, by the words with which a kind describes itself."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from hf_zero.config.kernels import KERNELS
from hf_zero.config.low_bits import AWARE
from hf_zero.config.techniques import PHASE_LIST, RAMPUP
from hf_zero.config.value_types import choice

# The first of each list is unlike the default.
VALUES: dict[str, list[Any]] = {
    "true or false": [True, False],
    "a non-empty string": ["AdamW", "WarmupLR"],
    "a path": ["/local_nvme"],
    "a path, or an empty string": ["logs", "", "/logs"],
    "one of 'gloo', 'nccl'": ["gloo", "nccl"],
    "one of '1f1b', 'gpipe', 'interleaved_1f1b'": ["1f1b", "GPipe"],
    "one of 'step'": ["step", "Step"],
    "one of 'mean', 'sum'": ["sum", "mean"],
    "one of 'get_or_create', 'get', 'create'": ["get", "CREATE"],
    "one of 'fast', 'python'": ["FAST", "python"],
    "one of 'replica', 'socket', 'machine'": ["replica", "MACHINE"],
    "an integer from 1 to 65535": [29501, 1],
    "one of 'fp32', 'bf16', 'fp16'": ["torch.bfloat16", "fp32", "bf16", "float16"],
    KERNELS.expected: [["loss", "norms"], "auto", "on", "off", True, ["norms"], []],
    "a list of names": [["Sophia"], ["A", "B"], []],
    "a section of keys and plain values": [{}],
    "a positive number of steps or infinity": [2000, 1, float("inf")],
    "one of 'off', 'auto', 'on'": ["off", "AUTO", "on"],
    "a number of elements of at least 0": [5e8, 0],
    "one of 'ignore', 'warn', 'fail'": ["Warn", "Ignore", "fail"],
    "one of 'fp16', 'float16', 'bf16', 'bfloat16'": ["fp16"],
    "an integer from 0 to 3": [2, 0, 1, 3],
    "an integer from 2 to 16": [6, 2, 16],
    choice(*AWARE).expected: ["int8_weight", *AWARE],
    "one of 'tensorwise', 'rowwise', 'rowwise_with_gw_hp'": ["rowwise"],
    "one of 'symmetric', 'asymmetric'": ["asymmetric", "Symmetric"],
    "one of 'nearest', 'stochastic'": ["Stochastic", "nearest"],
    "one of 4, 1": [4, 1],
    "one of 'seqlen'": ["seqlen"],
    "one of 'none', 'linear', 'sqrt'": ["sqrt"],
    PHASE_LIST.expected: [[{"steps": 2}, {}]],
    RAMPUP.expected: [[1, 1, 8]],
    "one of 'fixed_linear', 'fixed_root', 'fixed_discrete', 'custom'": ["fixed_root"],
    "one of 32, 64, 128, 256, 512, 1024, 2048": [64, 32, 256],
    "an integer of at least -1": [2, 9],
    "an integer of at least 0": [4, 0, 5e8],
    "one of 'batch_seq_dim', 'seq_batch_dim'": ["seq_batch_dim"],
    "one of 'fixed_linear'": ["fixed_linear"],
    "one of 'encoder', 'decoder'": ["decoder", "Decoder"],
    "a list of layers, counted from 0": [[1, 2], [], (0, 9)],
    "an integer of at least 1": [4, 1],
    "a number of at least 0": [0.5, 1e6],
    "one of 'none', 'cpu', 'nvme'": ["nvme", "none", "CPU"],
    "one of 'default', 'efficiency', 'zero'": ["zero", "Default"],
    "one of 'default', 'max-autotune-no-cudagraphs'": ["default", "max-autotune-no-cudagraphs"],
    "one of 'auto', 'flash', 'cudnn', 'efficient', 'math'": ["cudnn", "auto", "Flash"],
    "one of 'debug', 'info', 'warning', 'error', 'critical'": ["warning", "INFO", "error"],
    "one of 'fp32', 'bf16', 'int8'": ["int8", "fp32", "bf16"],
    "a path, or a list of different paths": [["/a", "/b"], "/a", "none", "relative", ["/a"], []],
    "a multiple of 4096 bytes": [262144, 4096, 262144.0],
    "a number above 0 and at most 1": [0.5, 0.125, 1],
    "a number from 0 to 1, or 'auto'": ["auto", 0.5],
    "a number from 0 to 1": [0.5, 0, 1],
    "a number of elements of at least 1": [1e8, 1],
    "0 or a number of at least 1": [0],  # others depend on the timeout
    "a number of bytes, such as 80GB (decimal) or 128GiB (binary)": ["40GiB", 1, 1 << 50],
    "a number greater than 0": [2.0, 0.125],
    "a number greater than 0 and at most 1e+09": [2.0, 0.125],
    "true, false, a number of blocks, or 'selective'": ["selective", True, False],
    "any value": ["a name"],
}
_NUMBERS = st.floats(0.125, 1e6, allow_nan=False)
_NAMES = st.sampled_from(["lr", "eps", "betas", "weight_decay"])
_WIDER: dict[str, st.SearchStrategy[Any]] = {
    "a section of keys and plain values": st.dictionaries(
        _NAMES, _NUMBERS | st.lists(_NUMBERS, max_size=2).map(tuple), max_size=3
    ),
    "a number of elements of at least 0": st.floats(0, 1e12),
    "a number of at least 0": _NUMBERS,
    "a number greater than 0": _NUMBERS,
    "a number greater than 0 and at most 1e+09": _NUMBERS,
    "an integer of at least 1": st.integers(1, 9),
}


def drawn(kind: str) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a ``kind``."""
    return _WIDER.get(kind, st.sampled_from(VALUES[kind]))

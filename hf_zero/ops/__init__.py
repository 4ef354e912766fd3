"""The engine's operations outside torch: kernels over CPU tensors, files, host memory; in C++ if
the native core is built, else in Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_EXPORTS = {
    "BLOCK": "hf_zero.ops.moment_blocks",
    "Blocks": "hf_zero.ops.moment_blocks",
    "Moment": "hf_zero.ops.moment_blocks",
    "accumulate": "hf_zero.ops.host",
    "adagrad": "hf_zero.ops.host",
    "adam": "hf_zero.ops.host",
    "available": "hf_zero.ops.native",
    "cast": "hf_zero.ops.host",
    "instruction_set": "hf_zero.ops.native",
    "lamb_apply": "hf_zero.ops.host",
    "lamb_measure": "hf_zero.ops.host",
    "lion": "hf_zero.ops.host",
    "set_threads": "hf_zero.ops.native",
    "sgd": "hf_zero.ops.host",
    "squared_norm": "hf_zero.ops.host",
    "threads": "hf_zero.ops.native",
    "why_not": "hf_zero.ops.native",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from hf_zero.ops.host import accumulate as accumulate
    from hf_zero.ops.host import adagrad as adagrad
    from hf_zero.ops.host import adam as adam
    from hf_zero.ops.host import cast as cast
    from hf_zero.ops.host import lamb_apply as lamb_apply
    from hf_zero.ops.host import lamb_measure as lamb_measure
    from hf_zero.ops.host import lion as lion
    from hf_zero.ops.host import sgd as sgd
    from hf_zero.ops.host import squared_norm as squared_norm
    from hf_zero.ops.moment_blocks import BLOCK as BLOCK
    from hf_zero.ops.moment_blocks import Blocks as Blocks
    from hf_zero.ops.moment_blocks import Moment as Moment
    from hf_zero.ops.native import available as available
    from hf_zero.ops.native import instruction_set as instruction_set
    from hf_zero.ops.native import set_threads as set_threads
    from hf_zero.ops.native import threads as threads
    from hf_zero.ops.native import why_not as why_not


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(
            f"module 'hf_zero.ops' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value

"""Fused kernels in Hugging Face models: forwards of module instances are replaced, listed in a
table, and restored by ``hf_zero.restore``.
"""

from __future__ import annotations

from hf_zero.integrations.fused.by_size import narrow_blocks
from hf_zero.integrations.fused.optimize import optimize, prepare, report, restore

__all__ = ["narrow_blocks", "optimize", "prepare", "report", "restore"]

"""Fused kernels on Hugging Face models: replaced on the instance, listed in a table, undone by
``hf_zero.restore``.
"""

from __future__ import annotations

from hf_zero.integrations.fused.optimize import optimize, prepare, report, restore

__all__ = ["optimize", "prepare", "report", "restore"]

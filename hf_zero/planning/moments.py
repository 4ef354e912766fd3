"""Numbers that an optimizer keeps per parameter, and their bytes in each storage format."""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.config import OptimizerConfig
from hf_zero.ops.blocks import BLOCK
from hf_zero.optim.build import build_optimizer
from hf_zero.optim.state import numbers_kept

MASTER_BYTES = 4
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


def moment_bytes(kind: str, count: int, numel: int) -> int:
    """Return the bytes of ``count`` moments of ``numel`` elements each, stored as ``kind``."""
    scales = -(-numel // BLOCK) * 4 if kind == "int8" else 0
    return count * (BYTES[kind] * numel + scales)


def moments_of(optimizer: OptimizerConfig | torch.optim.Optimizer) -> int:
    """Return the numbers that the optimizer keeps per parameter, in the group that keeps most,
    found by a step on a parameter of its own. For Muon, those of AdamW.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = build_optimizer(optimizer, [nn.Parameter(torch.ones(1))], nn.Module())
    return numbers_kept(optimizer)

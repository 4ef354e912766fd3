"""Optimizers and learning-rate schedules for flat shards.

The names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Adafactor": "hf_zero.optim.adafactor",
    "Adam": "hf_zero.optim.adam",
    "BoundOptimizer": "hf_zero.optim.bound_optimizer",
    "CPUAdagrad": "hf_zero.optim.cpu",
    "CPUAdam": "hf_zero.optim.cpu",
    "CPULion": "hf_zero.optim.cpu",
    "CPUSGD": "hf_zero.optim.cpu",
    "Adam8bit": "hf_zero.optim.eight_bit",
    "AdamW8bit": "hf_zero.optim.eight_bit",
    "Lion8bit": "hf_zero.optim.eight_bit",
    "SGD8bit": "hf_zero.optim.eight_bit",
    "LARS": "hf_zero.optim.trust_ratio",
    "Muon": "hf_zero.optim.muon",
    "Lamb": "hf_zero.optim.trust_ratio",
    "Lion": "hf_zero.optim.lion",
    "LRRangeTest": "hf_zero.optim.schedules",
    "OneBitAdam": "hf_zero.optim.one_bit",
    "OneBitLamb": "hf_zero.optim.one_bit_lamb",
    "OneCycle": "hf_zero.optim.schedules",
    "VALID_LR_SCHEDULES": "hf_zero.optim.schedules",
    "WarmupCosineLR": "hf_zero.optim.schedules",
    "WarmupDecayLR": "hf_zero.optim.schedules",
    "WarmupLR": "hf_zero.optim.schedules",
    "ZeroOneAdam": "hf_zero.optim.one_bit",
    "build_optimizer": "hf_zero.optim.build",
    "build_scheduler": "hf_zero.optim.schedules",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from hf_zero.optim.adafactor import Adafactor as Adafactor
    from hf_zero.optim.adam import Adam as Adam
    from hf_zero.optim.bound_optimizer import BoundOptimizer as BoundOptimizer
    from hf_zero.optim.build import build_optimizer as build_optimizer
    from hf_zero.optim.cpu import CPUSGD as CPUSGD
    from hf_zero.optim.cpu import CPUAdagrad as CPUAdagrad
    from hf_zero.optim.cpu import CPUAdam as CPUAdam
    from hf_zero.optim.cpu import CPULion as CPULion
    from hf_zero.optim.eight_bit import Adam8bit as Adam8bit
    from hf_zero.optim.eight_bit import AdamW8bit as AdamW8bit
    from hf_zero.optim.eight_bit import Lion8bit as Lion8bit
    from hf_zero.optim.eight_bit import SGD8bit as SGD8bit
    from hf_zero.optim.lion import Lion as Lion
    from hf_zero.optim.muon import Muon as Muon
    from hf_zero.optim.one_bit import OneBitAdam as OneBitAdam
    from hf_zero.optim.one_bit import ZeroOneAdam as ZeroOneAdam
    from hf_zero.optim.one_bit_lamb import OneBitLamb as OneBitLamb
    from hf_zero.optim.schedules import VALID_LR_SCHEDULES as VALID_LR_SCHEDULES
    from hf_zero.optim.schedules import LRRangeTest as LRRangeTest
    from hf_zero.optim.schedules import OneCycle as OneCycle
    from hf_zero.optim.schedules import WarmupCosineLR as WarmupCosineLR
    from hf_zero.optim.schedules import WarmupDecayLR as WarmupDecayLR
    from hf_zero.optim.schedules import WarmupLR as WarmupLR
    from hf_zero.optim.schedules import build_scheduler as build_scheduler
    from hf_zero.optim.trust_ratio import LARS as LARS
    from hf_zero.optim.trust_ratio import Lamb as Lamb


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(
            f"module 'hf_zero.optim' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value

"""Optimizers and learning-rate schedules for flat shards.

The names below are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# names by module
_MODULES = {
    "adafactor": "Adafactor",
    "adam": "Adam",
    "bound_optimizer": "BoundOptimizer",
    "build": "build_optimizer",
    "cpu": "CPUAdagrad CPUAdam CPULion CPUSGD",
    "eight_bit": "Adam8bit AdamW8bit Lion8bit SGD8bit",
    "lion": "Lion",
    "muon": "Muon",
    "one_bit": "OneBitAdam ZeroOneAdam",
    "one_bit_lamb": "OneBitLamb",
    "schedules": "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR "
    "build_scheduler",
    "trust_ratio": "LARS Lamb",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = list(_MODULE_OF)

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
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module 'hf_zero.optim' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

"""Configuration of progressive layer dropping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.kinds import BOOLEAN, SHARE, number
from hf_zero.config.rows import key

LAYER_DROP = "progressive_layer_drop"


def _idle(values: Mapping[str, Any]) -> str:
    return "" if values.get(f"{LAYER_DROP}.enabled") else f"{LAYER_DROP}.enabled is false"


@dataclass(frozen=True)
class LayerDropSection:
    """Progressive layer dropping (arXiv 2010.13369): training skips random blocks, deeper ones more
    often and more of them as it proceeds; see :mod:`hf_zero.techniques.layer_drop`.
    """

    enabled: bool = key(
        BOOLEAN,
        False,
        "leave out blocks of the model at random while it trains, deeper ones more often",
    )
    theta: float = key(
        SHARE,
        0.5,
        "share of steps in which the last block is kept in the end",
        idle=_idle,
    )
    gamma: float = key(
        number(0),
        0.001,
        "how fast that share falls from 1 to theta, with exp(-gamma * step); 0: never",
        idle=_idle,
    )
    per_rank: bool = key(
        BOOLEAN,
        False,
        "each rank leaves out its own blocks; false: all ranks the same, which are then neither "
        "gathered nor reduced",
        idle=_idle,
    )

"""Momenta in one bit as a feature: the optimizer, or a key beside Adam, switches it on."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.optim.one_bit import as_sent, one_bit_of
from hf_zero.zero.feature import Feature


class OneBitMomenta(Feature):
    """The settings that a momentum in one bit requires."""

    @classmethod
    def adapt(cls, settings: ZeroConfig, optimizer: Any) -> ZeroConfig:
        return as_sent(settings, one_bit_of(settings, optimizer))

    @classmethod
    def is_called(cls, model: nn.Module, settings: ZeroConfig, optimizer: Any) -> bool:
        return one_bit_of(settings, optimizer) is not None

"""``ZeroStrategy`` for the Trainer of ``lightning.pytorch``; ``Trainer(strategy="zero_stage_3")``
needs no import.

For a Trainer of the package ``pytorch_lightning`` it is in
:mod:`hf_zero.integrations.pytorch_lightning`.
"""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from hf_zero.integrations.lightning.precision import PrecisionMethods
from hf_zero.integrations.lightning.strategy import StrategyMethods, register


class ZeroPrecision(PrecisionMethods, Precision):  # type: ignore[misc]
    __doc__ = PrecisionMethods.__doc__
    package = "lightning.pytorch"


class ZeroStrategy(StrategyMethods, DDPStrategy):  # type: ignore[misc]
    __doc__ = StrategyMethods.__doc__
    package = "lightning.pytorch"
    precision_class = ZeroPrecision


register(StrategyRegistry, ZeroStrategy)

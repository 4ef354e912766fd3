"""``ZeroStrategy`` for the Trainer of the package ``pytorch_lightning``, as
:mod:`hf_zero.integrations.lightning` for ``lightning.pytorch``.
"""

from __future__ import annotations

from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from hf_zero.integrations.lightning.precision import PrecisionMethods
from hf_zero.integrations.lightning.strategy import StrategyMethods, register


class ZeroPrecision(PrecisionMethods, Precision):  # type: ignore[misc]
    __doc__ = PrecisionMethods.__doc__
    package = "pytorch_lightning"


class ZeroStrategy(StrategyMethods, DDPStrategy):  # type: ignore[misc]
    __doc__ = StrategyMethods.__doc__
    package = "pytorch_lightning"
    precision_class = ZeroPrecision


register(StrategyRegistry, ZeroStrategy)

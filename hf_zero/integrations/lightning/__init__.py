"""``ZeroStrategy`` for the Trainer of ``lightning.pytorch`` and ``FabricStrategy`` for
``lightning.fabric``; ``Trainer(strategy="zero_stage_3")`` and ``Fabric(strategy="zero_stage_3")``
need no import.

For a Trainer of the package ``pytorch_lightning`` it is in
:mod:`hf_zero.integrations.pytorch_lightning`. The names are imported on first use: modules of this
package are imported while ``import lightning`` runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_zero.integrations.lightning.fabric_strategy import FabricPrecision, FabricStrategy
    from hf_zero.integrations.lightning.lightning_pytorch import ZeroPrecision, ZeroStrategy

__all__ = ["FabricPrecision", "FabricStrategy", "ZeroPrecision", "ZeroStrategy"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "fabric_strategy" if name.startswith("Fabric") else "lightning_pytorch"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)

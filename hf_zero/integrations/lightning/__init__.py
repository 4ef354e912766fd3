"""``ZeroStrategy`` for the Trainer of ``lightning.pytorch``; ``Trainer(strategy="zero_stage_3")``
needs no import.

For a Trainer of the package ``pytorch_lightning`` it is in
:mod:`hf_zero.integrations.pytorch_lightning`. The names are imported on first use: modules of this
package are imported while ``import lightning`` runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_zero.integrations.lightning.lightning_pytorch import ZeroPrecision, ZeroStrategy

__all__ = ["ZeroPrecision", "ZeroStrategy"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_zero.integrations.lightning import lightning_pytorch

    return getattr(lightning_pytorch, name)

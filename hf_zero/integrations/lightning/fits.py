"""A fit of Lightning's Trainer around an engine: its callbacks, the engine of a module, the end of
batches and of the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hf_zero.integrations.engine_protocol import EngineProtocol, holder_of

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.strategies import DDPStrategy as _Strategy
    from lightning.pytorch.strategies import Strategy
else:
    _Strategy = object  # ZeroStrategy adds the DDPStrategy of its package


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the list of callbacks that a connector of ``trainer`` has set."""
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def engine_of(module: torch.nn.Module) -> EngineProtocol | None:
    """Return the engine whose module is ``module`` itself, not a part of it, or None."""
    holders = (holder_of([parameter]) for parameter in module.parameters())
    return next((e for e in holders if e is not None and e.module is module), None)


@contextmanager
def left_in_place(strategy: Strategy) -> Iterator[None]:
    """Keep Lightning's teardown from moving the module and the optimizer to the CPU: an engine's
    memory stays on its device.
    """
    module, optimizers = strategy._lightning_module, strategy.optimizers
    strategy._lightning_module, strategy.optimizers = None, []
    try:
        yield
    finally:
        strategy._lightning_module, strategy.optimizers = module, optimizers


def call_after_batches(
    trainer: Trainer,
    base: type[Callback],
    act: Callable[[], None],
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Have ``trainer`` call ``act`` after the other callbacks of each batch of the present fit, and
    ``at_end`` when it ends. ``base``: the class ``Callback`` of its library.
    """

    class AfterBatches(base):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, *args: object) -> None:
            act()

        def on_train_end(self, *args: object) -> None:
            # another list: the Trainer is iterating over this one
            others = [c for c in callbacks_of(trainer) if c is not self]
            trainer.callbacks = others  # type: ignore[attr-defined]
            at_end()

        on_exception = on_train_end

    callbacks_of(trainer).append(AfterBatches())

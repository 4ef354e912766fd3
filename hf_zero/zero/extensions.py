"""The interface of extensions, which replace parts of an engine's step, and those of a
configuration. The engine knows this interface alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from hf_zero.config import ZeroConfig
from hf_zero.config.features import FEATURES
from hf_zero.zero.layout.engine_plan import PlannedExtensions
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.unit import ShardGather, Unit


class StepExtension:
    """The part of an extension in each step. Every method does nothing here and may be collective,
    except for reports. Within a step they are called in this order; ``gradient_norm()`` may call
    :meth:`before_reduction` and :meth:`squares` in between.
    """

    def begin_backward(self) -> None:
        """Prepare a backward, before it takes gradients in."""

    def before_reduction(self, scale: float) -> None:
        """Prepare the reduction at the end of an accumulation window; a local gradient
        (:meth:`GradientBuffer.keep_local`) times ``scale`` is this rank's term of the mean.
        """

    def begin_step(self, must_agree: bool) -> bool:
        """Begin a step, whose gradients are reduced. Return True if the ranks need not agree in it
        (a local step); with ``must_agree`` return False.
        """
        return False

    def squares(self, local: bool) -> torch.Tensor | None:
        """Return what the gradients that stay on their rank add to this rank's part of the squared
        gradient norm: fp64, 0-dim. ``local``: all of it, estimated from this rank's gradients.
        """
        return None

    def before_update(self) -> None:
        """Prepare the optimizer's update; flat buffers that :meth:`update` changes may be excluded
        from it.
        """

    def update(self, divisor: torch.Tensor | None) -> Sequence[FlatBuffer]:
        """Update flat buffers after the optimizer, from gradients to be divided by ``divisor``.
        Return those whose whole parameters are up to date on all ranks.
        """
        return ()

    def end_step(self, number: int, overflow: bool, scale: float) -> None:
        """End step ``number``, counted from 1; ``scale`` is the loss scale of the next one."""

    # ---- between steps ----

    def synchronize(self) -> None:
        """Make the weights of all ranks equal, before whole weights are read."""

    def complete_state(self) -> None:
        """Complete the optimizer's state on the ranks that own it, before it is saved."""

    @contextmanager
    def counted_state(self) -> Iterator[bool]:
        """Context in which the counters and tensors of the optimizer's state belong to one step.
        Yields whether they change again at its exit.
        """
        yield False

    def forget(self, scale: float) -> None:
        """Reset residuals and other state of the former weights: all weights were replaced.
        ``scale``: the loss scale.
        """

    def state_bytes(self) -> Mapping[str, int]:
        """Return the bytes that this rank keeps on the device, by kind: gradients, optimizer."""
        return {}


@dataclass(frozen=True)
class Extensions(PlannedExtensions):
    """The extensions of one engine: those that its plan reads, and these.

    gathers: makes the source of a unit's gathers. steps: make the :class:`StepExtension` objects of
    an :class:`OptimizerStep`.
    """

    gathers: Callable[[Unit], ShardGather] = ShardGather
    steps: tuple[Callable[[Any], StepExtension], ...] = ()


def extensions_of(config: ZeroConfig, optimizer: torch.optim.Optimizer | None = None) -> Extensions:
    """Return the extensions that ``config`` or ``optimizer`` asks for, by the rows of
    ``config/features.toml``.

    Sequences of several rows are joined; of other fields a later row's value counts.
    """
    values: dict[str, Any] = {}
    joined = {field.name for field in fields(Extensions) if field.default == ()}
    for row in FEATURES.values():
        if row.extends and (row.is_on(config.written) or not row.keys):
            for name, value in loaded(row.extends)(config, optimizer).items():
                values[name] = values.get(name, ()) + value if name in joined else value
    return Extensions(**values)


def loaded(name: str) -> Any:
    """Return the function or class that a row names as ``module:name``, or the module."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    return attrgetter(attribute)(found) if attribute else found


@cache
def provided(name: str) -> Any:
    """Return the function or module that a row provides as ``name``: of an upper layer, for lower
    ones that meet a model of its library.
    """
    rows = [row for row in FEATURES.values() if name in row.provides]
    return loaded(rows[0].provides[name])

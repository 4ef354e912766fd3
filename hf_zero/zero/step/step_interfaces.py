"""Interfaces that features fill in: their hooks in a step and between steps, measures, and requests
to stop. Without a feature they do nothing; a step knows these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from hf_zero.device import spans
from hf_zero.errors import NotBuiltError
from hf_zero.zero.layout.flat_buffer import FlatBuffer

if TYPE_CHECKING:
    from hf_zero.distributed.mesh import Mesh
    from hf_zero.zero.gather.shared_shards import SharedShards

Engine = TypeVar("Engine")


@dataclass(frozen=True)
class StepHooks:
    """The methods of :class:`hf_zero.zero.feature.Feature` that a step, and what comes between
    steps, calls: of each name those of the features that override it, in the order of the features.
    """

    prepare_batch: tuple[Callable[[object], object], ...] = ()
    abort_forward: tuple[Callable[[], None], ...] = ()
    begin_backward: tuple[Callable[[], None], ...] = ()
    before_reduction: tuple[Callable[[float], None], ...] = ()
    begin_step: tuple[Callable[[bool], bool], ...] = ()
    squares: tuple[Callable[[bool], torch.Tensor | None], ...] = ()
    before_update: tuple[Callable[[], None], ...] = ()
    update: tuple[Callable[[torch.Tensor | None], Sequence[FlatBuffer]], ...] = ()
    weights_differ: tuple[Callable[[], bool], ...] = ()
    end_step: tuple[Callable[[int, bool, float], None], ...] = ()
    synchronize: tuple[Callable[[], None], ...] = ()
    complete_state: tuple[Callable[[], None], ...] = ()
    counted_state: tuple[Callable[[], AbstractContextManager[bool]], ...] = ()
    forget: tuple[Callable[[float], None], ...] = ()
    state_bytes: tuple[Callable[[], Mapping[str, int]], ...] = ()


NO_HOOKS = StepHooks()


class StepMeasures(Generic[Engine]):
    """Measures of the steps of one engine. Every method does nothing here; an engine whose
    configuration asks for measures has ``hf_zero.measures.step.EngineMeasures``.

    ``counts_samples``: they add to ``counters.global_samples`` if no batch size is configured.
    """

    counts_samples = False

    def forward(
        self, engine: Engine, args: object, kwargs: object
    ) -> AbstractContextManager[object]:
        """Return a context for a forward with these arguments."""
        return spans.NOTHING

    def backward(
        self, engine: Engine, loss: torch.Tensor, weighed: bool
    ) -> AbstractContextManager[object]:
        """Return a context for the backward of ``loss``, which is ``weighed`` if it has its weight
        in the accumulation window already.
        """
        return spans.NOTHING

    def begin_update(self, engine: Engine) -> None:
        """Note the settings of an update in the backward, before it ends."""

    def step(self, engine: Engine) -> AbstractContextManager[object]:
        """Return a context for a ``step()`` call. May be collective."""
        return spans.NOTHING

    def divided_by(self, steps: int | None) -> None:
        """Note that losses with their weight in them are, from the next one on, divided by
        ``steps``, the micro-batches of a full window; None: by another number.
        """

    def zero_grad(self) -> None:
        """Drop the losses whose gradients are dropped."""

    def trace(self, engine: Engine, steps: int, folder: str) -> None:
        """Trace the next ``steps`` steps into ``folder`` (collective)."""

    @property
    def figures(self) -> Mapping[str, object]:
        """The figures of the last step that has been read, for the trackers of a script; empty
        unless asked for.
        """
        return {}

    @property
    def folder(self) -> Path | None:
        """The folder of ``metrics.jsonl`` on the rank that writes it, once it is known."""
        return None

    def shown_elsewhere(self) -> None:
        """Log no line of a step unless a key asks for it: a trainer shows its own."""

    def finish(self, engine: Engine) -> None:
        """Read the figures of all steps; waits for the device."""

    def keep_in(self, folder: str) -> None:
        """Write files to ``folder`` unless the configuration, or an earlier call, names one.
        Collective: an error of rank 0 is raised on all.
        """

    def plan_steps(self, steps: int) -> None:
        """Record the number of steps after which the run will end."""

    def note_evaluation(self, engine: Engine, values: Mapping[str, object]) -> None:
        """Record those of a script's logged ``values`` that are results of an evaluation."""

    def saving(self, engine: Engine, folder: str) -> None:
        """Write out all figures: a checkpoint is about to be saved in ``folder``."""

    def loaded(self, engine: Engine, continues: bool, folder: str | None) -> None:
        """Continue from the step of a checkpoint that was loaded, unless it was weights alone.
        ``folder``: of its run; None if it is not known.
        """

    def close(self, engine: Engine) -> None:
        """End all measures."""


class StopRequests:
    """Requests to stop the job, from this rank and others; see :meth:`hf_zero.Engine.stop_on`.
    Without a feature that hears them there are none.
    """

    agreed = False  # all ranks stop
    asked = False  # this rank was asked

    def __init__(self, mesh: Mesh, shards: SharedShards):
        self._mesh = mesh
        self._shards = shards

    @property
    def received(self) -> list[int]:
        """Signals that this rank has received, of those it listens for."""
        return []

    def listen(self, *signals: int) -> None:
        """Listen for requests from now on; each of ``signals`` triggers one."""
        if signals:
            self.request()

    def request(self) -> None:
        """Ask all ranks to stop after one of the next steps."""
        raise NotBuiltError(
            "this package has no feature that stops all ranks after the same step; install hf-zero "
            "with the row stop_requests of its table of features, or save and end the script on "
            "all ranks"
        )

    def move(self, mesh: Mesh, shards: SharedShards) -> None:
        """Continue with the parts of an engine that was built again."""

    def end_step(self) -> None:
        """End a step, the same on all ranks: read whether they have agreed to stop."""

    def end_run(self, requests: torch.Tensor) -> None:
        """End a step of a pipeline. ``requests``: the sum over all ranks of :attr:`asked`."""

    def restore_handlers(self) -> None:
        """Restore the previous signal handlers."""

"""Whether the state of an engine may be read, changed or used now: not within a step or load, not
after one that an exception has broken off, and only in part between an update in the backward and
the step that confirms it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_zero.distributed.pass_tracker import PassTracker
from hf_zero.errors import PartitionError
from hf_zero.logging import first_line
from hf_zero.offload.unit_updates import UnitUpdates
from hf_zero.optim.segments import ParamGroup


class StateChanges:
    """The change of an engine's state (a step, a load) under way.

    - An exception that breaks a change off leaves weights, optimizer state and counters that belong
      to different steps, possibly on this rank alone: whatever would use them is refused, until a
      load has replaced all of them.
    - With ``zero_optimization.update_in_backward`` the backward that closes a window makes its
      update. Inside that backward the model is half updated, and nothing may read or change it.
      From its end until ``step()`` the state is that after the step: readers have it, and
      :meth:`refuse_until_step` refuses what would act on this step in a plain loop.
    """

    def __init__(self, passes: PassTracker) -> None:
        self._passes = passes
        self.broken = ""  # the change that was broken off, and why
        self.away = ""  # where the state is that the device lacks, and what brings it back
        self.parameters_away = False  # whether parameter shards are, too
        self._under_way = ""
        self._updater: UnitUpdates | None = None
        # what ``step()`` has yet to confirm, of an update that a backward has made: the settings of
        # the optimizer's groups after it, its hooks, the writes to its state on the device, and the
        # error of a post hook
        self.unconfirmed: tuple[list[ParamGroup], list[int], int, Exception | None] | None = None

    def connect(self, updater: UnitUpdates) -> None:
        """Set ``updater``, which makes updates in backwards."""
        self._updater = updater

    @contextmanager
    def change(self, what: str, replaces: bool = False) -> Iterator[None]:
        """Context of a change, ``what`` in messages; ``replaces``: it replaces all of the state."""
        outer, self._under_way = self._under_way, what
        try:
            yield
        except BaseException as error:
            self.break_off(f"{what} was broken off by {first_line(error)[:200]}")
            raise
        finally:
            self._under_way = outer
        if replaces and self.broken:
            self.broken = ""
            self._passes.refuse_with(None)

    def break_off(self, cause: str) -> None:
        """Refuse every use of the state from now on, because of the first ``cause``."""
        self.broken = self.broken or cause
        self._passes.refuse_with(self.refuse)

    def begin_load(self) -> None:
        """Drop what a backward has left for ``step()``, before a load. Of a half updated model only
        a load that replaces all of the state makes it usable again.
        """
        if self._updater is not None:
            if self._updater.backward_update is not None:
                self.break_off("a backward had updated a part of the model before a load")
            self._updater.drop_backward_update()
        self.unconfirmed = None

    def refuse(self, what: str) -> None:
        """Raise PartitionError for ``what``, which reads the state, if a change was broken off, the
        model is half updated, or state is away.
        """
        if self.broken:
            raise PartitionError(
                f"{what} would use a state that is half changed: {self.broken}. Load a whole "
                "checkpoint (engine.load_checkpoint), or destroy() the engine and resume with "
                "hf_zero.initialize(resume=...), on all ranks"
            )
        self.refuse_until_step(what, acts=False)

    def refuse_until_step(self, what: str, acts: bool = True) -> None:
        """Raise PartitionError for ``what`` if the model is half updated, or state is away; if it
        ``acts`` on the update in a plain loop, also until ``step()`` confirms an update in the
        backward.
        """
        if self.away:
            raise PartitionError(f"{what} {self.away}")
        if self._updater is not None and self._updater.backward_update is not None:
            raise PartitionError(
                f"{what} comes inside a backward that has updated a part of the model already "
                "(zero_optimization.update_in_backward), or after an exception has broken it. Call "
                "it after the backward, or switch update_in_backward off; if an exception has "
                "broken the backward, load a checkpoint"
            )
        if acts and self.unconfirmed is not None:
            self.refuse_unconfirmed(what)

    def refuse_unconfirmed(self, what: str) -> None:
        """Raise PartitionError for ``what`` between an update in the backward and ``step()``."""
        if self.unconfirmed is not None:
            raise PartitionError(
                f"{what} comes after a backward that has updated the model already "
                "(zero_optimization.update_in_backward) and before its step(): without that key it "
                "would precede the update. Call step() first, or switch update_in_backward off; "
                "call the backwards before the last one of a step, and torch.autograd.grad, inside "
                "engine.no_sync()"
            )

    def refuse_gradients(self, what: str) -> None:
        """Raise PartitionError for ``what`` of whole gradients inside a step, which divides them in
        place.
        """
        if self._under_way:
            raise PartitionError(
                f"{what} in a hook of {self._under_way}, which uses the gradients up; do it before "
                "optimizer.step(), or change the gradients of this rank's parts in a hook before "
                "the update: member.grad of each member of optimizer.param_groups"
            )

    def refuse_within(self, what: str) -> None:
        """Raise PartitionError for ``what`` inside a change."""
        if self._under_way:
            raise PartitionError(
                f"{what} in a hook of {self._under_way}, whose weights are changed and whose "
                "counters and schedule are not; call it after the step"
            )

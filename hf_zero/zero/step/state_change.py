"""Changes of an engine's state (a step, a load) that are complete, or refused from then on."""

from __future__ import annotations

from types import TracebackType

from hf_zero.errors import PartitionError


class StateChanges:
    """The change of the state of one engine under way. An exception that breaks it off leaves
    weights, optimizer state and counters that belong to different steps, possibly on this rank
    alone: whatever would use them is refused, until a load has replaced all of them.
    """

    def __init__(self) -> None:
        self._broken = ""
        self._under_way: list[StateChange] = []

    def begin(self, what: str, replaces: bool = False) -> StateChange:
        """Return the context of a change called ``what`` in messages; ``replaces``: it replaces all
        of the state.
        """
        return StateChange(self, what, replaces)

    def refuse(self, what: str) -> None:
        """Raise PartitionError for ``what`` if a change was broken off."""
        if self._broken:
            raise PartitionError(
                f"{what} would use a state that is half changed: {self._broken}. Load a whole "
                "checkpoint (engine.load_checkpoint), or destroy() the engine and resume with "
                "hf_zero.initialize(resume=...), on all ranks"
            )

    def enter(self, change: StateChange) -> None:
        self._under_way.append(change)

    def leave(self, change: StateChange, error: BaseException | None) -> None:
        outermost = self._under_way[0] is change
        self._under_way.remove(change)
        if error is not None and not self._broken:
            said = str(error).partition("\n")[0]
            self._broken = f"{change.what} was broken off by {type(error).__name__}"
            self._broken += f" ({said[:200]})" if said else ""
        elif error is None and change.replaces and outermost:
            self._broken = ""


class StateChange:
    """The context of one change."""

    def __init__(self, changes: StateChanges, what: str, replaces: bool) -> None:
        self._changes, self.what, self.replaces = changes, what, replaces

    def __enter__(self) -> None:
        self._changes.enter(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._changes.leave(self, error)

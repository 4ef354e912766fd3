"""The interface of ``optimizer.state`` by member of the groups, which a feature provides, and what
is in its place without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hf_zero.optim.segment_entries import nothing
from hf_zero.optim.segments import Segment


def _allow(key: object) -> None:
    """Refuse no key."""


@dataclass(frozen=True)
class StateUses:
    """What is called where a script uses ``optimizer.state``.

    Args:
        restart: resets all state to that before the first step.
        refuse: raises for a key that never has an entry, such as a parameter of the model.
        wait: waits for the update of offloaded state.
        before_write: raises while a change is refused.
    """

    restart: Callable[[], object]
    refuse: Callable[[object], None] = _allow
    wait: Callable[[], object] = nothing
    before_write: Callable[[], None] = nothing


class StateByMember(Protocol):
    """The state by member of the groups, as the engine uses it."""

    @property
    def open(self) -> Mapping[Any, Any]:
        """Entries that a script may have written to."""

    def watch(self, uses: StateUses) -> None:
        """Let a script's uses call ``uses``."""

    def replace(self, states: Mapping[Any, Any]) -> None:
        """Let ``states`` be the state of all members."""

    def take(self) -> None:
        """Store what a script has written to entries since the last call."""

    def discard(self) -> None:
        """Forget the entries, and what a script has written to them."""

    def run_hooks(
        self, run: Callable[[], None], segments: Sequence[Segment], gradients: list[Tensor]
    ) -> tuple[list[Segment], list[Tensor]]:
        """``run`` the hooks before a step of ``segments``, with the gradients of their members;
        return those that are stepped, with their ``gradients``.
        """


class HiddenStates(dict[Any, Any]):
    """The :class:`StateByMember` without a feature: no member has an entry or a gradient."""

    open: Mapping[Any, Any] = {}

    def __init__(self, *_: object) -> None:
        super().__init__()

    def watch(self, uses: StateUses) -> None:
        """Call nothing."""

    def replace(self, states: Mapping[Any, Any]) -> None:
        """Drop ``states``."""

    def take(self) -> None:
        """Store nothing."""

    def discard(self) -> None:
        """Forget nothing."""

    def run_hooks(
        self, run: Callable[[], None], segments: Sequence[Segment], gradients: list[Tensor]
    ) -> tuple[list[Segment], list[Tensor]]:
        run()
        return [*segments], gradients

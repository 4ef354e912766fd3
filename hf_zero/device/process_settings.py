"""Settings of this process that each of several engines changes for its lifetime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(eq=False)
class _Change(Generic[Value]):
    before: Value
    value: Value


class ProcessSetting(Generic[Value]):
    """A setting that is read by ``read`` and set by ``write``, with the changes in effect."""

    def __init__(self, read: Callable[[], Value], write: Callable[[Value], object]):
        self._read, self._write = read, write
        self._changes: list[_Change[Value]] = []  # by time

    def change(self, value: Value) -> Callable[[], None]:
        """Set ``value``; return a function that restores the value before, in whichever order
        changes end. It leaves a value that others have set since, and may be called again.
        """
        change = _Change(self._read(), value)
        self._write(value)
        self._changes.append(change)

        def restore() -> None:
            if change not in self._changes:
                return
            at = self._changes.index(change)
            del self._changes[at]
            if at < len(self._changes):  # the next change restores the value before this one
                later = self._changes[at]
                later.before = change.before if later.before == value else later.before
            elif self._read() == value:
                self._write(change.before)

        return restore

"""Updates of offloaded state that begin when a test, or whoever needs one, says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hf_zero.offload.sub_group_update import Update
from hf_zero.offload.update import Updater


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Updates wait for it from when it is cleared."""
    opened, run = threading.Event(), Update.run
    opened.set()

    def held(update: Update, *args: Any) -> None:
        assert opened.wait(120), "nobody has opened the gate"
        run(update, *args)

    monkeypatch.setattr(Update, "run", held)
    return opened


@pytest.fixture
def held_up(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """No update begins before somebody waits for it."""
    begin, finish = Updater.start, Updater.finish

    def begun(self: Updater, *args: Any, **more: Any) -> None:
        finish(self)
        gate.clear()
        begin(self, *args, **more)

    def wanted(self: Updater, *args: Any) -> None:
        if self.pending:
            gate.set()
        finish(self, *args)

    monkeypatch.setattr(Updater, "start", begun)
    monkeypatch.setattr(Updater, "finish", wanted)

"""Updates of offloaded state that begin when a test, or whoever needs one, says so."""

import threading

import pytest

from hf_zero.offload.sub_group_update import SubGroupUpdate
from hf_zero.offload.update import OffloadedUpdater


@pytest.fixture
def gate(monkeypatch):
    """Updates wait for it from when it is cleared."""
    opened, run = threading.Event(), SubGroupUpdate.run
    opened.set()

    def held(update, *args):
        assert opened.wait(120), "nobody has opened the gate"
        run(update, *args)

    monkeypatch.setattr(SubGroupUpdate, "run", held)
    return opened


@pytest.fixture
def held_up(gate, monkeypatch):
    """No update begins before somebody waits for it."""
    begin, finish = OffloadedUpdater.start, OffloadedUpdater.finish

    def begun(self, *args, **more):
        finish(self)
        gate.clear()
        begin(self, *args, **more)

    def wanted(self, *args):
        if self.pending:
            gate.set()
        finish(self, *args)

    monkeypatch.setattr(OffloadedUpdater, "start", begun)
    monkeypatch.setattr(OffloadedUpdater, "finish", wanted)

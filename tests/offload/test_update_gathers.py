"""When the thread of a rank issues gathers of updates that another rank needs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.offload import update_gathers
from hf_zero.offload.update_gathers import UpdateGathers


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> UpdateGathers:
    """Two updated units of a backward, of which another rank needs the first for a minute; its
    thread is the test's.
    """
    monkeypatch.setattr(update_gathers, "time", SimpleNamespace(monotonic=iter_of(1.0)))
    monkeypatch.setattr(update_gathers.threading.Thread, "start", lambda self: None)
    posts = SimpleNamespace(asked=lambda topic: 1, ask=lambda topic, number: None)
    made = UpdateGathers((1,), posts, lambda: None)  # type: ignore[arg-type]
    for label in ("a", "b"):
        updated: Future[Any] = Future()
        updated.set_result(None)
        made.add(label, (), updated, None)
    made._thread = None  # nothing to join at exit
    made._talk()
    return made


def iter_of(step: float) -> Callable[[], float]:
    """A clock that goes on by ``step`` seconds each time it is read."""
    now = [0.0]

    def read() -> float:
        now[0] += step
        return now[0]

    return read


def test_a_backward_is_not_overtaken_by_the_gather_of_its_own_update(gathers) -> None:
    """Its reductions come first on the rank that needs the gather, which may read weights before
    the step.
    """
    assert gathers._next() is None
    gathers.end_backward()
    first = gathers._next()
    assert first is not None and first.label == "a"
    gathers._issue(first)
    assert gathers._next() is None, "nobody has asked for the second"


def test_a_forward_issues_what_it_needs_before_its_step_is_complete(gathers) -> None:
    """As a load does, which drops the rest of the update."""
    with gathers._changed:
        gathers._allow(2)
    assert [gathers._next().label, gathers._issue(gathers._next())] == ["a", None]
    assert gathers._next().label == "b"

"""When the thread of a rank issues gathers of updates that another rank needs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from hf_zero.offload import update_gathers
from hf_zero.offload.update_gathers import ASKED, BEFORE_STEP, UpdateGathers

Asked = dict[str, int]


@pytest.fixture
def asked() -> Asked:
    """The posts of the other rank, by topic."""
    return {ASKED: 0, BEFORE_STEP: 0}


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> UpdateGathers:
    """Two updated units of a backward, whose thread is the test's."""
    monkeypatch.setattr(update_gathers, "time", SimpleNamespace(monotonic=iter_of(1.0)))
    monkeypatch.setattr(update_gathers.threading.Thread, "start", lambda self: None)
    posts = SimpleNamespace(asked=asked.__getitem__, ask=asked.__setitem__)
    made = UpdateGathers((1,), posts, lambda: None)  # type: ignore[arg-type]
    for label in ("a", "b"):
        updated: Future[Any] = Future()
        updated.set_result(None)
        made.add(label, (), updated, None)
    made._thread = None  # nothing to join at exit
    return made


def iter_of(step: float) -> Callable[[], float]:
    """A clock that goes on by ``step`` seconds each time it is read."""
    now = [0.0]

    def read() -> float:
        now[0] += step
        return now[0]

    return read


def test_a_step_is_not_overtaken_by_the_gather_of_its_early_update(gathers, asked) -> None:
    """Its reductions and agreements come first on the rank that needs the gather, in its next
    forward.
    """
    asked[ASKED] = 1
    gathers._talk()
    assert gathers._next() is None
    gathers.end_backward()
    assert gathers._next() is None
    gathers.complete()
    first = gathers._next()
    assert first is not None and first.label == "a"
    gathers._issue(first)
    assert gathers._next() is None, "nobody has asked for the second"


def test_a_rank_that_reads_weights_before_the_step_has_them(gathers, asked) -> None:
    asked[BEFORE_STEP] = 2
    gathers._talk()
    assert gathers._next() is None, "the backward has yet to issue reductions"
    gathers.end_backward()
    gathers._talk()
    for label in ("a", "b"):
        assert gathers._next().label == label
        gathers._issue(gathers._next())


def test_what_a_rank_needs_is_posted_by_its_place_in_the_step(gathers, asked) -> None:
    first, second = gathers._queue
    for gather, topic in ((first, BEFORE_STEP), (second, ASKED)):
        gather.issued.set_result([])
        gathers.wait(gather)
        gathers._talk()
        assert asked[topic] == gather.number
        gathers.complete()
    assert asked == {BEFORE_STEP: 1, ASKED: 2}


def test_a_forward_issues_what_it_needs_before_its_step_is_complete(gathers) -> None:
    """As a load does, which drops the rest of the update."""
    with gathers._changed:
        gathers._allow(2)
    assert [gathers._next().label, gathers._issue(gathers._next())] == ["a", None]
    assert gathers._next().label == "b"

"""The accumulation window alone: what its events leave in its counts, and what it warns of."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hf_zero.errors import UnmanagedWindowError
from hf_zero.logging import logger
from hf_zero.zero.step.window import AccumulationWindow, BackwardPlace, Counters, WindowEnd


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The messages that are logged."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def run_micro_batch(window: AccumulationWindow, counters: Counters) -> None:
    """A backward and its step, which counts into ``counters``."""
    window.begin_backward(window.next_backward)
    if window.begin_step(False):
        counters.micro_steps += window.end_window(1)
        counters.global_steps += 1
    else:
        counters.micro_steps += window.end_micro_batch(1, counters)


def test_counters_before_are_those_of_this_window() -> None:
    window, counters = AccumulationWindow(2), Counters()
    run_micro_batch(window, counters)
    assert window.counters_before(counters) == Counters()
    run_micro_batch(window, counters)
    assert window.counters_before(counters) == Counters(global_steps=1, micro_steps=2)
    window.set_micro_steps(5)  # a script sets the place inside a later window
    assert window.counters_before(counters) == Counters(global_steps=1, micro_steps=2)


def test_a_script_that_sets_the_place_in_an_open_window_has_counted_it_itself() -> None:
    window, counters = AccumulationWindow(3), Counters(micro_steps=3, global_steps=1)
    run_micro_batch(window, counters)
    window.set_micro_steps(5)
    assert window.counters_before(counters) is counters


def test_broken_backwards_are_no_backwards_without_a_step(heard: list[str]) -> None:
    window = AccumulationWindow(1, warns=True)
    for _ in range(20):
        assert window.begin_backward(window.next_backward)
        window.undo_backward()
    assert not heard and not window.held_micro_batches
    for _ in range(9):
        window.begin_backward(window.next_backward)
    assert len(heard) == 1 and heard[0].startswith("9 backwards without engine.step()")


def test_a_broken_backward_does_not_show_how_zero_grad_is_called(heard: list[str]) -> None:
    window, counters = AccumulationWindow(3, warns=True), Counters()
    run_micro_batch(window, counters)
    window.begin_backward(window.next_backward)  # without zero_grad() before it
    window.undo_backward()
    assert window.keeps_at_zero_grad()  # after the first micro-batch, as after each
    run_micro_batch(window, counters)
    assert window.keeps_at_zero_grad()
    assert len(heard) == 1 and "after micro-batch 1 of 3" in heard[0]


def test_a_step_after_all_backwards_of_a_window_is_told(heard: list[str]) -> None:
    window = AccumulationWindow(2, warns=True)
    for _ in range(2):
        window.begin_backward(window.next_backward)
    assert not window.begin_step(False)
    assert "with gradient_accumulation_steps = 2 call it" in heard[0]
    assert "one call of 2 updates" in heard[0]


def test_only_restarts_without_an_update_between_are_in_a_row(heard: list[str]) -> None:
    window, counters = AccumulationWindow(2, warns=True), Counters()
    for restarts in (2, 2, 3):
        for _ in range(restarts):
            run_micro_batch(window, counters)
            window.restart()
        assert bool(heard) == (restarts == 3)
        run_micro_batch(window, counters)
        run_micro_batch(window, counters)
    assert window.restarts == 7 and window.updates == 3


def test_what_ends_a_window() -> None:
    counted, by_step = AccumulationWindow(2), AccumulationWindow(2, managed=False)
    assert counted.next_backward is by_step.next_backward is BackwardPlace.UNDECIDED
    assert not counted.ends_by_step and by_step.ends_by_step and not by_step.ends
    counted.set_end(WindowEnd.NEXT_BACKWARD)
    assert counted.next_backward is BackwardPlace.LAST and counted.ends
    with counted.no_sync():
        assert counted.next_backward is BackwardPlace.INSIDE
    counted.set_end(WindowEnd.LATER_BACKWARD)
    assert counted.next_backward is BackwardPlace.INSIDE and not counted.ends
    with pytest.raises(UnmanagedWindowError, match="managed_gradient_accumulation is false"):
        by_step.set_end(WindowEnd.NEXT_BACKWARD)

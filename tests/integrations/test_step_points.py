"""The table of what scripts read and write at the points of a step, on each route beside the same
script in plain torch: values, weights, and errors whose remedy is a cell that works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import errors
from hf_zero.integrations.step_points import (
    ACCESSES,
    GRAPH,
    HOOKS,
    READS,
    ROUTES,
    WRITES,
    Access,
    AccessOutcome,
    Effect,
    Remedy,
    Route,
    StepPhase,
)
from tests.helpers import step_accesses
from tests.helpers.cells import in_turn
from tests.helpers.ranks import RankFailed
from tests.helpers.step_accesses import Session, in_hook
from tests.helpers.step_routes import At, alone, under_engine

ACTING, CLIP = 1, 0.05  # the second step: there is optimizer state
WORKS = {*Effect} - {Effect.REFUSED, Effect.AS_IN_TORCH, Effect.NOTHING_HELD}
WITHOUT_GRADIENTS = (
    "p.grad in place",
    "members",
    "member gradients",
    "clip parameters",
    "clip members",
)
Cell = tuple[str, str, str, int, float]  # route, access, point, stage, limit


def acts_at(table: Route, point: str, access: Callable[[Session], None]) -> At:
    """Return the function of a script that calls ``access`` at ``point`` of the second step."""
    first = next(iter(table.points))

    def at(place: str, step: int, session: Session) -> None:
        if step != ACTING:
            return
        if place == first and table.points[point] in HOOKS:
            in_hook(session, point, lambda: access(session))
        elif place == point:
            access(session)

    return at


def writes(route: Route) -> Iterator[tuple[str, str]]:
    yield from ((access.name, point) for access, point in route.cells(writes=True))


# cells that acted otherwise than the table says
ONCE_WRONG: list[Cell] = [
    ("accelerate", "set p.grad", "after step", 2, CLIP),
    ("trainer", "set gradient", "on_pre_optimizer_step", 2, CLIP),
    ("trainer", "limit", "on_substep_end", 3, CLIP),
    ("lightning", "set gradient", "configure_gradient_clipping", 1, CLIP),
    ("lightning manual", "set p.grad", "after clipping", 3, CLIP),
    ("lightning manual", "set gradient", "on_before_optimizer_step", 0, CLIP),
    ("lightning manual", "unfreeze", "after zero_grad", 3, CLIP),
    ("fabric", "set gradient", "after clipping", 2, CLIP),
    ("fabric", "limit", "after clipping", 1, CLIP),
    ("loop", "member gradients", "register_step_pre_hook", 1, CLIP),
    ("accelerate", "members", "register_step_pre_hook", 3, 0.0),
    ("accelerate", "set gradient", "register_step_pre_hook", 1, CLIP),
    ("loop", "drop gradients", "register_step_pre_hook", 3, CLIP),
    ("loop", "load state", "register_step_pre_hook", 1, CLIP),
]


def all_cells() -> list[Cell]:
    return [
        (route.name, *cell, stage, (0.0, CLIP)[(stage + at) % 2])
        for route in ROUTES.values()
        for at, cell in enumerate(writes(route))
        for stage in range(4)
    ]


def some_cells() -> list[Cell]:
    """Each access of a route in one phase, and what differs on it: phases, stages and limits take
    turns over the routes.
    """
    found = [*ONCE_WRONG]
    phases, names = list(StepPhase), list(ACCESSES)
    for number, route in enumerate(ROUTES.values()):
        chosen: dict[Any, tuple[str, str]] = {}
        for access, point in writes(route):
            wanted = phases[(names.index(access) + number) % len(phases)]
            if route.points[point] is wanted or (access, point) in route.different:
                chosen.setdefault((access, (access, point) in route.different), (access, point))
        for at, cell in enumerate(chosen.values()):
            found.append((route.name, *cell, (at + at // 4) % 4, (0.0, CLIP)[at % 2]))
    return found


@cache
def untouched(route: str, clip: float) -> dict[str, torch.Tensor]:
    return alone(route, clip, lambda *_: None)


def assert_same(found: Any, want: Any) -> None:
    if isinstance(want, dict):
        assert found.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-6, msg=name)
    else:
        assert found == pytest.approx(want, rel=1e-5)


def cause(error: BaseException) -> BaseException | None:
    return error.__cause__ if isinstance(error, RankFailed) else error


def is_error(error: BaseException | None, outcome: AccessOutcome) -> None:
    """Assert that ``error`` is the one of ``outcome``, and names its remedy."""
    assert outcome.effect in (Effect.REFUSED, Effect.UNLESS_MISSED), repr(error)
    assert type(error) is getattr(errors, outcome.error), repr(error)
    assert outcome.remedy is not None and outcome.remedy.words in str(error), str(error)


@pytest.mark.turns
@pytest.mark.parametrize("stage", [3, 0, 1, 2])
@pytest.mark.parametrize("clip", [0.0, CLIP])
@pytest.mark.parametrize("route", [*ROUTES])
def test_what_is_read_at_each_point(route: str, clip: float, stage: int, tmp_path: Path) -> None:
    """All reads at all points of one training, which they do not change."""
    table = ROUTES[route]
    found: dict[tuple[str, str], Any] = {}
    want: dict[tuple[str, str], Any] = {}

    def read(into: dict[tuple[str, str], Any], point: str, session: Session) -> None:
        session.folder = tmp_path
        for access in READS:
            outcome = table.outcome(access, point, stage)
            assert outcome is not None
            try:
                value = step_accesses.READS[access.name](session)
            except errors.HfZeroError as error:
                is_error(error, outcome)
                value = None
            if session.plain or session.engine.global_rank == 0:
                into[access.name, point] = value

    def reads(into: dict[tuple[str, str], Any]) -> At:
        at_points = [acts_at(table, point, partial(read, into, point)) for point in table.points]

        def at(*place: Any) -> None:
            for at_point in at_points:
                at_point(*place)

        return at

    weights = under_engine(route, stage, clip, reads(found))
    assert_same(alone(route, clip, reads(want)), untouched(route, clip))
    assert_same(weights, untouched(route, clip))
    assert list(found) == [(access.name, point) for point in table.points for access in READS]
    for (name, point), value in found.items():
        outcome = table.outcome(ACCESSES[name], point, stage)
        assert outcome is not None
        if outcome.effect is Effect.VALUE:
            assert_same(value, want[name, point])
        elif isinstance(value, dict):
            assert {*value.values()} == {None}, (name, point)


@in_turn("route, access, point, stage, clip", some_cells(), long=all_cells())
def test_when_a_write_acts(route: str, access: str, point: str, stage: int, clip: float) -> None:
    outcome = ROUTES[route].outcome(ACCESSES[access], point, stage)
    assert outcome is not None
    caught: list[BaseException] = []

    def write(session: Session) -> None:
        if session.plain and outcome.effect in (Effect.NO_EFFECT, Effect.REFUSED):
            return
        if session.plain and outcome.effect is Effect.RESTARTS:
            session.held = 0
        try:
            step_accesses.WRITES[access](session)
        except errors.HfZeroError as error:
            if session.engine.global_rank == 0:
                caught.append(error)

    at = acts_at(ROUTES[route], point, write)
    if outcome.effect is Effect.AS_IN_TORCH:
        with pytest.raises(RuntimeError) as of_torch:
            alone(route, clip, at)
        with pytest.raises((RankFailed, RuntimeError)) as ours:
            under_engine(route, stage, clip, at)
        assert type(cause(ours.value)) is of_torch.type and "inplace" in str(ours.value)
        return
    try:
        weights = under_engine(route, stage, clip, at)
    except (RankFailed, errors.HfZeroError) as failed:  # by what comes after the write
        is_error(cause(failed), outcome)
        return
    if outcome.effect is not Effect.AFTER_BACKWARD or stage < 3:
        assert_same(weights, untouched(route, clip) if caught else alone(route, clip, at))
    if outcome.effect is Effect.REFUSED:
        assert len(caught) == 1, "nothing was refused"
    for error in caught:
        is_error(error, outcome)


DROPS = {  # points before the step at which the route takes zero_grad()
    "accelerate": "after the last backward",
    "trainer": "on_pre_optimizer_step",
    "lightning": "on_before_optimizer_step",
    "lightning manual": "after clipping",
    "fabric": "after clipping",
}


@pytest.mark.parametrize("stage, route", [*zip([1, 3, 0, 2, 3], DROPS)])
def test_hooks_run_in_a_step_without_gradients(route: str, stage: int) -> None:
    """optimizer.zero_grad() comes just before optimizer.step(), whose hooks torch runs even so."""
    ran: list[bool] = []

    def write(session: Session, factor: float) -> None:
        ran.append(session.plain)
        with torch.no_grad():
            for group in session.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(factor)

    def at(place: str, step: int, session: Session) -> None:
        if step == ACTING and place == DROPS[route]:
            if route != "lightning":  # whose steps run them before the backward
                in_hook(session, "register_step_pre_hook", lambda: write(session, 1.1))
            in_hook(session, "register_step_post_hook", lambda: write(session, 0.9))
            session.optimizer.zero_grad()

    want = alone(route, CLIP, at)
    assert_same(under_engine(route, stage, CLIP, at), want)
    assert ran.count(False) == ran.count(True) * (2 if route == "accelerate" else 1) > 0


@pytest.mark.parametrize("stage", [1, 0])
def test_a_hook_is_told_that_it_finds_parts(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    """A norm of the members' gradients is that of this rank's parts."""
    table = ROUTES["loop"]
    with caplog.at_level("WARNING"):
        under_engine("loop", stage, 0.0, acts_at(table, "register_step_pre_hook", lambda _: None))
    assert ("norm of them is not that of the whole gradient" in caplog.text) == (stage > 0)


@pytest.mark.parametrize("route", [*ROUTES])
def test_each_remedy_works(route: str) -> None:
    """It is an access that its route has, with an effect, where the message says."""
    table = ROUTES[route]
    for access in (*READS, *WRITES):
        for point, phase in table.points.items():
            for stage in (0, 3):
                outcome = table.outcome(access, point, stage)
                if outcome is None or outcome.effect is not Effect.REFUSED:
                    continue
                assert isinstance(outcome.remedy, Remedy) and hasattr(errors, outcome.error)
                there = outcome.remedy.phase or phase
                works = [
                    found.effect in WORKS
                    for place, its_phase in table.points.items()
                    if its_phase is there
                    and (found := table.outcome(ACCESSES[outcome.remedy.access], place, stage))
                ]
                assert works and any(works), (access.name, point)


def test_the_table_is_whole() -> None:
    """Each access has a script, and each phase of a route an outcome; routes name points."""
    assert [*step_accesses.READS] == [access.name for access in READS]
    assert [*step_accesses.WRITES] == [access.name for access in WRITES]
    for route in ROUTES.values():
        for access, point in route.different:
            assert access in ACCESSES and point in route.points
        assert {*route.codes} <= {*ACCESSES}
    reads: list[Access] = [access for access in READS if {*access.outcomes} != {*StepPhase}]
    assert reads == [] and all(
        GRAPH in access.outcomes or access.name in WITHOUT_GRADIENTS for access in WRITES
    )

"""Runs that end early go on: killed, told to end, on other ranks, from disk and memory."""

import json
from pathlib import Path

import pytest

from tests.helpers import launched
from tests.helpers.cells import fast

SCRIPT = Path(__file__).parent / "scripts" / "going_on.py"
SIGNALED = SCRIPT.with_name("signaled.py")
A_STEP, AT, STEPS, PATIENCE = 8, 3, 7, 300.0


def rows(reports, route):
    """Return the rows of each step, in the order in which micro-batches and ranks have them."""
    parts = zip(*(report[route]["rows"] for report in reports), strict=True)
    seen = [row for micro in parts for batch in micro for row in batch]
    return [seen[at : at + A_STEP] for at in range(0, len(seen), A_STEP)]


def run(ranks, out, *arguments):
    if ranks == 1:
        return [launched.alone(SCRIPT, out, *arguments)]
    return launched.torchrun(SCRIPT, out, *arguments, ranks=ranks)


RESTARTED = [("trainer", True), ("accelerated", False), ("accelerated", True)]


@pytest.mark.parametrize("route, in_memory", fast(RESTARTED, lambda *cell: cell == RESTARTED[0]))
def test_the_next_attempt_is_as_if_nothing_had_happened(route, in_memory, tmp_path):
    """Bit for bit, with dropout: killed in step 5, in the second epoch; saved after step 3."""
    memory = str(tmp_path / "memory") if in_memory else ""
    if route == "accelerated":
        keys = {"checkpoint": {"memory": {"every": AT, "folder": memory}}} if in_memory else {}
        command, option = launched.accelerate_command(SCRIPT, tmp_path, 2, **keys), "--max_restarts"
    else:
        command, option = launched.torchrun_command(SCRIPT), "--max-restarts"
    command[3:3] = [option, "1"]
    given = ["--routes", route, "--memory", memory, "--dropout", "0.2", "--fails", "5"]
    with launched.started(command, tmp_path, [*given, "--stage", "2"]) as process:
        assert launched.ended(process, PATIENCE) == 0, (tmp_path / "log.txt").read_text()[-8000:]
    for rank, found in enumerate(launched.reports(tmp_path, 2)):
        whole = json.loads((tmp_path / f"whole-{route}-{rank}.json").read_text())
        assert found["attempt"] == 1 and found[route]["first"] == AT
        assert found[route]["losses"] == whole[len(whole) - len(found[route]["losses"]) :] != []
    assert bool(list((tmp_path / "runs").glob("**/manifest.json"))) is not in_memory
    assert not list((tmp_path / "memory").glob("*")), "its memory is free again"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two ranks at stage 3 with saves, without an end: its folder and reports."""
    out = tmp_path_factory.mktemp("saved")
    return out, run(2, out, "--routes", "trainer", "accelerated", "--stage", "3")


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, stage, more",
    [
        (1, 2, ("--accumulate", "2")),
        (4, 0, ("--accumulate", "2")),
        (1, 3, ("--micro", "4")),  # with the same arguments: a Trainer accumulates
    ],
)
def test_other_ranks(ranks, stage, more, saved, tmp_path):
    folder, whole = saved
    routes = ("trainer",) if "--micro" in more else ("trainer", "accelerated")
    given = ("--resume", "--runs", str(folder / "runs"), "--at", str(AT), "--stage", str(stage))
    reports = run(ranks, tmp_path, *given, "--routes", *routes, *more)
    assert reports[0]["trainer"]["accumulation"] == 2
    for route in routes:
        expected, losses = rows(whole, route), whole[0][route]["losses"]
        assert len(expected) == STEPS
        assert sorted(row for step in expected[:4] for row in step) == list(range(32))
        assert rows(reports, route) == expected[AT:], route
        assert reports[0][route]["losses"] == pytest.approx(losses[AT:], rel=1e-6), route
        lost = f"was saved by 2 rank(s), this run has {ranks}: random states of ranks"
        told = [sum(lost in said for said in report[route]["said"]) for report in reports]
        assert told == [1] + [0] * (ranks - 1)


@pytest.mark.long
def test_from_the_memory_of_other_ranks(saved, tmp_path):
    """The host of rank 1 is lost: its file comes from its copy."""
    whole, given = saved[1], ["--memory", str(tmp_path / "memory"), "--stage", "3"]
    command, failed = launched.torchrun_command(SCRIPT), tmp_path / "failed"
    with launched.started(command, failed, [*given, "--fails", "5"]) as process:
        assert launched.ended(process, PATIENCE) not in (0, None)
    reports = run(4, tmp_path / "resumed", *given, "--resume", "--micro", "2")
    assert rows(reports, "trainer") == rows(whole, "trainer")[AT:]
    assert {found["trainer"]["first"] for found in reports} == {AT}
    losses = whole[0]["trainer"]["losses"][AT:]
    assert reports[0]["trainer"]["losses"] == pytest.approx(losses, rel=1e-5)


def test_every_route_saves_at_one_step_on_a_signal(tmp_path):
    """To one rank, in a forward; each run is resumed."""
    reports = launched.torchrun(SIGNALED, tmp_path)
    for one, other in zip(*(found["runs"] for found in reports), strict=True):
        assert one == other and one["code"] == 85 and one["step"] >= 3, (one, other)
        assert one["restored"] and (one["again"], one["after"]) == (None, one["step"] + 2), one

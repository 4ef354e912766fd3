"""Runs that end early go on as if nothing had been: started again by their launcher after a rank
was killed, on other numbers of ranks, after SIGTERM, from disk and from the memory of the hosts.
"""

import json
import os
import signal
import time
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import launched
from tests.helpers.cells import fast

SCRIPT = Path(__file__).parent / "scripts" / "going_on.py"
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


def failed(ranks, out, *arguments):
    """A job without a restart that ends with an error."""
    with launched.started(launched.torchrun_command(SCRIPT, ranks), out, arguments) as process:
        assert launched.ended(process, PATIENCE) not in (0, None), (out / "log.txt").read_text()
    assert not list(out.glob("report-*.json"))


# ---- restarted by the launcher ----

RESTARTED = [
    (route, in_memory)
    for route in ("trainer", "accelerated", "loop")
    for in_memory in (True, False)
]


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


# ---- other ranks ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with saves, without an end: its folder and reports by ranks and stage."""

    @cache
    def save(ranks, stage):
        out = tmp_path_factory.mktemp(f"saved{ranks}")
        given = ("--routes", "trainer", "accelerated", "--stage", str(stage))
        return out, run(ranks, out, *given)

    return save


def go_on(saved, out, before, after, *more, routes=("trainer", "accelerated")):
    """``before``, ``after``: ranks and stage."""
    (folder, whole), (ranks, stage) = saved(*before), after
    given = ("--resume", "--runs", str(folder / "runs"), "--at", str(AT), "--stage", str(stage))
    reports = run(ranks, out, *given, "--routes", *routes, *more)
    for route in routes:
        expected, losses = rows(whole, route), whole[0][route]["losses"]
        assert len(expected) == STEPS
        assert sorted(row for step in expected[:4] for row in step) == list(range(32))
        assert rows(reports, route) == expected[AT:], route
        assert reports[0][route]["losses"] == pytest.approx(losses[AT:], rel=1e-6), route
        lost = f"was saved by {before[0]} rank(s), this run has {ranks}: random states of ranks"
        told = [sum(lost in said for said in report[route]["said"]) for report in reports]
        assert told == [int(before[0] != ranks)] + [0] * (ranks - 1)
    return reports


def test_fewer_ranks_and_longer_windows(saved, tmp_path):
    go_on(saved, tmp_path, (2, 3), (1, 2), "--accumulate", "2")


@pytest.mark.long
def test_a_trainer_keeps_the_samples_of_a_step(saved, tmp_path):
    """Started with the same arguments on fewer ranks, it accumulates."""
    found = go_on(saved, tmp_path, (2, 3), (1, 3), "--micro", "4", routes=("trainer",))
    assert found[0]["trainer"]["accumulation"] == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "before, after, accumulate",
    [((1, 1), (2, 3), 1), ((2, 3), (4, 2), 2), ((4, 1), (1, 0), 2), ((4, 1), (2, 3), 1)],
)
def test_other_ranks(before, after, accumulate, saved, tmp_path):
    go_on(saved, tmp_path, before, after, "--accumulate", str(accumulate))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_from_the_memory_of_other_ranks(ranks, saved, tmp_path):
    """The host of rank 1 is lost: its file comes from its copy."""
    whole, given = saved(2, 3)[1], ["--memory", str(tmp_path / "memory"), "--stage", "3"]
    failed(2, tmp_path / "failed", *given, "--fails", "5")
    reports = run(ranks, tmp_path / "resumed", *given, "--resume", "--micro", "2")
    assert rows(reports, "trainer") == rows(whole, "trainer")[AT:]
    for found in reports:
        assert found["trainer"]["first"] == AT
        assert found["trainer"]["accumulation"] == 4 // ranks
    losses = whole[0]["trainer"]["losses"][AT:]
    assert reports[0]["trainer"]["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["--beside"]], ids=["waiting", "beside"])
def test_ranks_of_a_trainer_that_are_killed_in_a_save(how, saved, tmp_path):
    """The second save is interrupted; the run resumes after the first with the losses of the
    uninterrupted one.
    """
    whole, runs = saved(2, 3)[1], tmp_path / "runs"
    given = ["--runs", str(runs), "--stage", "3", *how]
    failed(2, tmp_path / "killed", *given, "--die", "2")
    torn = runs / "trainer" / f"checkpoint-{2 * AT}"
    assert torn.is_dir() and not (torn / "latest").exists()
    reports = run(2, tmp_path / "resumed", *given, "--resume")
    assert rows(reports, "trainer") == rows(whole, "trainer")[AT:]
    losses = whole[0]["trainer"]["losses"][AT:]
    assert reports[0]["trainer"]["losses"] == pytest.approx(losses, rel=1e-6)
    said = reports[0]["trainer"]["said"]
    assert any(f"{torn} is not whole and is skipped" in text for text in said)


# ---- SIGTERM ----


def begun(out, rank):
    file = out / f"begun-{rank}"
    return len(file.read_text().splitlines()) if file.exists() else 0


def tell(process, out, whom):
    """SIGTERM in the second step or after: to one rank, to both some steps apart, to the
    launcher.
    """
    until = time.monotonic() + PATIENCE
    while begun(out, 0) < 2 or begun(out, 1) < 2:
        assert process.poll() is None, (out / "log.txt").read_text()[-8000:]
        assert time.monotonic() < until, "training does not begin"
        time.sleep(0.02)
    if whom == "launcher":
        os.kill(process.pid, signal.SIGTERM)
        return
    pids = [int((out / f"pid-{rank}").read_text()) for rank in range(2)]
    os.kill(pids[1], signal.SIGTERM)
    if whom == "both":
        os.kill(pids[0], signal.SIGTERM)


@pytest.mark.long
@pytest.mark.parametrize(
    "route, whom",
    [("loop", "one rank"), ("loop", "launcher"), ("accelerated", "both"), ("trainer", "launcher")],
)
def test_ranks_that_are_told_to_end_save_one_checkpoint_at_one_step(route, whom, tmp_path):
    given = ["--routes", route, "--listens", "--stage", "3"]
    whole = run(2, tmp_path / "whole", "--routes", route, "--stage", "3")
    with launched.started(launched.torchrun_command(SCRIPT), tmp_path, given) as process:
        tell(process, tmp_path, whom)
        code = launched.ended(process, PATIENCE)
    # torchrun itself ends with an error if it got the signal, its ranks never
    assert code is not None and (code == 0) == (whom != "launcher"), code
    before = launched.reports(tmp_path, 2)
    steps = {len(each[route]["losses"]) for each in before}
    assert len(steps) == 1 and all(each[route]["stopped"] for each in before)
    after = run(2, tmp_path, *given, "--resume")
    for one, other, want in zip(before, after, whole, strict=True):
        assert {other[route]["first"]} == steps and 0 < other[route]["first"] < STEPS
        assert not other[route]["stopped"]
        losses = one[route]["losses"] + other[route]["losses"]
        assert losses == pytest.approx(want[route]["losses"], rel=1e-5)

"""The Trainer and Accelerate go on, on other numbers of ranks, with the rows and the losses that
the uninterrupted run has.
"""

import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.launched import alone, ended, started, torchrun, torchrun_command

SCRIPT = Path(__file__).parent / "scripts" / "other_ranks.py"
A_STEP, AT = 8, 3


def launched(ranks, out, *arguments):
    return (
        [alone(SCRIPT, out, *arguments)]
        if ranks == 1
        else torchrun(SCRIPT, out, *arguments, ranks=ranks)
    )


def killed(ranks, out, *arguments):
    command = [sys.executable, str(SCRIPT)] if ranks == 1 else torchrun_command(SCRIPT, ranks)
    with started(command, out, arguments) as process:
        assert ended(process, 300) not in (0, None), (out / "log.txt").read_text()
    assert not list(out.glob("report-*.json"))


def rows(reports, way):
    """Return the rows of each step, in the order in which micro-batches and ranks have them."""
    seen = [
        row
        for micro in zip(*(report[way]["rows"] for report in reports), strict=True)
        for batch in micro
        for row in batch
    ]
    return [seen[at : at + A_STEP] for at in range(0, len(seen), A_STEP)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @cache
    def save(ranks, stage):
        folder = tmp_path_factory.mktemp(f"saved{ranks}")
        return folder, launched(
            ranks, folder, "--runs", str(folder / "runs"), "--save", "--stage", str(stage)
        )

    return save


def go_on(saved, tmp_path, before, after, accumulate=1):
    """``before``, ``after``: ranks and stage."""
    folder, whole = saved(*before)
    ranks, stage = after
    arguments = (
        "--runs",
        str(folder / "runs"),
        "--stage",
        str(stage),
        "--accumulate",
        str(accumulate),
    )
    reports = launched(ranks, tmp_path, *arguments)
    for way in ("trainer", "loop"):
        expected = rows(whole, way)
        assert len(expected) == 7 and sorted(row for step in expected[:4] for row in step) == list(
            range(32)
        )
        assert rows(reports, way) == expected[AT:], way
        assert reports[0][way]["losses"] == pytest.approx(whole[0][way]["losses"][AT:], rel=1e-6), (
            way
        )
    return reports


def lost(reports, way, saved, ranks):
    text = (
        f"was saved by {saved} rank(s), this run has {ranks}: random states of ranks that are "
        "gone or new do not carry over"
    )
    return [sum(text in said for said in report[way]["said"]) for report in reports]


def test_fewer_ranks_and_longer_windows(saved, tmp_path):
    reports = go_on(saved, tmp_path, (2, 3), (1, 2), accumulate=2)
    assert [lost(reports, way, 2, 1) for way in ("trainer", "loop")] == [[1], [1]]


def test_a_trainer_keeps_the_samples_of_a_step(saved, tmp_path):
    """Started with the same arguments on fewer ranks, it accumulates."""
    folder, whole = saved(2, 3)
    how = ("--runs", str(folder / "runs"), "--stage", "3", "--micro", "4", "--ways", "trainer")
    report, *others = launched(1, tmp_path, *how)
    assert not others and rows([report], "trainer") == rows(whole, "trainer")[AT:]
    expected = whole[0]["trainer"]["losses"][AT:]
    assert report["trainer"]["losses"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_more_ranks(saved, tmp_path):
    reports = go_on(saved, tmp_path, (1, 1), (2, 3))
    assert [lost(reports, way, 1, 2) for way in ("trainer", "loop")] == [[1, 0], [1, 0]]


def killed_and_resumed(saved, tmp_path, ranks, stage, *how):
    """The second save is interrupted; the run resumes after the first with the losses of the
    uninterrupted one.
    """
    whole = saved(ranks, stage)[1][0]["trainer"]
    arguments = ("--ways", "trainer", "--runs", str(tmp_path / "runs"), "--stage", str(stage), *how)
    killed(ranks, tmp_path / "killed", *arguments, "--save", "--die", "2")
    torn = tmp_path / "runs" / "trainer" / "checkpoint-6"
    assert torn.is_dir() and not (torn / "latest").exists()
    reports = launched(ranks, tmp_path / "resumed", *arguments, "--last")
    assert rows(reports, "trainer") == rows(saved(ranks, stage)[1], "trainer")[AT:]
    assert reports[0]["trainer"]["losses"] == pytest.approx(whole["losses"][AT:], rel=1e-6)
    assert any(
        f"{torn} is not whole and is skipped" in said for said in reports[0]["trainer"]["said"]
    )


@pytest.mark.long
def test_a_trainer_that_is_killed_in_a_save(saved, tmp_path):
    killed_and_resumed(saved, tmp_path, 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("how", [(), ("--beside",)], ids=["waiting", "beside"])
def test_ranks_of_a_trainer_that_are_killed_in_a_save(how, saved, tmp_path):
    killed_and_resumed(saved, tmp_path, 2, 3, *how)


@pytest.mark.long
@pytest.mark.parametrize("after", [(2, 3), (4, 2), (1, 0)])
@pytest.mark.parametrize("before", [(2, 3), (4, 1)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_other_ranks(before, after, accumulate, saved, tmp_path):
    reports = go_on(saved, tmp_path, before, after, accumulate)
    changed = int(before[0] != after[0])
    for way in ("trainer", "loop"):
        assert lost(reports, way, before[0], after[0]) == [changed] + [0] * (after[0] - 1)

"""A save that is cut off at any system call costs nothing that was saved: neither when the
process ends nor when the power goes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint import file_writer, find
from hf_zero.checkpoint.find import DROPPED, REPLACED, SAVING, find_checkpoint, integrity_error
from tests.checkpoint.faults import Disk
from tests.checkpoint.jobs import (
    ONE,
    Engine,
    load,
    run,
    run_holds,
    same,
    saved,
    small,
    state_of,
    train_some,
    weights,
)
from tests.helpers.cells import fast

HOW = ("process", "torn", "power")
TAGS = {"a": "over the old one", "b": "beside it"}
STATE = {"seen": torch.arange(3)}  # not JSON: objects.pt is written too


def trained(steps: int) -> Engine:
    engines, _ = run(ONE, small, lambda engine: train_some(engine, steps))
    return engines[0]


def every_moment(
    tmp_path: Path,
    start: Path,
    save: Callable[[Path], object],
    check: Callable[[Path, bool, str], None],
    how: str,
) -> list[str]:
    """Run ``save(folder)`` in copies of ``start``, each cut off one call later; what is left is
    checked. The calls of a whole save.
    """
    for point in itertools.count():
        folder, aside = tmp_path / f"at{point}", tmp_path / f"aside{point}"
        shutil.copytree(start, folder)
        aside.mkdir()
        disk = Disk(point, aside, torn=how == "torn")
        done = disk.run(lambda folder=folder: save(folder))
        if how == "power":
            disk.power_cut()
        check(folder, done, f"{how} at call {point}, after {disk.made[-3:]}")
        if done:
            return disk.made
        shutil.rmtree(folder)
    raise AssertionError("never done")


@pytest.fixture
def start(tmp_path: Path) -> Path:
    saved(tmp_path / "start", ONE, tag="a", client_state=STATE)
    return tmp_path / "start"


@pytest.mark.parametrize(
    "tag, how",
    fast(
        itertools.product(TAGS, HOW),
        lambda tag, how: (
            (TAGS[tag], how) in (("beside it", "process"), ("over the old one", "power"))
        ),
    ),
)
def test_cut_off_at_every_call(
    tmp_path: Path, start: Path, tag: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "BLOCK_BYTES", 1024)  # the rank's file in many writes
    old = weights(load(start, ONE))
    engine = trained(4)
    new, fresh = weights([engine]), weights([trained(0)])

    def check(folder: Path, done: bool, where: str) -> None:
        resumed = load(folder, ONE, verify=True)
        found = weights(resumed)
        assert same(found, new) or (same(found, old) and not done), where
        for held in find.tags_in(folder):
            assert not integrity_error(folder / held), where
        # The next save works as if nothing had happened.
        run(ONE, small, lambda engine: checkpoint.save(engine, folder, tag=tag))
        assert same(weights(load(folder, ONE)), fresh)
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], where

    made = every_moment(
        tmp_path,
        start,
        lambda folder: checkpoint.save(engine, folder, tag=tag, client_state=STATE),
        check,
        how,
    )
    assert len(made) > 30 and {"open", "write", "fsync", "rename", "replace", "mkdir"} <= set(
        made
    ), made
    assert tag == "b" or ("unlink" in made and "rmdir" in made), made


@pytest.mark.parametrize("how", fast(HOW, lambda how: how == "power"))
def test_cut_off_while_older_ones_go(tmp_path: Path, how: str) -> None:
    """At no moment is there less than one whole checkpoint, and every tag that is there is
    whole.
    """
    for step in (1, 2, 3):
        saved(tmp_path / "start", ONE, steps=step)
    engine = trained(4)
    states = {f"global_step{step}": weights([trained(step)]) for step in (1, 2, 3, 4)}

    def check(folder: Path, done: bool, where: str) -> None:
        held = find.tags_in(folder)
        assert "global_step3" in held and (not done or held == ["global_step3", "global_step4"]), (
            where
        )
        for tag in held:
            resumed = load(folder, ONE, tag=tag, verify=True)
            assert same(weights(resumed), states[tag]), where
        assert (folder / "latest").read_text() in ("global_step3", "global_step4"), where
        run(
            ONE,
            small,
            lambda engine: (train_some(engine, 4), checkpoint.save(engine, folder, keep=2)),
        )
        assert run_holds(folder) == ["global_step3", "global_step4"], where

    made = every_moment(
        tmp_path,
        tmp_path / "start",
        lambda folder: checkpoint.save(engine, folder, keep=2),
        check,
        how,
    )
    assert made.count("rename") == 3 and "unlink" in made  # two that go, and the new one


@pytest.mark.parametrize("kind", [SAVING, REPLACED, DROPPED])
def test_what_is_left_over_is_no_checkpoint(tmp_path: Path, start: Path, kind: str) -> None:
    shutil.copytree(start / "a", start / (kind + "z"))
    assert find.tags_in(start) == ["a"]
    assert find_checkpoint(start) == start / "a"


def test_the_first_save_of_a_run_in_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    """Nothing, or all of it; what has returned stays when the power goes."""
    engine = trained(2)
    (tmp_path / "start").mkdir()

    def check(folder: Path, done: bool, where: str) -> None:
        run_folder = folder / "runs" / "one"
        if done or (run_folder / "latest").exists():
            resumed = load(run_folder, ONE, verify=True)
            assert same(weights(resumed), weights([engine])), where
        else:
            assert all(not integrity_error(run_folder / tag) for tag in find.tags_in(run_folder)), (
                where
            )

    made = every_moment(
        tmp_path,
        tmp_path / "start",
        lambda folder: checkpoint.save(engine, folder / "runs" / "one"),
        check,
        "power",
    )
    assert made[:6] == ["mkdir", "fsync", "mkdir", "fsync", "mkdir", "open"]


def test_the_fault_layer_sees_a_save_that_does_not_flush_its_files(
    tmp_path: Path, start: Path
) -> None:
    """The check of a power cut can fail."""
    engine, disk = trained(4), Disk(10**6, tmp_path)
    with disk.installed(), pytest.MonkeyPatch.context() as patch:
        flush = os.fsync
        patch.setattr(
            os, "fsync", lambda fd: flush(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else None
        )
        checkpoint.save(engine, start, tag="b")
    disk.power_cut()
    assert (start / "b").exists() and integrity_error(start / "b")


def test_states_are_compared_with_their_moments(start: Path) -> None:
    assert set(state_of(load(start, ONE))["first.weight"]) == {
        "weights",
        "exp_avg",
        "exp_avg_sq",
    }

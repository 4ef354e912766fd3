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
from typing import Any

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint import file_writer, find
from hf_zero.checkpoint.find import integrity_error
from tests.checkpoint.faults import Disk
from tests.checkpoint.jobs import (
    ONE,
    Engine,
    run,
    run_holds,
    same,
    saved,
    small,
    train_some,
    weights,
)
from tests.helpers.cells import fast, runs_long

HOW = ("process", "torn", "power")
STATE = {"seen": torch.arange(3)}  # not JSON: objects.pt is written too


def trained(steps: int) -> Engine:
    engines, _ = run(ONE, small, lambda engine: train_some(engine, steps))
    return engines[0]


class Reader:
    """An engine that loads again and again; each time it holds nothing before."""

    def __init__(self) -> None:
        self.engine = trained(1)

    def weights(self, folder: Any, **options: Any) -> dict[str, torch.Tensor]:
        for flat in self.engine.flats:
            flat.shard.zero_()
            for state in self.engine.bound.tensors(flat.optimizer_shard).values():
                state.zero_()
        checkpoint.load(self.engine, folder, verify=True, **options)
        return weights([self.engine])


@pytest.fixture
def step(request: pytest.FixtureRequest) -> int:
    """The long suite cuts off at every call, the fast one at every fifth."""
    return 1 if runs_long(request.config) else 5


Check = Callable[[Path, bool, str], None]


def every_moment(
    tmp_path: Path, save: Callable[[Path], object], check: Check, how: str, step: int
) -> list[str]:
    """Run ``save(folder)`` in copies of the folder "start", each cut off ``step`` calls later; what
    is left is checked. The calls of a whole save.
    """
    for point in itertools.count(step=step):
        folder, aside = tmp_path / f"at{point}", tmp_path / f"aside{point}"
        shutil.copytree(tmp_path / "start", folder)
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


@pytest.mark.parametrize(
    "tag, how",
    fast(itertools.product("ab", HOW), lambda *case: case in (("a", "power"), ("b", "process"))),
)
def test_cut_off_at_every_call(tmp_path, tag, how, step, monkeypatch):
    """Over the old one, or beside it."""
    saved(tmp_path / "start", ONE, tag="a", client_state=STATE)
    monkeypatch.setattr(file_writer, "BLOCK_BYTES", 1024)  # the rank's file in many writes
    reader, engine, untrained = Reader(), trained(4), trained(0)
    old, new, fresh = reader.weights(tmp_path / "start"), weights([engine]), weights([untrained])

    def check(folder: Path, done: bool, where: str) -> None:
        found = reader.weights(folder)
        assert same(found, new) or (same(found, old) and not done), where
        for held in find.tags_in(folder):
            assert not integrity_error(folder / held), where
        # the next save works as if nothing had happened
        checkpoint.save(untrained, folder, tag=tag)
        assert same(reader.weights(folder), fresh), where
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], where

    save = lambda folder: checkpoint.save(engine, folder, tag=tag, client_state=STATE)  # noqa: E731
    made = every_moment(tmp_path, save, check, how, step)
    assert len(made) > 30 and {"open", "write", "fsync", "rename", "replace", "mkdir"} <= {*made}
    assert tag == "b" or {"unlink", "rmdir"} <= {*made}, made


@pytest.mark.parametrize("how", fast(HOW, lambda how: how == "power"))
def test_cut_off_while_older_ones_go(tmp_path: Path, how: str, step: int) -> None:
    """There is always a whole checkpoint, and every tag that is there is whole."""
    engines = {f"global_step{step}": trained(step) for step in (1, 2, 3, 4)}
    states = {tag: weights([engine]) for tag, engine in engines.items()}
    (*older, newest), reader = engines, Reader()
    for tag in older:
        checkpoint.save(engines[tag], tmp_path / "start")

    def check(folder: Path, done: bool, where: str) -> None:
        held = find.tags_in(folder)
        assert older[-1] in held and (not done or held == [older[-1], newest]), where
        for tag in held:
            assert same(reader.weights(folder, tag=tag), states[tag]), where
        assert (folder / "latest").read_text() in (older[-1], newest), where
        checkpoint.save(engines[newest], folder, keep=2)
        assert run_holds(folder) == [older[-1], newest], where

    save = lambda folder: checkpoint.save(engines[newest], folder, keep=2)  # noqa: E731
    made = every_moment(tmp_path, save, check, how, step)
    assert made.count("rename") == 3 and "unlink" in made  # two that go, and the new one


def test_the_first_save_of_a_run_in_a_folder_that_does_not_exist(tmp_path: Path, step: int) -> None:
    """Nothing, or all of it; what has returned stays when the power goes."""
    engine, reader = trained(2), Reader()
    (tmp_path / "start").mkdir()

    def check(folder: Path, done: bool, where: str) -> None:
        held = folder / "runs" / "one"
        assert all(not integrity_error(held / tag) for tag in find.tags_in(held)), where
        if done or (held / "latest").exists():
            assert same(reader.weights(held), weights([engine])), where

    save = lambda folder: checkpoint.save(engine, folder / "runs" / "one")  # noqa: E731
    made = every_moment(tmp_path, save, check, "power", step)
    assert made[:6] == ["mkdir", "fsync", "mkdir", "fsync", "mkdir", "open"]


def test_the_fault_layer_sees_a_save_that_does_not_flush_its_files(tmp_path: Path) -> None:
    """The check of a power cut can fail."""
    engine, disk, flush = trained(4), Disk(10**6, tmp_path), os.fsync
    folders = lambda fd: flush(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else None  # noqa: E731
    with disk.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", folders)
        checkpoint.save(engine, tmp_path / "run", tag="b")
    disk.power_cut()
    assert integrity_error(tmp_path / "run" / "b")
    assert {*engine.bound.tensors(engine.flats[0].optimizer_shard)} >= {"exp_avg", "exp_avg_sq"}

"""A save that is cut off at any system call costs nothing that was saved: neither when the
process ends nor when the power goes.

The process that ends leaves all that it has done. When the power goes, what was not flushed is gone
too: files keep no byte that was written since their last fsync, and renames, new files and removals
in a folder that was not flushed since are undone (as far as the file system is free to; new folders
stay).
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint import file_writer, find, storage
from hf_zero.checkpoint.find import integrity_error
from tests.checkpoint.jobs import same, trained, weights
from tests.helpers.cells import runs_long

CALLS = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
CALLS += ("remove", "truncate", "ftruncate")


class Killed(BaseException):
    """The process ends here: nothing after it runs, not even cleaning up."""


class Disk:
    """Counts the calls that change something, ends the process at the ``last`` of them, and knows
    what is not yet on the device.

    ``torn``: the write that is cut off has half of its bytes in the file.
    """

    def __init__(self, last: int, aside: Path, torn: bool = False) -> None:
        self.last, self.aside, self.torn = last, aside, torn
        self.made: list[str] = []
        self.ended = False
        self._originals = {call: getattr(os, call) for call in CALLS}
        self._originals["exchange"] = storage.exchange
        self._paths: dict[int, Path] = {}
        self._unflushed: dict[Path, None] = {}
        self._undo: list[tuple[Path, Callable[[], None]]] = []

    @contextmanager
    def installed(self) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patch:
            for call in CALLS:
                patch.setattr(os, call, self._counted(call))
            patch.setattr(storage, "exchange", self._counted("exchange"))
            yield self

    def run(self, action: Callable[[], Any]) -> bool:
        """Whether ``action`` came to its end."""
        with self.installed():
            try:
                action()
            except Killed:
                return False
        return not self.ended

    def _counted(self, call: str) -> Callable[..., Any]:
        original = self._originals[call]

        def counted(*args: Any, **kwargs: Any) -> Any:
            writes = call != "open" or args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes:
                fd = original(*args, **kwargs)
                self._paths[fd] = Path(args[0])
                return fd
            if len(self.made) >= self.last:
                if self.torn and not self.ended and call in ("write", "pwrite"):
                    original(args[0], args[1][: len(args[1]) // 2], *args[2:])
                self.ended = True
                raise Killed
            self.made.append(call)
            before = getattr(self, f"_before_{call}", None)
            if before is not None and "dir_fd" not in kwargs:
                before(*args)
            result = original(*args, **kwargs)
            if call == "open":
                self._paths[result] = Path(args[0])
            return result

        return counted

    def _before_write(self, fd: int, data: Any) -> None:
        self._unflushed[self._paths[fd]] = None

    def _before_fsync(self, fd: int) -> None:
        path = self._paths[fd]
        if path.is_dir():
            self._undo = [(folder, undo) for folder, undo in self._undo if folder != path]
        else:
            self._unflushed.pop(path, None)

    def _before_rename(self, source: Any, target: Any) -> None:
        source, target = Path(source), Path(target)
        kept = self.aside / str(len(self.made))
        if target.is_file():
            shutil.copy(target, kept)
        moved = self._originals["rename"]

        def back() -> None:
            if target.exists() and not source.exists():
                moved(target, source)
            if kept.exists():
                moved(kept, target)

        self._undo.append((target.parent, back))
        self._unflushed = {_moved(path, source, target): None for path in self._unflushed}

    _before_replace = _before_rename

    def _before_exchange(self, first: Path, second: Path) -> None:
        self._undo.append((second.parent, lambda: self._originals["exchange"](first, second)))
        aside = first.with_name("exchanged")
        for source, target in ((first, aside), (second, first), (aside, second)):
            self._unflushed = {_moved(path, source, target): None for path in self._unflushed}

    def power_cut(self) -> None:
        """Simulate a power cut: discard all writes and changes of folders that were not flushed."""
        for path in self._unflushed:
            if path.exists():
                path.write_bytes(b"")
        for _, undo in reversed(self._undo):
            undo()


def _moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path


pytestmark = pytest.mark.usefixtures("without_other_jobs")
STATE = {"seen": torch.arange(3)}  # not JSON: objects.pt is written too


class Reader:
    """An engine that loads again and again; each time it holds nothing before."""

    def __init__(self) -> None:
        self.engine = trained(1)

    def weights(self, folder: Any, **options: Any) -> dict[str, torch.Tensor]:
        for flat in self.engine.flats:
            flat.shard.zero_()
            for state in self.engine.bound.state.tensors(flat.optimizer_shard).values():
                state.zero_()
        checkpoint.load(self.engine, folder, verify=True, **options)
        return weights([self.engine])


@pytest.fixture
def step(request: pytest.FixtureRequest) -> int:
    """The long suite cuts off at every call, the fast one at every seventh."""
    return 1 if runs_long(request.config) else 7


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
    "tag, how, exchanges",
    [
        ("global_step3", "power", True),
        ("global_step3", "power", False),
        ("global_step4", "torn", True),
    ],
)
def test_cut_off_at_every_call(tag, how, exchanges, tmp_path, step, monkeypatch):
    """Over the old one, or beside it; while older ones go. Also where folders cannot be
    exchanged.
    """
    if not exchanges:
        monkeypatch.setattr(storage, "_renameat2", lambda: None)
    engines = {f"global_step{step}": trained(step) for step in (1, 2, 3)}
    states = {earlier: weights([engine]) for earlier, engine in engines.items()}
    reader, engine, untrained = Reader(), trained(4), trained(0)
    new, fresh = weights([engine]), weights([untrained])
    for earlier, its in engines.items():
        checkpoint.save(its, tmp_path / "start", tag=earlier, client_state=STATE)
    monkeypatch.setattr(file_writer, "BLOCK_BYTES", 1024)  # the rank's file in many writes
    kept = sorted({"global_step2", "global_step3", tag})[-2:]

    def check(folder: Path, done: bool, where: str) -> None:
        found, held = reader.weights(folder), find.tags_in(folder)
        assert same(found, new) or (same(found, states["global_step3"]) and not done), where
        assert "global_step3" in held or tag == "global_step3", where
        assert not done or held == kept, where
        for each in held:
            assert not integrity_error(folder / each), where
            if each != tag:
                assert same(reader.weights(folder, tag=each), states[each]), where
        # the next save works as if nothing had happened
        checkpoint.save(untrained, folder, tag=tag, keep=2)
        assert same(reader.weights(folder), fresh) and find.tags_in(folder) == kept, where
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], where

    how_saved = {"tag": tag, "client_state": STATE, "keep": 2}
    save = lambda folder: checkpoint.save(engine, folder, **how_saved)  # noqa: E731
    made = every_moment(tmp_path, save, check, how, step)
    wanted = {"open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"}
    assert len(made) > 30 and wanted <= {*made}, made
    assert ("exchange" in made) is (tag == "global_step3")


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
    assert {*engine.bound.state.tensors(engine.flats[0].optimizer_shard)} >= {
        "exp_avg",
        "exp_avg_sq",
    }

"""A save or a conversion whose system call fails leaves its target whole: the old one or the new
one, with the files that are not the format's.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint import convert_checkpoint, storage
from hf_zero.checkpoint.convert.publish import FOLDER
from hf_zero.checkpoint.convert.targets import torch_save
from hf_zero.checkpoint.convert.to_universal import LATEST_UNIVERSAL
from hf_zero.checkpoint.convert.torch_weights import write_torch_files
from hf_zero.checkpoint.find import integrity_error
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import trained
from tests.helpers.cells import in_turn

pytestmark = pytest.mark.usefixtures("without_other_jobs")

CALLS = ("rename", "replace", "link", "unlink", "mkdir", "rmdir", "fsync", "open", "write")
CALLS += ("pwrite", "preadv", "ftruncate")


class Faults:
    """File-system calls, counted. Those from number ``first`` to number ``last`` fail."""

    def __init__(self, first: int, last: int, watch: Callable[[], None] = lambda: None) -> None:
        self.made: list[str] = []
        self._first, self._last, self._watch = first, last, watch

    @contextmanager
    def installed(self) -> Iterator[Faults]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            patch.setattr(storage, "exchange", self._counted("exchange", storage.exchange))
            yield self

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._watch()
            self.made.append(name)
            if self._first <= len(self.made) <= self._last:
                raise OSError(errno.EIO, os.strerror(errno.EIO), name)
            return original(*args, **kwargs)

        return counted


def content(folder: Path) -> dict[str, Any]:
    """Files and links of ``folder`` by name, without those that an error may leave: the journal and
    the links of a publication that was complete.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.startswith(".hf-zero-new-"):
            continue
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():  # torch writes its metadata in an order of its own
            found[name] = None if name == ".metadata" else path.read_bytes()
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with files beside its checkpoint, some of them in a folder."""
    folder = tmp_path_factory.mktemp("source") / "run"
    checkpoint.save(trained(2), folder)
    (folder / "additional_chat_templates").mkdir()
    for name in ("config.json", "vocab.txt", "additional_chat_templates/tool.jinja"):
        (folder / name).write_text("{}")
    return folder


def convert(source: Path, target: Path) -> None:
    convert_checkpoint(source, target, "bfloat16", max_shard_size=400, workers=1)


def prepare_model(source: Path, target: Path) -> None:
    """A model folder of other weights, with files of the user and a link to elsewhere."""
    convert_checkpoint(source, target)
    for name in ("notes.txt", "vocab.txt", "model-00007-of-00007.safetensors"):
        (target / name).write_text("older")
    (target / "model.safetensors.index.json").write_text("{}")
    shutil.rmtree(target / "additional_chat_templates")
    (target / "additional_chat_templates").symlink_to(source)


TARGETS: dict[str, tuple[Callable[[Path, Path], object], Callable[[Path, Path], object]]] = {
    "model": (prepare_model, convert),
    "files of torch": (
        lambda source, target: write_torch_files(source, _made(target), 800),
        lambda source, target: write_torch_files(source, target, 1600),
    ),
    "dcp": (
        lambda source, target: target.mkdir(),
        lambda source, target: convert_checkpoint(source, target, to="dcp"),
    ),
    "universal": (
        lambda source, target: target.mkdir(),
        lambda source, target: convert_checkpoint(source, target, to="universal"),
    ),
}


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


@in_turn("kind, links", [("model", False), *((kind, True) for kind in TARGETS)])
def test_a_conversion_that_fails_at_any_call(
    kind: str, links: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, action = TARGETS[kind]
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no power is cut here
    if not links:
        monkeypatch.setattr(os, "link", _refuse)
    prepare(source, tmp_path / "start")
    before = content(tmp_path / "start")
    shutil.copytree(tmp_path / "start", tmp_path / "whole", symlinks=True)
    action(source, tmp_path / "whole")
    whole, were_old = content(tmp_path / "whole"), 0
    for at in itertools.count(1):
        target = tmp_path / str(at) / "out"
        shutil.copytree(tmp_path / "start", target, symlinks=True)
        faults = Faults(at, at)
        with faults.installed():
            ended = _ends(lambda target=target: action(source, target))
        after = content(target)
        assert after == whole or (after == before and not ended), (at, faults.made[-3:])
        were_old += after == before
        shutil.rmtree(target.parent)
        if len(faults.made) < at:
            break
    assert ended and were_old > 3 and whole != before


@in_turn("links", [True, False])
def test_a_conversion_on_a_storage_that_fails_for_good_loses_no_file(
    links: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What cannot be put back is named, and is still in the folder of the publication."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    if not links:
        monkeypatch.setattr(os, "link", _refuse)
    prepare_model(source, tmp_path / "start")
    before = content(tmp_path / "start")
    shutil.copytree(tmp_path / "start", tmp_path / "whole", symlinks=True)
    convert(source, tmp_path / "whole")
    whole = content(tmp_path / "whole")
    for at in itertools.count(3, 3):
        target = tmp_path / str(at) / "out"
        shutil.copytree(tmp_path / "start", target, symlinks=True)
        faults = Faults(at, 10**6)
        with faults.installed():
            _ends(lambda target=target: convert(source, target))
        old, now = content(target / FOLDER / "old"), content(target)
        for name, value in before.items() if now != whole else ():
            assert value in (old.get(name), now.get(name)), (name, faults.made[-3:])
            assert value == now.get(name) or name in caplog.text
        if len(faults.made) < at:
            break
    assert "could not be put back after an error" in caplog.text


@pytest.mark.parametrize("to", ["dcp", "universal"])
def test_a_folder_has_its_name_once_its_files_are_durable(
    to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, flushed, lacking = tmp_path / "new" / "out", set[Path](), list[Path]()
    fsync, rename = os.fsync, os.rename

    def flush(fd: int) -> None:
        flushed.add(Path(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def publish(folder: Any, name: Any) -> None:
        if Path(name) == target:
            written = [Path(folder), *Path(folder).rglob("*"), tmp_path]
            lacking.extend(path for path in written if path not in flushed)
            flushed.clear()
        rename(folder, name)

    monkeypatch.setattr(os, "fsync", flush)
    for call in ("rename", "replace"):
        monkeypatch.setattr(os, call, publish)
    convert_checkpoint(source, target, to=to)
    assert not lacking and target.parent in flushed


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _ends(action: Callable[[], object]) -> bool:
    """Whether ``action`` ends without CheckpointError."""
    try:
        action()
    except CheckpointError:
        return False
    return True


@in_turn(
    "exchanges, forever",
    [(True, False), (True, True), (False, False)],
)
def test_a_save_over_a_tag_that_fails_at_any_call(
    exchanges: bool, forever: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where folders can be exchanged, the tag names a checkpoint at every moment, and a storage
    that fails from that call on changes nothing, either.
    """
    if not exchanges:
        monkeypatch.setattr(storage, "_renameat2", lambda: None)
    older, newer = trained(1), trained(2)
    checkpoint.save(older, tmp_path / "start", tag="a")
    (tmp_path / "start" / "a" / "notes.txt").write_text("of the user")
    steps = []

    def check() -> None:
        assert (tag / MANIFEST_NAME).is_file() or not exchanges

    for at in itertools.count(1):
        folder = tmp_path / str(at)
        tag = folder / "a"
        shutil.copytree(tmp_path / "start", folder)
        faults = Faults(at, 10**6 if forever else at, check)
        with faults.installed():
            ended = _ends(lambda folder=folder: checkpoint.save(newer, folder, tag="a"))
        assert not integrity_error(tag), (at, faults.made[-3:])
        steps.append(_step(tag))
        assert steps[-1] == 2 or not ended
        checkpoint.save(newer, folder, tag="a")
        assert _step(tag) == 2 and (tag / "notes.txt").exists(), (at, faults.made[-3:])
        assert not list(folder.glob(".*"))
        shutil.rmtree(folder)
        if len(faults.made) < at:
            break
    assert ended and steps == sorted(steps) and {*steps} == {1, 2}
    assert "exchange" in faults.made


def test_a_load_that_fails_at_any_call(tmp_path: Path) -> None:
    """The next load works."""
    engine = trained(2)
    checkpoint.save(engine, tmp_path)
    for at in itertools.count(1):
        faults = Faults(at, at)
        with faults.installed():
            ended = _ends(lambda: checkpoint.load(engine, tmp_path, verify=True))
        checkpoint.load(engine, tmp_path)
        if len(faults.made) < at:
            break
        assert not ended, (at, faults.made[-1])
    assert ended and at > 10


def _step(folder: Path) -> int:
    return read_manifest(folder / MANIFEST_NAME).counters["global_steps"]


def test_folders_that_cannot_be_exchanged(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not storage.exchange(tmp_path / "first", tmp_path / "second"):
        pytest.skip("this file system exchanges no folders")
    assert (tmp_path / "first" / "second").exists() and (tmp_path / "second" / "first").exists()
    with pytest.raises(FileNotFoundError, match="first"):
        storage.exchange(tmp_path / "first", tmp_path / "none")
    assert (tmp_path / "first" / "second").exists()


def test_a_full_disk_under_torch_save(tmp_path: Path) -> None:
    """torch hides the error of the file behind one of its archive."""
    for elements in (1, 1 << 18):
        with pytest.raises(OSError, match="No space left"):
            torch_save(torch.zeros(elements), Path("/dev/full"))


def test_a_universal_folder_that_cannot_be_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / LATEST_UNIVERSAL).mkdir()
    with pytest.raises(CheckpointError, match="out itself is complete; write out into"):
        convert_checkpoint(source, tmp_path / "out", to="universal")
    assert (tmp_path / "out" / "zero").is_dir()


def test_a_file_that_was_read_and_cannot_be_closed(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    ranges = storage.open_ranges(tmp_path / "file")
    os.close(ranges._fd)
    for _ in range(2):
        ranges.close()
    assert caplog.text.count("file was read, but could not be closed") == 1


def test_files_of_torch_of_a_former_conversion_are_removed(source: Path, tmp_path: Path) -> None:
    """Transformers takes ``pytorch_model.bin`` before an index."""
    for size in (1600, 800, 400, 1600, 1 << 20):
        (tmp_path / "pytorch_model.bin.mine").write_text("of the user")
        written = write_torch_files(source, tmp_path, size)
        index = ["pytorch_model.bin.index.json"] if len(written) > 1 else []
        found = [path.name for path in tmp_path.iterdir()]
        assert sorted(found) == sorted([*written, *index, "pytorch_model.bin.mine"]), size
    assert written == ["pytorch_model.bin"]

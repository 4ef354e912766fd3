"""Damaged checkpoints: every load names the damage with its file and loads nothing, and ``verify``
finds what a file has.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint import reader, verify_checkpoint
from hf_zero.checkpoint.find import LATEST
from hf_zero.checkpoint.manifest import PADDED_VERSION
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import (
    RANK1,
    TWO,
    edit,
    flip,
    load,
    other,
    run,
    same,
    saved,
    weights,
)

TAG = "global_step1"
MANIFEST = f"{TAG}/manifest.json"
RANK0, OBJECTS = "rank-00000-of-00002.safetensors", "objects.pt"
CLIENT_STATE = {"seen": torch.full((64,), 7, dtype=torch.uint8), "when": (1, 2)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and another run of the same model on the same ranks, so that every size matches."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("run", "other"):
        saved(folder / name, client_state=CLIENT_STATE)
    return folder


def flip_after(name: str, inside: bytes, further: int, run: Path) -> None:
    """Change a bit of ``name``, ``further`` bytes behind the begin of ``inside``."""
    path = run / TAG / name
    flip(path, path.read_bytes().index(inside) + further)


def replaced(old: str, new: str, run: Path) -> None:
    """The value of the manifest fits everything else that the files say."""
    content = (run / MANIFEST).read_text()
    assert old in content
    (run / MANIFEST).write_text(content.replace(old, new, 1))


def edited(change: Any, run: Path) -> None:
    edit(run / MANIFEST, change)


def of_the_other(name: str, run: Path) -> None:
    shutil.copy(run.parent / "other" / TAG / name, run / TAG / name)


def changed(name: str, change: Callable[[Path], Any], run: Path) -> None:
    change(run / TAG / name)


def only_weights(run: Path) -> None:
    """A Trainer's folder without ``latest``: its weights alone must not be resumed."""
    (run / "model.safetensors").write_bytes(b"")
    (run / LATEST).unlink()


def several(run: Path) -> None:
    for tag in ("a", "b"):
        shutil.copytree(run / TAG, run / tag)
    (run / LATEST).write_text("b")
    os.truncate(run / "b" / RANK1, 100)


def latest(content: bytes | int | None, run: Path) -> None:
    """Bytes, a length of zeros, or a folder."""
    (run / LATEST).unlink()
    if content is None:
        (run / LATEST).mkdir()
    elif isinstance(content, int):
        (run / LATEST).touch()
        os.truncate(run / LATEST, content)
    else:
        (run / LATEST).write_bytes(content)


HASHED = "a bit of a tensor"  # which loads find before they begin if they verify whole files
Damage = tuple[Callable[[Path], Any], list[str]]
NO_LATEST = [f"tags that exist: {TAG}", LATEST]
CHANGED = ["manifest.json", "'digest'"]
DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "gone": (lambda path: path.unlink(), "is missing", "is missing"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "", "manifest says"),
    "empty": (lambda path: path.write_bytes(b""), "is cut short", "is cut short: 0 bytes"),
    "a byte short": (
        lambda path: os.truncate(path, path.stat().st_size - 1),
        "is cut short",
        "is cut short",
    ),
    "a byte long": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "", "is longer"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "damaged", "is damaged"),
}
# what is done to files of the checkpoint, and what a load says; ``verify`` finds it, too
FILES: dict[str, Damage] = {
    **{
        f"{RANK1}: {kind}": (partial(changed, RANK1, change), [RANK1, said])
        for kind, (change, said, _) in DAMAGES.items()
    },
    "no objects.pt": (partial(changed, OBJECTS, os.unlink), [OBJECTS, "is missing"]),
    "a file of another save": (partial(of_the_other, RANK1), [RANK1, "another save"]),
    "a manifest of another run": (
        partial(of_the_other, "manifest.json"),
        [f"{TAG}/rank-0000", "another save than manifest.json"],
    ),
    HASHED: (lambda run: flip(run / TAG / RANK1, -6000), [RANK1, "its hash is"]),
    "a bit of a header": (partial(flip_after, RANK1, b"data_offsets", 0), [RANK1, "its header"]),
    # in the data of a tensor, where no reader of the archive would see it
    "a bit of objects.pt": (partial(flip_after, OBJECTS, bytes([7] * 64), 5), [OBJECTS]),
    "a bit of the manifest": (partial(flip_after, "manifest.json", b'"files"', 0), CHANGED[:1]),
    "a step of the manifest": (
        partial(replaced, '"global_steps": 1', '"global_steps": 3'),
        CHANGED,
    ),
    "another version": (
        partial(edited, (f'"version": {PADDED_VERSION}', '"version": 99')),
        ["format version 99"],
    ),
}
# what loads alone look at
FOLDERS: dict[str, Damage] = {
    "a tensor that the manifest promises": (
        partial(edited, ('"exp_avg"', '"momentum"')),
        ["manifest.json", "momentum' is absent"],
    ),
    "no file of rank 0": (partial(edited, ('"rank": 0', '"rank": 5')), ["listed of ranks [5, 1]"]),
    "no latest": (lambda run: (run / LATEST).unlink(), NO_LATEST),
    "whole weights beside no latest": (only_weights, NO_LATEST),
    "latest names what is gone": (partial(latest, b"b"), [f"tags that exist: {TAG}", "'b'"]),
    "whole ones beside it": (several, [f"b/{RANK1} is cut short", f": {TAG}, a"]),
    "latest of a terabyte": (partial(latest, 1 << 40), NO_LATEST),
    "latest is a folder": (partial(latest, None), NO_LATEST),
    **{
        f"latest {content!r}": (partial(latest, content), NO_LATEST)
        for content in (b"", b"../x", b"\xff\xfe")
    },
}


def made(damage: Callable[[Path], Any], whole: Path, folder: Path) -> Path:
    shutil.copytree(whole, folder)
    damage(folder / "run")
    return folder / "run"


def test_each_damage_is_named_and_nothing_is_loaded(whole: Path, tmp_path: Path) -> None:
    """One engine tries all; then it loads the whole one."""
    cases = FILES | FOLDERS
    folders = {
        name: made(cases[name][0], whole, tmp_path / str(at)) for at, name in enumerate(cases)
    }

    def load_each(engine: Any) -> dict[str, str]:
        told = {}
        for name, folder in folders.items():
            try:
                checkpoint.load(engine, folder, verify=True if name == HASHED else None)
                told[name] = "it was loaded"
            except CheckpointError as error:
                told[name] = str(error)
            touched = any(flat.shard.any() for flat in engine.flats)
            if touched or engine.counters.global_steps:
                told[name] = f"something was loaded: {told[name]}"
        checkpoint.load(engine, whole / "run", verify=True)
        return told

    engines, results = run(TWO, other, load_each)
    failed = [
        f"{name}: {part!r} is not in {told[name]!r}"
        for told in results
        for name, (_, said) in cases.items()
        for part in (*said, "Nothing was loaded")
        if part not in told[name]
    ]
    assert not failed, "\n".join(failed)
    assert same(weights(load(whole / "run")), weights(engines))


def test_verify_finds_what_is_wrong_with_files(whole: Path, tmp_path: Path) -> None:
    failed = []
    for at, (name, (damage, said)) in enumerate(FILES.items()):
        verdict = verify_checkpoint(made(damage, whole, tmp_path / str(at)) / TAG)
        text = "\n".join(verdict.problems)
        kind = name.partition(": ")[2]
        wanted = [said[0], DAMAGES[kind][2], "restore"] if kind in DAMAGES else said
        failed += [f"{name}: {part!r} is not in {text!r}" for part in wanted if part not in text]
    assert not failed, "\n".join(failed)


Files = dict[str, bytes]


@pytest.fixture(scope="module")
def files(whole: Path) -> Files:
    """The files of one checkpoint, to be damaged again and again."""
    return {path.name: path.read_bytes() for path in (whole / "run" / TAG).iterdir()}


def put(files: Files, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_no_bit_can_flip_unseen(files: Files, tmp_path: Path) -> None:
    """In 24 places of each file, the ends included."""
    for where in ("manifest.json", RANK0, RANK1, OBJECTS):
        folder = put(files, tmp_path / where)
        for step in range(24):
            at = step * (len(files[where]) - 1) // 23
            flip(folder / where, at, step % 8)
            verdict = verify_checkpoint(folder)
            assert not verdict.whole and where in verdict.problems[0], (where, at)
            assert re.search("restore|name a folder", verdict.problems[0]), (where, at)
            flip(folder / where, at, step % 8)


def test_a_file_that_cannot_be_read_is_one_of_the_problems(files, tmp_path, monkeypatch):
    folder = put({**files, RANK1: files[RANK1][:-1]}, tmp_path / "a")

    def failing(path: Path, *_: Any) -> str:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(reader, "hash_of_file", failing)
    one, two, three = verify_checkpoint(folder).problems
    assert f"{RANK0} cannot be read" in one and "cut short" in two and OBJECTS in three
    monkeypatch.undo()

    def broken(fd: int, buffers: Any, at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    header, content = (text for text in verify_checkpoint(folder).problems if RANK0 in text)
    assert "cannot be read" in header and "cannot be read" in content

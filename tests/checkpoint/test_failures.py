"""An error on one rank is raised on all; a save that is interrupted at any moment loses nothing
that was saved before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint import file_writer, save_sharded, storage, tensorfile
from hf_zero.checkpoint.commit import CommitTarget
from hf_zero.checkpoint.manifest import VERSION
from tests.checkpoint.jobs import (
    RANK1,
    TWO,
    Engine,
    Failed,
    Job,
    edit,
    errors,
    fails,
    flip,
    load,
    other,
    run,
    run_holds,
    same,
    saved,
    small,
    state_of,
    weights,
)

TAG = "global_step1"
MANIFEST = f"{TAG}/manifest.json"

# ---- saving ----


@pytest.mark.parametrize(
    "number, remedy",
    [
        (errno.ENOSPC, "disk is full: free space"),
        (errno.EROFS, "read-only: choose another"),
        (errno.EACCES, "make the folder writable"),
        (errno.EIO, "check the storage"),
    ],
)
def test_a_write_that_fails_on_one_rank(tmp_path, monkeypatch, number, remedy):
    before = weights(saved(tmp_path, tag="a"))
    write = os.write

    def failing(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(RANK1):
            raise OSError(number, os.strerror(number))
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(file_writer.os, "write", failing)
        texts = errors(saved, tmp_path, steps=3, tag="b")
    for text in texts:
        assert text.startswith("rank 1: ") and RANK1 in text and remedy in text
        assert "earlier checkpoints are as they were" in text
    assert run_holds(tmp_path) == ["a"]
    assert same(weights(load(tmp_path)), before)
    saved(tmp_path, steps=3, tag="b")
    assert (tmp_path / "latest").read_text() == "b"


def test_a_disk_that_is_full_for_the_manifest(tmp_path, monkeypatch):
    saved(tmp_path, tag="a")

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(storage, "write_file", full)
    fails(["rank 0: ", "No space left on device"], saved, tmp_path, tag="b")
    assert run_holds(tmp_path) == ["a"]
    assert (tmp_path / "latest").read_text() == "a"


def test_latest_that_cannot_be_moved(tmp_path, monkeypatch):
    """The new checkpoint is whole by then, and the message says so."""

    def failing(source, target):
        raise OSError(errno.EIO, "Input/output error", str(target))

    with monkeypatch.context() as patch:
        patch.setattr(save_sharded.os, "replace", failing)
        whole = f"{tmp_path / 'a'} itself is whole; pass its tag to load it"
        fails([whole], saved, tmp_path, tag="a")
    load(tmp_path, tag="a")


def each_saves(where: Callable[[Engine], tuple[Any, ...]]) -> Callable[[], Any]:
    return lambda: run(TWO, small, lambda engine: checkpoint.save(engine, *where(engine)))


def test_a_rename_that_cannot_be_made_durable(tmp_path, monkeypatch):
    """The checkpoint has its name by then, so nobody is told that nothing was saved."""
    saved(tmp_path, tag="a")
    original = os.fsync

    def failing(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error")
        original(fd)

    monkeypatch.setattr(os, "fsync", failing)
    for text in errors(saved, tmp_path, steps=3, tag="b"):
        assert f"{tmp_path / 'b'} itself is whole" in text and "Nothing was saved" not in text
    monkeypatch.undo()
    assert (tmp_path / "latest").read_text() == "a"
    load(tmp_path, tag="b", verify=True)


def test_saves_that_are_refused_write_nothing(tmp_path):
    (tmp_path / "run").write_text("")
    fails(["run", "choose another folder"], saved, tmp_path / "run")
    (tmp_path / "run").unlink()
    fails(["'../x' cannot be a tag"], saved, tmp_path, tag="../x")
    bad = "rank 0: client_state['model'] of type object cannot be saved"
    fails([bad], saved, tmp_path, client_state={"model": object()})
    tags = each_saves(lambda engine: (tmp_path, f"t{engine.global_rank}"))
    fails(["different tags ['t0', 't1']; pass the same tag"], tags)
    assert list(tmp_path.iterdir()) == []
    folders = each_saves(lambda engine: (tmp_path / str(engine.global_rank),))
    fails(["rank 1: ", "storage that all ranks share"], folders)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_that_was_destroyed(tmp_path, stage):
    saved(tmp_path)
    calls: list[Callable[[Engine], Any]] = [
        lambda engine: engine.save_checkpoint(str(tmp_path), tag="b"),
        lambda engine: engine.load_checkpoint(str(tmp_path)),
        lambda engine: engine.save_16bit_model(str(tmp_path)),
    ]
    for call in calls:
        fails(
            ["the engine was destroyed", "before destroy()"],
            run,
            Job(2, stage),
            small,
            lambda engine, call=call: (engine.destroy(), call(engine)),
        )
    assert run_holds(tmp_path) == [TAG]


def test_saving_again_under_the_same_tag(tmp_path):
    saved(tmp_path, tag="a")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    after = weights(saved(tmp_path, tag="a", steps=4, job=Job(3, 3)))
    assert sorted(path.name for path in (tmp_path / "a").glob("rank-*")) == [
        f"rank-{rank:05d}-of-00003.safetensors" for rank in range(3)
    ]
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert run_holds(tmp_path) == ["a"]
    assert same(weights(load(tmp_path)), after)


def test_latest_stays_on_request(tmp_path):
    saved(tmp_path, tag="a")
    saved(tmp_path, tag="b", save_latest=False)
    assert (tmp_path / "latest").read_text() == "a"
    assert not any(path.name.startswith(".") for path in (tmp_path / "b").iterdir())


@pytest.mark.parametrize(
    "number, remedy",
    [
        (errno.ENOSPC, "the disk is full: free space"),
        (errno.EROFS, "read-only: choose another folder"),
    ],
)
def test_a_small_file_that_cannot_be_written_is_named(tmp_path, monkeypatch, number, remedy):
    """A write reports an error number only; the message names the file and the remedy."""
    saved(tmp_path, tag="a")
    fsync = os.fsync

    def failing(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("manifest.json"):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    said = [
        ".hf-zero-saving-b.",
        "/manifest.json: ",
        remedy,
        "earlier checkpoints are as they were",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        fails(said, saved, tmp_path, steps=2, tag="b")
    assert run_holds(tmp_path) == ["a"]
    load(tmp_path)


def test_a_file_that_vanishes_while_it_is_saved(tmp_path, monkeypatch):
    saved(tmp_path, tag="a")
    check = CommitTarget._check_written

    def vanishing(target, manifest):
        shutil.rmtree(next(tmp_path.glob(".hf-zero-saving-b.*")))
        return check(target, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(CommitTarget, "_check_written", vanishing)
        said = [".hf-zero-saving-b.", "nobody may remove it meanwhile"]
        fails(said, saved, tmp_path, tag="b")
    assert (tmp_path / "latest").read_text() == "a"
    load(tmp_path)


# ---- loading ----


@pytest.fixture
def folder(tmp_path):
    saved(tmp_path)
    return tmp_path


def refused(folder, match: list[str], **options) -> None:
    with pytest.raises(Failed) as failed:
        load(folder, **options)
    fails([*match, "Nothing was loaded"], load, folder, **options)
    engines = failed.value.engines
    assert not any(kinds["weights"].any() for kinds in state_of(engines).values())
    assert engines[0].counters.global_steps == 0


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def of_another_save(folder: Path, name: str) -> None:
    saved(folder, tag="again")
    shutil.copy(folder / "again" / name, folder / TAG / name)


def of_another_run(folder: Path) -> None:
    """The other run has the same model and the same ranks, so every size matches."""
    saved(folder / "other")
    shutil.copy(folder / "other" / MANIFEST, folder / MANIFEST)


def rehashed(folder: Path, wrong: str) -> None:
    edit(folder / MANIFEST, lambda document: document["files"][0].update(hash=wrong))


def header_bit(path: Path, inside: bytes) -> None:
    flip(path, path.read_bytes().index(inside))


def number_of_the_manifest(folder: Path, old: str, new: str) -> None:
    """The damaged value fits everything else that the files say."""
    content = (folder / MANIFEST).read_text()
    assert old in content
    (folder / MANIFEST).write_text(content.replace(old, new, 1))


def only_weights(folder: Path) -> None:
    """The folder of a Trainer whose save was interrupted there: resuming from the weights alone
    would silently drop the optimizer state.
    """
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "latest").unlink()


def several(folder: Path) -> None:
    for tag in ("a", "b", "c"):
        saved(folder, tag=tag)
    (folder / "b" / RANK1).unlink()
    os.truncate(folder / "c" / RANK1, 100)


NO_LATEST = ["latest is missing", f"tags that exist: {TAG}"]
CHANGED = ["manifest.json is damaged", "'digest'", "restore it", "if you have changed the file"]
NO_HASH = ["manifest.json is damaged", "is not a hash; expected xxh3_128 or sha256"]
Damage = Callable[[Path], Any]
DAMAGES: dict[str, tuple[Damage, list[str], dict[str, Any]]] = {
    "no latest": (lambda f: (f / "latest").unlink(), NO_LATEST, {}),
    "whole weights beside no latest": (only_weights, NO_LATEST, {}),
    "no such tag": (
        lambda f: None,
        ["no checkpoint 'global_step7'", f"tags that exist: {TAG}"],
        {"tag": "global_step7"},
    ),
    "a file is missing": (
        lambda f: (f / TAG / RANK1).unlink(),
        [RANK1, "is missing", "restore it"],
        {},
    ),
    "a file is cut short": (
        lambda f: cut_short(f / TAG / RANK1),
        [RANK1, "is cut short", "restore it"],
        {},
    ),
    "a file of another save": (
        lambda f: of_another_save(f, RANK1),
        [RANK1, "belongs to another save", "restore the file"],
        {"tag": TAG},
    ),
    "a manifest of another run": (
        of_another_run,
        [
            f"{TAG}/rank-0000",
            "belongs to another save than manifest.json beside it",
            "restore the file",
        ],
        {},
    ),
    "a bit of a tensor": (
        lambda f: flip(f / TAG / RANK1, -6000),
        [RANK1, "its hash is", "restore it"],
        {"verify": True},
    ),
    "a bit of a header": (
        lambda f: header_bit(f / TAG / RANK1, b"data_offsets"),
        [RANK1, "is damaged: its header is not readable", "restore the file"],
        {},
    ),
    "a bit of the manifest": (
        lambda f: header_bit(f / MANIFEST, b'"files"'),
        ["manifest.json", TAG],
        {},
    ),
    "a step of the manifest": (
        lambda f: number_of_the_manifest(f, '"global_steps": 1', '"global_steps": 3'),
        CHANGED,
        {},
    ),
    "a rate of the manifest": (
        lambda f: number_of_the_manifest(f, '"lr": 0.001', '"lr": 0.009'),
        CHANGED,
        {},
    ),
    "a blank of the manifest": (lambda f: number_of_the_manifest(f, "\n ", "\n\t"), CHANGED, {}),
    "whole ones beside it": (
        several,
        [f"c/{RANK1} is cut short", "Whole in ", f": a, {TAG}"],
        {},
    ),
    "a tensor that the manifest promises": (
        lambda f: edit(f / MANIFEST, ('"exp_avg"', '"momentum"')),
        ["does not fit manifest.json: tensor '|trainable", "momentum' is absent"],
        {},
    ),
    "no file of rank 0": (
        lambda f: edit(f / MANIFEST, ('"rank": 0', '"rank": 5')),
        ["no file of rank 0 is listed"],
        {},
    ),
    "another version": (
        lambda f: edit(f / MANIFEST, (f'"version": {VERSION}', '"version": 99')),
        ["format version 99", "load it with the hf-zero that wrote it"],
        {},
    ),
    **{
        f"the hash {wrong}": (lambda f, wrong=wrong: rehashed(f, wrong), NO_HASH, {})
        for wrong in ("md5:" + "0" * 32, "xxh3_128:abc", "xxh3_128:" + "g" * 32, "0" * 64)
    },
}


@pytest.mark.parametrize("damage, said, options", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_named_and_nothing_is_loaded(folder, damage, said, options):
    damage(folder)
    refused(folder, said, **options)


def test_what_is_mended_is_loaded(folder):
    flip(folder / TAG / RANK1, -6000)
    refused(folder, ["its hash is"], verify=True)
    flip(folder / TAG / RANK1, -6000)
    load(folder, verify=True)
    number_of_the_manifest(folder, '"lr": 0.001', '"lr": 0.009')
    refused(folder, CHANGED)
    edit(folder / MANIFEST, ("", ""))
    load(folder)


def test_a_bit_that_flips_in_objects(tmp_path):
    """In the data of a tensor of the client state, where no reader of the archive would see it."""
    saved(tmp_path, client_state={"seen": torch.full((64,), 7, dtype=torch.uint8)})
    path = tmp_path / TAG / "objects.pt"
    flip(path, path.read_bytes().index(bytes([7] * 64)) + 5)
    refused(tmp_path, ["objects.pt is damaged", "restore it"])


def as_version_1(folder) -> None:
    """The checkpoint in ``folder`` as version 1 of the format would have it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["version"] = 1
    del manifest["digest"]
    for entry in [*manifest["files"], *([manifest["objects"]] if manifest["objects"] else [])]:
        del entry["hash"]
        entry["sha256"] = hashlib.sha256((folder / entry["name"]).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_version_1_is_read_and_its_hashes_are_compared(folder):
    expected = weights(load(folder))
    as_version_1(folder / TAG)
    assert same(weights(load(folder, verify=True)), expected)
    flip(folder / TAG / RANK1, -6000)
    refused(folder, [RANK1, "its hash is sha256:", "restore it"], verify=True)


def test_a_read_that_fails_halfway(folder, monkeypatch):
    original = tensorfile.TensorFile.read_into

    def failing(self, name, start, out):
        if name.startswith("first"):
            raise OSError(errno.EIO, "Input/output error")
        original(self, name, start, out)

    monkeypatch.setattr(tensorfile.TensorFile, "read_into", failing)
    fails(["Input/output error", "partly loaded: load again"], load, folder)


# ---- into another model, optimizer or schedule ----


def widened():
    module = other()
    module.second = torch.nn.utils.skip_init(torch.nn.Linear, 13, 7)
    for parameter in module.second.parameters():
        torch.nn.init.zeros_(parameter)
    return module


def renamed():
    module = other()
    module.third = module.second
    del module.second
    return module


def without_buffers():
    module = other()
    module.norm = torch.nn.BatchNorm1d(13, track_running_stats=False)
    torch.nn.init.zeros_(module.norm.weight)
    return module


def one_group(groups):
    return torch.optim.AdamW(groups[:1], lr=0.1)


SGD = Job(2, 3, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
SHAPES = "shapes differ: second.weight (checkpoint [6, 13], model [7, 13]), second.bias"
OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "other shapes": ({"make": widened}, [SHAPES, "configuration it was saved with"]),
    "other shapes, what both have": (
        {"make": widened, "load_module_strict": False},
        ["shapes differ"],
    ),
    "other names": (
        {"make": renamed},
        [
            "another model (Small): it lacks third.",
            "the model lacks second.weight",
            "load_module_strict=False",
        ],
    ),
    "no buffers": ({"make": without_buffers}, ["the model lacks norm.running_mean"]),
    "another optimizer": (
        {"job": SGD},
        ["torch.optim.adamw.AdamW", "torch.optim.sgd.SGD", "load_optimizer_states=False"],
    ),
    "one group": (
        {"job": Job(2, 3, optimizer=one_group, decays=lambda name: True)},
        ["2 optimizer groups, this engine 1", "load_optimizer_states=False"],
    ),
    "other groups": (
        {"job": Job(2, 3, decays=lambda name: "bias" not in name and "second" not in name)},
        [
            "other optimizer groups: second.weight (0 there, 1 here)",
            "the order of groups is free",
            "load_optimizer_states=False",
        ],
    ),
}


@pytest.mark.parametrize("options, said", OTHERS.values(), ids=OTHERS)
def test_what_does_not_fit_is_refused(folder, options, said):
    refused(folder, said, **options)


def test_what_both_have_on_request(folder):
    load(folder, SGD, load_optimizer_states=False)
    loaded = state_of(load(folder, make=renamed, load_module_strict=False))
    expected = state_of(saved(folder, tag="x"))
    for kind in ("weights", "exp_avg"):
        assert torch.equal(loaded["first.weight"][kind], expected["first.weight"][kind])
    assert not loaded["third.weight"]["exp_avg"].any()


def test_what_was_left_out_at_the_save(tmp_path):
    job = Job(2, 3, frozen=lambda name: "first" in name)
    saved(tmp_path / "trained", job, exclude_frozen_parameters=True)
    refused(tmp_path / "trained", ["it lacks first.weight, first.bias"])
    run(Job(2, 3, optimizer=None), small, lambda engine: checkpoint.save(engine, tmp_path / "no"))
    refused(tmp_path / "no", ["was saved without an optimizer", "load_module_only=True"])


def test_another_schedule(tmp_path):
    def step(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3)

    def with_schedule(kind, make, then):
        def action(engine: Engine):
            engine.lr_scheduler = kind(engine.bound.optimizer)
            return then(engine, tmp_path)

        return run(TWO, make, action)

    with_schedule(step, small, checkpoint.save)
    constant = torch.optim.lr_scheduler.ConstantLR
    said = ["StepLR", "ConstantLR", "load_lr_scheduler_states=False"]
    fails(said, with_schedule, constant, other, checkpoint.load)
    without = {"load_lr_scheduler_states": False}
    with_schedule(constant, other, lambda engine, at: checkpoint.load(engine, at, **without))
    load(tmp_path)  # an engine without one goes on without

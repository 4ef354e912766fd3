"""An error on one rank is raised on all; a save that is interrupted at any moment loses nothing
that was saved before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint import file_writer, save_sharded, storage, tensorfile
from hf_zero.checkpoint.commit import CommitTarget
from hf_zero.checkpoint.manifest import VERSION
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import Engine, Job, good, other, run, small, state_of, train_some

TWO = Job(2, 3, units=("first",))
RANK1 = "rank-00001-of-00002.safetensors"


def saved(folder, job=TWO, steps=1, **options):
    def action(engine: Engine):
        train_some(engine, steps)
        return checkpoint.save(engine, folder, **options)

    return run(job, small, action)


def load(folder, job=TWO, make=other, **options):
    return run(job, make, lambda engine: checkpoint.load(engine, folder, **options))


def errors(results) -> list[str]:
    """One CheckpointError on every rank."""
    assert [type(result) for result in results] == [CheckpointError] * len(results), results
    return [str(result) for result in results]


def edit(path, old: str, new: str) -> None:
    """Change a manifest, as somebody does who knows what the digest is for."""
    document = json.loads(path.read_text().replace(old, new))
    del document["digest"]
    path.write_text(json.dumps(document))


def weights(engines):
    return {name: kinds["weights"].clone() for name, kinds in state_of(engines).items()}


def same(left, right) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


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
    before = weights(saved(tmp_path, tag="a")[0])
    write = os.write

    def failing(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(RANK1):
            raise OSError(number, os.strerror(number))
        return write(fd, data)

    monkeypatch.setattr(file_writer.os, "write", failing)
    _, results = saved(tmp_path, steps=3, tag="b")
    monkeypatch.undo()
    for text in errors(results):
        assert text.startswith("rank 1: ")
        assert "rank-00001-of-00002.safetensors" in text
        assert remedy in text
        assert "earlier checkpoints are as they were" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest", "zero_to_fp32.py"]
    engines, results = load(tmp_path)
    good(results)
    assert same(weights(engines), before)
    good(saved(tmp_path, steps=3, tag="b")[1])
    assert (tmp_path / "latest").read_text() == "b"


def test_a_disk_that_is_full_for_the_manifest(tmp_path, monkeypatch):
    saved(tmp_path, tag="a")

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(storage, "write_file", full)
    for text in errors(saved(tmp_path, tag="b")[1]):
        assert "rank 0: " in text and "No space left on device" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest", "zero_to_fp32.py"]
    assert (tmp_path / "latest").read_text() == "a"


def test_latest_that_cannot_be_moved(tmp_path, monkeypatch):
    """The new checkpoint is whole by then, and the message says so."""

    def failing(source, target):
        raise OSError(errno.EIO, "Input/output error", str(target))

    monkeypatch.setattr(save_sharded.os, "replace", failing)
    texts = errors(saved(tmp_path, tag="a")[1])
    monkeypatch.undo()
    assert all(
        f"{tmp_path / 'a'} itself is whole; pass its tag to load it" in text for text in texts
    )
    good(load(tmp_path, tag="a")[1])


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    for text in errors(saved(tmp_path / "run")[1]):
        assert "run" in text and "choose another folder" in text


def test_ranks_that_do_not_see_the_same_folder(tmp_path):
    _, results = run(
        TWO, small, lambda engine: checkpoint.save(engine, tmp_path / str(engine.global_rank))
    )
    for text in errors(results):
        assert text.startswith("rank 1: ") and "storage that all ranks share" in text


def test_ranks_that_name_different_tags(tmp_path):
    _, results = run(
        TWO, small, lambda engine: checkpoint.save(engine, tmp_path, tag=f"t{engine.global_rank}")
    )
    for text in errors(results):
        assert "different tags ['t0', 't1']; pass the same tag" in text
    assert list(tmp_path.iterdir()) == []


def test_a_tag_that_cannot_be_one(tmp_path):
    for text in errors(saved(tmp_path, tag="../x")[1]):
        assert text.startswith("'../x' cannot be a tag")


def test_client_state_that_cannot_be_saved(tmp_path):
    for text in errors(saved(tmp_path, client_state={"model": object()})[1]):
        assert "rank 0: client_state['model'] of type object cannot be saved" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_that_was_destroyed(tmp_path, stage):
    good(saved(tmp_path)[1])

    def action(engine: Engine, what):
        engine.destroy()
        return what(engine)

    for what in (
        lambda engine: engine.save_checkpoint(str(tmp_path), tag="b"),
        lambda engine: engine.load_checkpoint(str(tmp_path)),
        lambda engine: engine.save_16bit_model(str(tmp_path)),
    ):
        for text in errors(run(Job(2, stage), small, lambda e, what=what: action(e, what))[1]):
            assert "the engine was destroyed" in text and "before destroy()" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step1",
        "latest",
        "zero_to_fp32.py",
    ]


def test_saving_again_under_the_same_tag(tmp_path):
    saved(tmp_path, tag="a")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    after = weights(saved(tmp_path, tag="a", steps=4, job=Job(3, 3))[0])
    assert sorted(path.name for path in (tmp_path / "a").glob("rank-*")) == [
        f"rank-{rank:05d}-of-00003.safetensors" for rank in range(3)
    ]
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest", "zero_to_fp32.py"]
    engines, results = load(tmp_path)
    good(results)
    assert same(weights(engines), after)


def test_latest_stays_on_request(tmp_path):
    saved(tmp_path, tag="a")
    saved(tmp_path, tag="b", save_latest=False)
    assert (tmp_path / "latest").read_text() == "a"
    assert not any(path.name.startswith(".") for path in (tmp_path / "b").iterdir())


# ---- loading ----


@pytest.fixture
def folder(tmp_path):
    good(saved(tmp_path)[1])
    return tmp_path


def refused(folder, match: list[str], **options) -> None:
    engines, results = load(folder, **options)
    for text in errors(results):
        for part in match:
            assert part in text, text
        assert "Nothing was loaded" in text
    assert not any(kinds["weights"].any() for kinds in state_of(engines).values())
    assert engines[0].counters.global_steps == 0


def test_no_latest(folder):
    (folder / "latest").unlink()
    refused(folder, ["latest is missing", "tags that exist: global_step1"])


def test_no_such_tag(folder):
    refused(
        folder,
        ["no checkpoint 'global_step7'", "tags that exist: global_step1"],
        tag="global_step7",
    )


def test_a_rank_file_that_is_missing(folder):
    (folder / "global_step1" / RANK1).unlink()
    refused(folder, [RANK1, "is missing", "restore it"])


def test_a_rank_file_cut_short(folder):
    with open(folder / "global_step1" / RANK1, "r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    refused(folder, [RANK1, "is cut short", "restore it"])


def test_a_rank_file_of_another_save(folder):
    good(saved(folder, tag="again")[1])
    shutil.copy(folder / "again" / RANK1, folder / "global_step1" / RANK1)
    refused(folder, [RANK1, "belongs to another save", "restore the file"], tag="global_step1")


def test_a_flipped_bit(folder):
    path = folder / "global_step1" / RANK1
    content = bytearray(path.read_bytes())
    content[-6000] ^= 1
    path.write_bytes(content)
    refused(folder, [RANK1, "its hash is", "restore it"], verify=True)
    content[-6000] ^= 1
    path.write_bytes(content)
    good(load(folder, verify=True)[1])


def test_a_manifest_of_another_run(folder, tmp_path):
    """The other run has the same model and the same ranks, so every size matches."""
    other_run = tmp_path / "other"
    good(saved(other_run)[1])
    shutil.copy(
        other_run / "global_step1" / "manifest.json", folder / "global_step1" / "manifest.json"
    )
    refused(
        folder,
        [
            "global_step1/rank-0000",
            "belongs to another save than manifest.json beside it",
            "restore the file",
        ],
    )


def test_a_bit_that_flips_in_a_header(folder):
    path = folder / "global_step1" / RANK1
    content = bytearray(path.read_bytes())
    content[content.index(b"data_offsets")] ^= 1
    path.write_bytes(content)
    refused(folder, [RANK1, "is damaged: its header is not readable", "restore the file"])


def test_a_bit_that_flips_in_the_manifest(folder):
    path = folder / "global_step1" / "manifest.json"
    content = bytearray(path.read_bytes())
    content[content.index(b'"files"')] ^= 1
    path.write_bytes(content)
    refused(folder, ["manifest.json", "global_step1"])


@pytest.mark.parametrize(
    "old, new",
    [('"global_steps": 1', '"global_steps": 3'), ('"lr": 0.001', '"lr": 0.009'), ("\n ", "\n\t")],
)
def test_a_bit_that_flips_in_a_number_of_the_manifest(folder, old, new):
    """The damaged value fits everything else that the files say."""
    path = folder / "global_step1" / "manifest.json"
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    refused(
        folder,
        [
            "manifest.json is damaged",
            "'digest'",
            "restore it",
            "if you have changed the file yourself",
        ],
    )
    edit(path, "", "")
    good(load(folder)[1])


def test_a_bit_that_flips_in_objects(tmp_path):
    """In the data of a tensor of the client state, where no reader of the archive would see it."""
    good(saved(tmp_path, client_state={"seen": torch.full((64,), 7, dtype=torch.uint8)})[1])
    path = tmp_path / "global_step1" / "objects.pt"
    content = bytearray(path.read_bytes())
    content[content.index(bytes([7] * 64)) + 5] ^= 1
    path.write_bytes(content)
    refused(tmp_path, ["objects.pt is damaged", "restore it"])


def test_a_damaged_one_is_told_with_the_whole_ones_beside_it(folder):
    for tag in ("a", "b", "c"):
        good(saved(folder, tag=tag)[1])
    (folder / "b" / RANK1).unlink()
    os.truncate(folder / "c" / RANK1, 100)
    refused(folder, [f"c/{RANK1} is cut short", f"Whole in {folder}: a, global_step1"])


def test_whole_weights_beside_a_save_that_was_stopped_before_latest(folder):
    """The folder of a Trainer whose save was interrupted there: resuming from the weights alone
    would silently drop the optimizer state.
    """
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "latest").unlink()
    refused(folder, ["latest is missing", "tags that exist: global_step1"])


@pytest.mark.parametrize(
    "number, remedy",
    [
        (errno.ENOSPC, "the disk is full: free space"),
        (errno.EROFS, "read-only: choose another folder"),
    ],
)
def test_a_small_file_that_cannot_be_written_is_named(tmp_path, monkeypatch, number, remedy):
    """A write reports an error number only; the message names the file and the remedy."""
    good(saved(tmp_path, tag="a")[1])
    fsync = os.fsync

    def failing(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("manifest.json"):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    for text in errors(saved(tmp_path, steps=2, tag="b")[1]):
        assert ".hf-zero-saving-b." in text
        assert "/manifest.json: " in text
        assert remedy in text
        assert "earlier checkpoints are as they were" in text
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest", "zero_to_fp32.py"]
    good(load(tmp_path)[1])


def test_a_file_that_vanishes_while_it_is_saved(tmp_path, monkeypatch):
    good(saved(tmp_path, tag="a")[1])
    check = CommitTarget._check_written

    def vanishing(target, manifest):
        shutil.rmtree(next(tmp_path.glob(".hf-zero-saving-b.*")))
        return check(target, manifest)

    monkeypatch.setattr(CommitTarget, "_check_written", vanishing)
    for text in errors(saved(tmp_path, tag="b")[1]):
        assert ".hf-zero-saving-b." in text and "nobody may remove it meanwhile" in text
    monkeypatch.undo()
    assert (tmp_path / "latest").read_text() == "a"
    good(load(tmp_path)[1])


def test_a_tensor_that_the_manifest_promises(folder):
    path = folder / "global_step1" / "manifest.json"
    edit(path, '"exp_avg"', '"momentum"')
    refused(folder, ["does not fit manifest.json: tensor '|trainable", "momentum' is absent"])


def test_a_file_of_rank_0_that_is_not_listed(folder):
    path = folder / "global_step1" / "manifest.json"
    edit(path, '"rank": 0', '"rank": 5')
    refused(folder, ["no file of rank 0 is listed"])


def test_another_format_version(folder):
    path = folder / "global_step1" / "manifest.json"
    edit(path, f'"version": {VERSION}', '"version": 99')
    refused(folder, ["format version 99", "load it with the hf-zero that wrote it"])


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
    expected = weights(load(folder)[0])
    as_version_1(folder / "global_step1")
    engines, results = load(folder, verify=True)
    good(results)
    assert same(weights(engines), expected)
    path = folder / "global_step1" / RANK1
    content = bytearray(path.read_bytes())
    content[-6000] ^= 1
    path.write_bytes(content)
    refused(folder, [RANK1, "its hash is sha256:", "restore it"], verify=True)


@pytest.mark.parametrize(
    "hash", ["md5:" + "0" * 32, "xxh3_128:abc", "xxh3_128:" + "g" * 32, "0" * 64]
)
def test_a_hash_that_nobody_can_compute(folder, hash):
    path = folder / "global_step1" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][0]["hash"] = hash
    del manifest["digest"]
    path.write_text(json.dumps(manifest))
    refused(folder, ["manifest.json is damaged", "is no hash; expected xxh3_128 or sha256"])


def test_a_read_that_fails_halfway(folder, monkeypatch):
    original = tensorfile.TensorFile.read_into

    def failing(self, name, start, out):
        if name.startswith("first"):
            raise OSError(errno.EIO, "Input/output error")
        original(self, name, start, out)

    monkeypatch.setattr(tensorfile.TensorFile, "read_into", failing)
    for text in errors(load(folder)[1]):
        assert "Input/output error" in text and "partly loaded: load again" in text


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


def test_another_model(folder):
    refused(
        folder,
        [
            "shapes differ: second.weight (checkpoint [6, 13], model [7, 13]), second.bias",
            "configuration it was saved with",
        ],
        make=widened,
    )
    refused(
        folder,
        [
            "another model (Small): it lacks third.",
            "the model lacks second.weight",
            "load_module_strict=False",
        ],
        make=renamed,
    )
    refused(folder, ["the model lacks norm.running_mean"], make=without_buffers)


def test_what_both_have_on_request(folder):
    engines, results = load(folder, make=renamed, load_module_strict=False)
    good(results)
    expected = state_of(saved(folder, tag="x")[0])
    loaded = state_of(engines)
    assert torch.equal(loaded["first.weight"]["weights"], expected["first.weight"]["weights"])
    assert torch.equal(loaded["first.weight"]["exp_avg"], expected["first.weight"]["exp_avg"])
    assert not loaded["third.weight"]["exp_avg"].any()


def test_shapes_that_differ_are_refused_even_then(folder):
    refused(folder, ["shapes differ"], make=widened, load_module_strict=False)


def test_a_frozen_parameter_that_was_left_out_and_is_trained_now(tmp_path):
    job = Job(2, 3, frozen=lambda name: "first" in name)
    good(saved(tmp_path, job, exclude_frozen_parameters=True)[1])
    refused(tmp_path, ["it lacks first.weight, first.bias"])


def test_another_optimizer(folder):
    job = Job(2, 3, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    refused(
        folder,
        ["torch.optim.adamw.AdamW", "torch.optim.sgd.SGD", "load_optimizer_states=False"],
        job=job,
    )
    good(load(folder, job, load_optimizer_states=False)[1])


def test_other_optimizer_groups(folder):
    def one_group(groups):
        return torch.optim.AdamW(groups[:1], lr=0.1)

    job = Job(2, 3, optimizer=one_group, decays=lambda name: True)
    refused(folder, ["2 optimizer groups, this engine 1", "load_optimizer_states=False"], job=job)
    job = Job(2, 3, decays=lambda name: "bias" not in name and "second" not in name)
    told = [
        "other optimizer groups: second.weight (0 there, 1 here)",
        "the order of groups is free",
        "load_optimizer_states=False",
    ]
    refused(folder, told, job=job)


def test_saved_without_an_optimizer(tmp_path):
    good(run(Job(2, 3, optimizer=None), small, lambda engine: checkpoint.save(engine, tmp_path))[1])
    refused(tmp_path, ["was saved without an optimizer", "load_module_only=True"])


def test_another_schedule(tmp_path):
    def with_schedule(kind, then):
        def action(engine: Engine):
            engine.lr_scheduler = kind(engine.bound.optimizer)
            return then(engine)

        return action

    def step(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3)

    def constant(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    good(run(TWO, small, with_schedule(step, lambda engine: checkpoint.save(engine, tmp_path)))[1])
    for text in errors(
        run(TWO, other, with_schedule(constant, lambda engine: checkpoint.load(engine, tmp_path)))[
            1
        ]
    ):
        assert "StepLR" in text
        assert "ConstantLR" in text
        assert "load_lr_scheduler_states=False" in text
    good(
        run(
            TWO,
            other,
            with_schedule(
                constant, lambda e: checkpoint.load(e, tmp_path, load_lr_scheduler_states=False)
            ),
        )[1]
    )
    good(load(tmp_path)[1])  # an engine without one goes on without

"""Saves that fail: an error on one rank is raised on all, and nothing that was saved before is
lost. Loads into another model, optimizer or schedule are refused before anything changes.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_zero import checkpoint
from hf_zero.checkpoint import failures, file_writer, save_job, save_sharded, storage
from hf_zero.checkpoint.commit import CommitTarget
from hf_zero.checkpoint.save_job import SaveJob
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import CheckpointError, ConfigError, RankMismatchError
from hf_zero.zero.layout.sharding import Sharding, set_sharding
from tests.checkpoint.jobs import (
    ONE,
    RANK1,
    TWO,
    Engine,
    Failed,
    Job,
    errors,
    fails,
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
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.split import Split, config_of_split, split
from tests.helpers.training import adamw

TWO_WHOLE = Job(2, 1)


def raising(number: int) -> Any:
    raise OSError(number, os.strerror(number))


def file_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def write_fails(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Of the file of rank 1."""
    write = os.write
    failing = lambda fd, data: raising(number) if file_of(fd).endswith(RANK1) else write(fd, data)  # noqa: E731
    monkeypatch.setattr(file_writer.os, "write", failing)


def flush_fails(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Of the manifest: the system names no file, the message does."""
    fsync = os.fsync
    failing = lambda fd: raising(number) if file_of(fd).endswith("t.json") else fsync(fd)  # noqa: E731
    monkeypatch.setattr(os, "fsync", failing)


def small_files_fail(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def failing(path: Path, content: bytes) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(storage, "write_file", failing)


def before_the_end(harm: Callable[[Path], Any]) -> Callable[[pytest.MonkeyPatch, int], None]:
    """Harm the file of rank 1 in the folder of the save before it is published."""
    check = CommitTarget._check_written

    def checked(target: Any, manifest: Any) -> Any:
        harm(target.path_of(RANK1))
        return check(target, manifest)

    return lambda patch, _: patch.setattr(CommitTarget, "_check_written", checked)


files_vanish = before_the_end(lambda file: shutil.rmtree(file.parent))
file_is_cut = before_the_end(lambda file: os.truncate(file, 5000))
SAVES = {
    "no space": (write_fails, errno.ENOSPC, ["rank 1: ", RANK1, "disk is full: free space"]),
    "read-only": (write_fails, errno.EROFS, ["rank 1: ", RANK1, "read-only: choose another"]),
    "no permission": (write_fails, errno.EACCES, ["rank 1: ", RANK1, "make the folder writable"]),
    "broken": (write_fails, errno.EIO, ["rank 1: ", RANK1, "check the storage"]),
    "no space beside": (small_files_fail, errno.ENOSPC, ["rank 0: ", ".hf-zero-saving-a."]),
    "no flush": (flush_fails, errno.ENOSPC, [".hf-zero-saving-a.", "/manifest.json: "]),
    "vanished": (files_vanish, 0, [".hf-zero-saving-a.", RANK1[:5], "nobody may remove it"]),
    "cut": (file_is_cut, 0, [RANK1, "has 5000 bytes"]),
}


def test_a_save_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch):
    """Also the one of the same tag; the next save works."""
    before = weights(saved(tmp_path, tag="a"))
    for name, (break_it, number, said) in SAVES.items():
        with monkeypatch.context() as patch:
            break_it(patch, number)
            for text in errors(saved, tmp_path, steps=3, tag="a"):
                assert [part for part in said if part not in text] == [], (name, text)
                assert "earlier checkpoints are as they were" in text, name
        assert run_holds(tmp_path) == ["a"], name
        assert (tmp_path / "latest").read_text() == "a"
    assert same(weights(load(tmp_path, verify=True)), before)
    saved(tmp_path, steps=3, tag="b")
    assert (tmp_path / "latest").read_text() == "b"


def test_what_fails_after_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    """``latest``, or the flush of the folder: nobody is told that nothing was saved."""
    saved(tmp_path, tag="a")
    fsync = os.fsync
    moved = lambda source, target: raising(errno.EIO)  # noqa: E731
    flush = lambda fd: raising(errno.EIO) if file_of(fd) == str(tmp_path) else fsync(fd)  # noqa: E731
    for tag, name, failing in (("b", "replace", moved), ("c", "fsync", flush)):
        with monkeypatch.context() as patch:
            patch.setattr(save_sharded.os, name, failing)
            for text in errors(saved, tmp_path, steps=3, tag=tag):
                assert f"{tmp_path / tag} itself is complete" in text
                assert "Nothing was saved" not in text
        assert (tmp_path / "latest").read_text() == "a"
        load(tmp_path, tag=tag, verify=True)


def test_a_rank_that_ends_before_it_knows_the_outcome(tmp_path, monkeypatch):
    """An earlier save of the tag is not taken for this one."""

    def broadcast(self: object, failure: str) -> str:
        raise RankMismatchError("rank 1 has ended")

    monkeypatch.setattr(save_job.ByCollectives, "broadcast", broadcast)
    with pytest.raises(Failed) as failed:
        saved(tmp_path, tag="a")
    complete = f"rank 1 has ended. {tmp_path / 'a'} itself is complete; pass its tag to load it."
    assert type(failed.value.results[0]) is RankMismatchError
    assert str(failed.value.results[0]) == complete
    monkeypatch.setattr(SaveJob, "_publish", lambda *_: "no space")
    with pytest.raises(Failed) as failed:
        saved(tmp_path, steps=3, tag="a")
    unknown = f"rank 1 has ended. hf-zero verify says whether {tmp_path / 'a'} is complete."
    assert [*map(str, failed.value.results)] == ["rank 1 has ended. no space", unknown]
    monkeypatch.undo()
    load(tmp_path, tag="a", verify=True)


def each_saves(where: Callable[[Engine], tuple[Any, ...]]) -> Callable[[], Any]:
    return lambda: run(TWO, small, lambda engine: checkpoint.save(engine, *where(engine)))


def test_saves_that_are_refused_write_nothing(tmp_path):
    (tmp_path / "run").write_text("")
    fails([str(tmp_path / "run")], saved, tmp_path / "run")
    (tmp_path / "run").unlink()
    fails(["'../x' cannot be a tag"], saved, tmp_path, tag="../x")
    bad = {"model": object()}
    fails(["rank 0: client_state['model'] of type object"], saved, tmp_path, client_state=bad)
    fails(["client_state has the key 3 of type int"], saved, tmp_path, client_state={3: 1})
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for value in (cyclic, 10**5000, [10**5000]):
        fails(["client_state['x']"], saved, tmp_path, client_state={"x": value})
    for state in ([1, 2], "abc"):
        fails(["pass a dictionary"], saved, tmp_path, client_state=state)
    for name in ("a\0b", "a\ud800"):
        fails([repr(name)[1:-1], "cannot be the name"], saved, tmp_path / name)
    tags = each_saves(lambda engine: (tmp_path, f"t{engine.global_rank}"))
    fails(["different tags ['t0', 't1']"], tags)
    assert list(tmp_path.iterdir()) == []
    folders = each_saves(lambda engine: (tmp_path / str(engine.global_rank),))
    fails(["rank 1: ", "storage that all ranks share"], folders)


@pytest.mark.parametrize("name", ["__metadata__", "x\ny"])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_names_that_no_file_can_hold_are_refused_before_the_write(tmp_path, name, is_buffer):
    def make() -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)
        if is_buffer:
            module.register_buffer(name, torch.ones(2))
        else:
            module.register_parameter(name, torch.nn.Parameter(torch.ones(2)))
        return module

    for text in errors(run, TWO_WHOLE, make, lambda engine: checkpoint.save(engine, tmp_path)):
        assert f"{name!r} cannot be the name" in text
    assert list(tmp_path.iterdir()) == []
    if name == "__metadata__":
        fails([repr(name)], run, TWO_WHOLE, make, lambda e: e.save_16bit_model(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
def test_a_whole_file_that_is_not_published_leaves_nothing(tmp_path, name, monkeypatch):
    """A folder is in its place, or a signal ends the save after the file was written."""
    (tmp_path / name).mkdir()
    fails(["Is a directory"], run, TWO_WHOLE, small, lambda e: e.save_16bit_model(tmp_path, name))
    assert [path.name for path in tmp_path.iterdir()] == [name]

    def interrupt(*paths: object) -> None:
        raise KeyboardInterrupt

    model = small()
    engine = start(model, adamw(model), config_of(1))
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.save_16bit_model(tmp_path / "other", name)
    assert list((tmp_path / "other").iterdir()) == []
    engine.destroy()


def test_names_of_a_whole_file(tmp_path):
    def saves(engine: Engine) -> None:
        for name in (None, 5, ""):
            with pytest.raises(CheckpointError, match=f"{name!r} is no name of a file; pass one"):
                engine.save_16bit_model(tmp_path, name)
        with pytest.raises(CheckpointError, match="null byte"):
            engine.save_16bit_model(tmp_path, "a\0.bin")
        assert list(tmp_path.iterdir()) == []
        engine.save_16bit_model(tmp_path, ".safetensors")

    run(Job(1, 1), small, saves)
    assert load_file(tmp_path / ".safetensors")


def test_folders_that_are_no_paths_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refuses(engine: Engine) -> None:
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(ConfigError, match="no folder"):
                call("")
            for folder in (3, True, ["a"], b"a"):
                with pytest.raises(CheckpointError, match=re.escape(repr(folder))):
                    call(folder)

    run(TWO_WHOLE, small, refuses)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_was_destroyed(tmp_path):
    def ended(engine: Engine) -> None:
        engine.destroy()
        for call in (
            lambda: engine.save_checkpoint(str(tmp_path), tag="b"),
            lambda: engine.load_checkpoint(str(tmp_path)),
            lambda: engine.save_16bit_model(str(tmp_path)),
        ):
            with pytest.raises(CheckpointError, match="the engine was destroyed"):
                call()

    run(TWO, small, ended)
    assert list(tmp_path.iterdir()) == []


def test_parts_of_tensors_at_unknown_places_are_not_saved(tmp_path):
    def on_rank(rank: int, whole: torch.nn.Module) -> None:
        model = split(copy.deepcopy(whole), init_parallel(ParallelDims.over(2, tensor=2)))
        set_sharding(model.blocks[0].down.weight, Sharding(("tensor",)))
        engine = start(model, adamw(model), config_of_split(1))
        with pytest.raises(CheckpointError, match=r"blocks\.0\.down\.weight are parts of tensors"):
            engine.save_checkpoint(tmp_path)
        engine.destroy()

    run_ranks(2, on_rank, seeded(lambda: Split(blocks=1)))


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


def wider_norm():
    module = other()
    module.norm.running_mean = torch.zeros(14)
    return module


def doubled():
    module = other()
    module.module = torch.nn.ModuleDict({"second": copy.deepcopy(module.second)})
    return module


def one_group(groups):
    return torch.optim.AdamW(groups[:1], lr=0.1)


SGD = Job(2, 3, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
FEWER = Job(2, 3, optimizer=one_group, decays=lambda name: True)
REGROUPED = Job(2, 3, decays=lambda name: "bias" not in name and "second" not in name)
LOOSE = {"load_module_strict": False}
OTHERS: dict[str, tuple[Job, Any, dict[str, Any], list[str]]] = {
    "other shapes": (TWO, widened, {}, ["second.weight (checkpoint [6, 13], model [7, 13])"]),
    "other shapes, what both have": (TWO, widened, LOOSE, ["shapes differ"]),
    "other names": (TWO, renamed, {}, ["it lacks third.", "the model lacks second.weight"]),
    "names that DDP's prefix tells apart": (TWO, doubled, {}, ["it lacks module.second.weight"]),
    "other buffers": (TWO, wider_norm, {}, ["norm.running_mean (checkpoint [13], model [14])"]),
    "another optimizer": (SGD, other, {}, ["torch.optim.adamw.AdamW", "torch.optim.sgd.SGD"]),
    "one group": (FEWER, other, {}, ["2 optimizer groups, this engine 1"]),
    "other groups": (REGROUPED, other, {}, ["second.weight (0 there, 1 here)"]),
}


def refused(folder: Path, parts: list[str], job: Job = TWO, make: Any = other, **how: Any) -> None:
    def action(engine: Engine) -> None:
        try:
            checkpoint.load(engine, folder, **how)
        finally:
            assert not any(flat.shard.any() for flat in engine.flats)
            assert engine.counters.global_steps == 0

    fails([*parts, "Nothing was loaded"], run, job, make, action)


def test_what_does_not_fit_is_refused(tmp_path, heard):
    expected = state_of(saved(tmp_path))
    for job, make, options, said in OTHERS.values():
        refused(tmp_path, said, job, make, **options)
    job = Job(2, 3, frozen=lambda name: "first" in name)
    saved(tmp_path / "trained", job, exclude_frozen_parameters=True)
    refused(tmp_path / "trained", ["it lacks first.weight, first.bias"])
    run(Job(2, 3, optimizer=None), small, lambda engine: checkpoint.save(engine, tmp_path / "no"))
    refused(tmp_path / "no", ["was saved without an optimizer"])
    load(tmp_path, SGD, load_optimizer_states=False)
    heard.clear()
    loaded = state_of(load(tmp_path, ONE, renamed, **LOOSE))
    (warning,) = [text for text in heard if "another model" in text]
    assert "third.weight, third.bias" in warning and "second.weight, second.bias" in warning
    for kind in ("weights", "exp_avg"):
        assert torch.equal(loaded["first.weight"][kind], expected["first.weight"][kind])
    assert not loaded["third.weight"]["exp_avg"].any()


def each_loads(where: Callable[[int], Any]) -> None:
    run(TWO, small, lambda engine: checkpoint.load(engine, *where(engine.global_rank)))


def test_ranks_that_load_different_checkpoints(tmp_path):
    """Half of one and half of the other is not a state that training was ever in."""
    for steps in (1, 2):
        saved(tmp_path / "0", tag=f"t{steps}", steps=steps)
    parts = ["rank 0 t1 (", "rank 1 t2 (", "Nothing was loaded"]
    fails(parts, each_loads, lambda rank: (tmp_path / "0", f"t{rank + 1}"))
    saved(tmp_path / "1", tag="t2", steps=2)
    parts = ["the ranks see different checkpoints", "Nothing was loaded"]
    fails(parts, each_loads, lambda rank: [tmp_path / str(rank)])
    shutil.rmtree(tmp_path / "1")
    # one folder that two machines have mounted under different names
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    each_loads(lambda rank: [tmp_path / str(rank)])


@pytest.mark.parametrize("error", [KeyError("step"), OSError(errno.EIO, "failed", "latest")])
def test_a_choice_that_fails_on_rank_0_raises_on_all_ranks(error: Exception) -> None:
    def choose() -> None:
        raise error

    def run(rank: int) -> str:
        with pytest.raises(CheckpointError) as raised:
            failures.decide_on_rank_0(get_world_group(), choose)
        return str(raised.value)

    first, second = run_ranks(2, run)
    assert first == second == failures.describe_error(error)

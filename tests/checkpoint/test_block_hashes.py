"""Bytes that have changed since a save are found by every reader of them, whatever part of a file
it reads; checkpoints without hashes of blocks are read as before.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint import tensorfile, zero_to_fp32
from hf_zero.checkpoint.file_writer import write_tensors
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.tensorfile import BlockHashes, TensorFile, plan_file
from hf_zero.deepspeed import state_dicts
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import (
    RANK1,
    TWO,
    Failed,
    Job,
    flip,
    other,
    run,
    small,
    state_of,
    train_some,
    value,
)
from tests.checkpoint.jobs import saved as save
from tests.checkpoint.written import write
from tests.helpers.engines import start
from tests.helpers.ranks import run_ranks
from tests.helpers.split import config_of_split
from tests.helpers.training import adamw

BLOCK = 64  # bytes


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are smaller than tensors."""
    monkeypatch.setattr(tensorfile, "MIN_BLOCK", BLOCK)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"long": 333, "short": 3, "exact": 2 * BLOCK // 4, "none": 0}
    made = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return made | {"bytes": torch.arange(77, dtype=torch.uint8)}


def written(path: Any) -> tuple[Any, BlockHashes]:
    held = tensors()
    plan = plan_file([(name, each.dtype, each.shape) for name, each in held.items()], {}, 128)
    return plan, write_tensors(path, plan, held).blocks


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("at_once", [0, 3 * BLOCK + 5])
def test_a_changed_byte_is_found_in_its_block_and_nowhere_else(at_once, tmp_path, monkeypatch):
    path, drawn = tmp_path / "f", random.Random(1)
    plan, found = written(path)
    whole = path.read_bytes()
    for entry in (each for each in plan.entries if each.nbytes):
        for _ in range(25):
            path.write_bytes(whole)
            changed = drawn.randrange(entry.nbytes)
            flip(path, len(plan.header) + entry.begin + changed)
            with TensorFile(path, found) as file:
                monkeypatch.setattr(file._file, "at_once", at_once, raising=False)
                item = entry.dtype.itemsize
                start = drawn.randint(0, entry.numel - 1)
                out = torch.empty(drawn.randint(1, entry.numel - start), dtype=entry.dtype)
                first, last = start * item // BLOCK, ((start + out.numel()) * item - 1) // BLOCK
                if first <= changed // BLOCK <= last:
                    with pytest.raises(CheckpointError, match="not those that were written"):
                        file.read_into(entry.name, start, out)
                else:
                    file.read_into(entry.name, start, out)
                for each in plan.entries:
                    if each is not entry:
                        file.read_into(each.name, 0, torch.empty(each.numel, dtype=each.dtype))


@pytest.mark.usefixtures("blocks")
def test_hashes_that_make_no_sense_are_damage(tmp_path: Path) -> None:
    _, found = written(tmp_path / "f")
    with pytest.raises(CheckpointError, match="manifest has hashes of"):
        TensorFile(tmp_path / "f", BlockHashes(found.size, found.digests[:-16]))
    path = write.HERE / "version2" / write.TAG / "manifest.json"
    document = json.loads(path.read_text())
    del document["digest"]
    blocks = {"algorithm": "xxh3_64", "size": 1 << 20, "digests": "0" * 16}
    document["files"][0]["blocks"] = blocks
    assert Manifest.from_json(document, path).files[0].to_json()["blocks"] == blocks
    for wrong in ({"size": 0}, {"size": "64"}, {"digests": "0" * 15}, {"digests": 7}):
        document["files"][0]["blocks"] = blocks | wrong
        with pytest.raises(CheckpointError, match="blocks have no sizes and digests"):
            Manifest.from_json(document, path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder, tag="a")
    shutil.copytree(folder / "a", folder / "whole")
    return folder


def load_on(ranks: int, stage: int, folder: Path, **how: bool) -> None:
    def action(engine: Any) -> None:
        engine.load_checkpoint(str(folder), tag="a", **how)

    try:
        run(Job(ranks, stage, units=("first",)), other, action)
    except Failed as failed:
        raise failed.results[0] from failed


def universal(folder: Path, target: Path, **how: bool) -> None:
    arguments = ["--input_folder", str(folder / "a"), "--output_folder", str(target)]
    state_dicts.main(state_dicts.parse_arguments([*arguments, *["--no_verify"] * len(how)]))


def script(folder: Path, target: Path, **how: bool) -> None:
    """Call ``zero_to_fp32.py`` as its command line does."""
    words = ["zero_to_fp32.py", str(folder / "a"), str(target), *["--no_verify"] * len(how)]
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", words)
        code = zero_to_fp32.main()
    if code:
        raise CheckpointError(said.getvalue())


# each reads what is damaged, by default or with ``verify=False``
READERS: dict[str, Callable[..., object]] = {
    "the same ranks": lambda folder, target, **how: load_on(2, 3, folder, **how),
    "other ranks": lambda folder, target, **how: load_on(3, 1, folder, **how),
    "conversion": lambda folder, target, **how: checkpoint.convert_checkpoint(
        folder / "a", target, **how
    ),
    "iterate_state_dict": lambda folder, target, **how: list(
        checkpoint.iterate_state_dict(folder / "a", **how)
    ),
    "fp32 state dict": lambda folder, target, **how: (
        checkpoint.get_fp32_state_dict_from_zero_checkpoint(folder / "a", **how)
    ),
    "into a module": lambda folder, target, **how: checkpoint.load_state_dict_from_zero_checkpoint(
        small(), folder / "a", **how
    ),
    "universal files": universal,
    "zero_to_fp32.py": script,
    "deepspeed's converter": lambda folder, target, **how: (
        state_dicts.convert_zero_checkpoint_to_fp32_state_dict(folder / "a", target, **how)
    ),
}


def changed(saved: Path, folder: Path, tensor: str) -> Path:
    """A copy of ``saved`` with one other byte in the middle of ``tensor`` of the second file."""
    shutil.copytree(saved, folder)
    with TensorFile(folder / "a" / RANK1) as file:
        entry = next(each for name, each in file.entries.items() if tensor in name)
        at = file._data + (entry.begin + entry.end) // 2
    flip(folder / "a" / RANK1, at)
    return folder


def test_each_reader_finds_it(saved: Path, tmp_path: Path) -> None:
    folder = changed(saved, tmp_path / "run", "first|trainable|float32::master")
    for at, (name, reader) in enumerate(READERS.items()):
        with pytest.raises(CheckpointError) as raised:
            reader(folder, tmp_path / f"out{at}")
        assert raised.match(f"{RANK1}.*not those that were written"), name
        reader(folder, tmp_path / f"trusted{at}", verify=False)


def test_loads_name_the_whole_checkpoints_and_go_on_from_one(saved: Path, tmp_path: Path) -> None:
    """Moments are compared as weights are; the configuration can turn it off."""
    folder = changed(saved, tmp_path / "run", "first|trainable|float32::exp_avg_sq")
    found = r"not those that were written.*Whole in .*: whole"

    def action(engine: Any) -> None:
        with pytest.raises(CheckpointError, match=found):
            engine.load_checkpoint(str(folder), tag="a")
        engine.load_checkpoint(str(folder), tag="whole")
        train_some(engine, 1)
        engine.load_checkpoint(str(folder), tag="a", load_module_only=True)

    run(TWO, other, action)

    def trusting(rank: int, model: Any) -> None:
        config = {**TWO.config, "checkpoint": {"verify": False}}
        engine = start(model, torch.optim.AdamW(model.parameters()), config)
        engine.load_checkpoint(str(folder), tag="a", load_optimizer_states=False)
        engine.destroy()

    folder = changed(saved, tmp_path / "weights", "first|trainable|float32::master")
    run_ranks(1, trusting, other())


def small_on_ranks(folder: Path, ranks: int, stage: int) -> list[Any]:
    """Engines that have loaded a checkpoint of the small model."""

    def action(engine: Any) -> None:
        client_state = engine.load_checkpoint(str(folder))[1]
        assert engine.counters.global_steps == 1 and client_state == write.CLIENT_STATE

    return run(Job(ranks, stage, units=("first",)), other, action)[0]


def cut_in_one_process(folder: Path) -> list[Any]:
    """An engine of whole layers that has loaded a checkpoint of two ranks with split layers."""

    def on_rank(rank: int, model: Any) -> Any:
        engine = start(model, adamw(model), config_of_split(1))
        engine.load_checkpoint(str(folder))
        return engine

    return run_ranks(1, on_rank, write.cut_model())


VERSIONS: dict[int, tuple[Callable[[], torch.nn.Module], Callable[[Path], list[Any]]]] = {
    1: (small, lambda folder: small_on_ranks(folder, 2, 3)),
    2: (small, lambda folder: small_on_ranks(folder, 3, 1)),
    3: (write.cut_model, cut_in_one_process),
    4: (small, lambda folder: small_on_ranks(folder, 3, 2)),
}


def test_checkpoints_of_every_version_are_read(tmp_path: Path) -> None:
    """They are loaded, verified and converted; weights and moments have known values."""
    for version, (make, loaded) in VERSIONS.items():
        folder = write.HERE / f"version{version}"
        assert json.loads((folder / write.TAG / "manifest.json").read_text())["version"] == version
        found, whole = state_of(loaded(folder)), {}
        converted = checkpoint.get_fp32_state_dict_from_zero_checkpoint(folder)
        for name, parameter in make().named_parameters():
            whole[name] = tuple(parameter.shape)
            assert torch.equal(converted[name], value("weights", name, parameter.shape)), name
        assert found.keys() == {name for name, shape in whole.items() if 0 not in shape}
        for name, kinds in found.items():
            assert kinds.keys() == {"weights", "exp_avg", "exp_avg_sq"}
            for kind, tensor in kinds.items():
                assert torch.equal(tensor, value(kind, name, whole[name]).reshape(-1)), (name, kind)
        assert checkpoint.verify_checkpoint(folder).whole
    copied = shutil.copytree(write.HERE / "version1", tmp_path / "version1")
    flip(copied / write.TAG / RANK1, -9)
    (problem,) = checkpoint.verify_checkpoint(copied).problems
    assert RANK1 in problem and "its hash is sha256:" in problem

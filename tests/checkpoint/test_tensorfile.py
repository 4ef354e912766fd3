"""Files of tensors: the safetensors library reads them, and bytes that changed since a save are
found by every reader of them; checkpoints without hashes of blocks are read as before.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from hf_zero import checkpoint
from hf_zero.checkpoint import file_writer, tensorfile, zero_to_fp32
from hf_zero.checkpoint.file_writer import DirectFile, write_image, write_tensors
from hf_zero.checkpoint.manifest_reading import manifest_of
from hf_zero.checkpoint.tensorfile import (
    CODES,
    MAX_HEADER,
    BlockHashes,
    FileHasher,
    FilePlan,
    TensorFile,
    hash_of_file,
    plan_file,
)
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
    assert manifest_of(document, path).files[0].to_json()["blocks"] == blocks
    for wrong in ({"size": 0}, {"size": "64"}, {"digests": "0" * 15}, {"digests": 7}):
        document["files"][0]["blocks"] = blocks | wrong
        with pytest.raises(CheckpointError, match="blocks have no sizes and digests"):
            manifest_of(document, path)


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
    found = r"not those that were written.*Complete in .*: whole"

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


DTYPES = sorted(CODES, key=str)


def some(dtype: torch.dtype, count: int) -> torch.Tensor:
    return (
        torch.arange(count * dtype.itemsize, dtype=torch.uint8).view(dtype)
        if dtype != torch.bool
        else torch.arange(count) % 2 == 0
    )


def put(path, tensors, alignment=8):
    plan = plan_file(
        [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()],
        {"format": "pt"},
        alignment,
    )
    return plan, write_tensors(path, plan, tensors)


def test_the_library_reads_every_dtype(tmp_path):
    tensors = {str(dtype): some(dtype, 5) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "matrix": torch.arange(6.0).reshape(2, 3),
        "ä|::": torch.ones(3),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "repeated": torch.ones(1).expand(5),
    }
    plan, hashes = put(tmp_path / "f", tensors, 4096)
    assert (
        hashes.file
        == f"xxh3_128:{xxhash.xxh3_128_hexdigest((tmp_path / 'f').read_bytes())}"
        == hash_of_file(tmp_path / "f")
    )
    assert plan.size == (tmp_path / "f").stat().st_size
    assert len(plan.header) % 4096 == 0
    with safe_open(tmp_path / "f", "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert read.dtype == tensor.dtype and read.shape == tensor.shape
            both = (each.contiguous().reshape(-1) for each in (read, tensor))
            assert torch.equal(*(each.view(torch.uint8) for each in both))


def test_it_reads_what_the_library_writes_and_no_range_outside(tmp_path):
    values = {"a": torch.arange(10.0), "b": torch.arange(4, dtype=torch.int8)}
    save_file(values, tmp_path / "f", {"key": "value"})
    with TensorFile(tmp_path / "f") as file:
        out = torch.empty(3)
        file.read_into("a", 4, out)
        assert out.tolist() == [4, 5, 6]
        assert file.metadata == {"key": "value"}
        for start, out in (
            (8, torch.empty(3)),
            (-1, torch.empty(1)),
            (0, torch.empty(2, dtype=torch.int32)),
        ):
            with pytest.raises(ValueError, match="pass a range"):
                file.read_into("a", start, out)


def write_random(path, size):
    image = file_writer.aligned_buffer(size).random_(256)
    write_image(path, [tensorfile.bytes_view(image)], FilePlan((), bytes(image.numpy())))
    assert path.read_bytes() == bytes(image.numpy())


def test_pages_go_past_the_cache_and_the_rest_through_it(tmp_path, monkeypatch):
    """Also where writes take less than they are given: after a part of a page the rest goes through
    the cache; from memory on no page; and where a file system knows no direct transfers.
    """
    for size in (1, 4095, 4096, (1 << 20) - 1, 1 << 20, (3 << 20) + 5000):
        write_random(tmp_path / "f", size)
    data = memoryview(bytes(range(256)) * 8192)[1:]
    with DirectFile(tmp_path / "f", len(data)) as output:
        output.write(data)
        output.flush()
    assert (tmp_path / "f").read_bytes() == bytes(data)
    write, opened = os.write, os.open
    for takes in (4096, 1 << 19, 5000):
        with monkeypatch.context() as patch:
            patch.setattr(file_writer.os, "write", lambda fd, data, n=takes: write(fd, data[:n]))
            write_random(tmp_path / "f", (2 << 20) + 77)

    def refuse(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return opened(path, flags, *mode)

    monkeypatch.setattr(file_writer.os, "open", refuse)
    write_random(tmp_path / "f", 2 << 20)


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


DAMAGED = {
    "empty": b"",
    "header longer than the file": raw({}, length=10),
    "header beyond the limit": raw({}, length=MAX_HEADER + 1),
    "no JSON": raw(b"{nonsense"),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "a list": raw([]),
    "metadata is a list": raw({"__metadata__": []}),
    "unknown dtype": raw({"a": entry(0, 8, dtype="F31")}, bytes(8)),
    "negative shape": raw({"a": entry(0, 8, shape=(-1, -2))}, bytes(8)),
    "size and shape disagree": raw({"a": entry(0, 8, shape=(3,))}, bytes(8)),
    "huge shape": raw({"a": entry(0, 8, shape=(1 << 62, 1 << 62))}, bytes(8)),
    "a shape that no other reader takes": raw({"a": entry(0, 0, shape=(1 << 33, 1 << 33, 0))}),
    "half of a character for a name": raw({"\ud800": entry(0, 8)}, bytes(8)),
    "a gap": raw({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
    "an overlap": raw({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "data cut short": raw({"a": entry(0, 8)}, bytes(7)),
    "data too long": raw({"a": entry(0, 8)}, bytes(9)),
    "nested too deep": raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
}


def test_damage_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "broken.safetensors"
    for kind, content in DAMAGED.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            TensorFile(path)
        assert caught.match(r"broken\.safetensors is damaged: "), kind
    with pytest.raises(CheckpointError, match=r"nothing cannot be opened"):
        TensorFile(tmp_path / "nothing")


def test_a_file_cut_short_while_it_is_read(tmp_path):
    put(tmp_path / "f", {"a": torch.arange(1000.0)})
    with TensorFile(tmp_path / "f") as file:
        with open(tmp_path / "f", "r+b") as raw:
            raw.truncate(200)
        with pytest.raises(CheckpointError, match="cut short"):
            file.read_into("a", 0, torch.empty(1000))


def test_more_bytes_than_planned_are_refused() -> None:
    hasher = FileHasher([3, 0, 5])
    hasher.update(memoryview(bytes(8)))
    assert len(hasher.result().blocks) == 2
    with pytest.raises(CheckpointError, match="2 bytes more than its plan"):
        hasher.update(memoryview(bytes(2)))


def test_dtypes_that_are_read_alone_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    path.write_bytes(raw({"a": entry(0, 2, dtype="F8_E8M0")}, bytes([127, 128])))
    with contextlib.closing(TensorFile(path)) as file:
        out = torch.empty(2, dtype=torch.float8_e8m0fnu)
        file.read_into("a", 0, out)
    assert out.float().tolist() == [1.0, 2.0]
    for dtype in ("F4", "F6_E2M3", "F6_E3M2"):
        path.write_bytes(raw({"a": entry(0, 1, dtype=dtype)}, bytes(1)))
        with pytest.raises(CheckpointError, match=f"'a' in {dtype}, which hf-zero does not read"):
            TensorFile(path)

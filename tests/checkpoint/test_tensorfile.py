"""The container: the safetensors library reads what is written, and no damaged file gets further
than an error.
"""

from __future__ import annotations

import errno
import json
import os
import struct

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from hf_zero.checkpoint import file_writer, tensorfile
from hf_zero.checkpoint.file_writer import DirectFile, write_image, write_tensors
from hf_zero.checkpoint.tensorfile import (
    CODES,
    MAX_HEADER,
    FilePlan,
    TensorFile,
    hash_of_file,
    plan_file,
)
from hf_zero.errors import CheckpointError

DTYPES = sorted(CODES, key=str)


def some(dtype: torch.dtype, count: int) -> torch.Tensor:
    return (
        torch.arange(count * dtype.itemsize, dtype=torch.uint8).view(dtype)
        if dtype != torch.bool
        else torch.arange(count) % 2 == 0
    )


def write(path, tensors, alignment=8):
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
    plan, hashes = write(tmp_path / "f", tensors, 4096)
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
    write_image(path, tensorfile.bytes_view(image), FilePlan((), bytes(image.numpy())))
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
    write(tmp_path / "f", {"a": torch.arange(1000.0)})
    with TensorFile(tmp_path / "f") as file:
        with open(tmp_path / "f", "r+b") as raw:
            raw.truncate(200)
        with pytest.raises(CheckpointError, match="cut short"):
            file.read_into("a", 0, torch.empty(1000))

"""Saving, loading and converting hold no second copy of the model: the highest resident set is
measured. A load reads the elements that a rank owns, once, and nothing else.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from hf_zero import checkpoint
from hf_zero.checkpoint import tensorfile
from hf_zero.zero.layout.whole_names import persistent_buffers
from tests.checkpoint.jobs import Job, run
from tests.checkpoint.setups import Setup, train
from tests.helpers.deepspeed_files import write

MB = 1 << 20
MODEL = 128 * MB  # bytes in fp32
ALLOWED = 72 * MB  # a few blocks of 16 MiB and what the allocator keeps


def big():
    module = torch.nn.Sequential()
    for index in range(4):
        module.append(torch.nn.Linear(1, MODEL // 16, bias=False))
        torch.nn.init.constant_(module[index].weight, float(index))
    return module


def status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def grows(action) -> int:
    """Bytes by which the resident set rose above its start while ``action`` ran."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed would be taken again without a rise
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the highest resident set becomes the present one
    except OSError:
        pytest.skip("this kernel does not let a process reset its highest resident set")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def test_saving_loading_converting(tmp_path):
    convert = checkpoint.convert_checkpoint

    def action(engine):
        assert grows(lambda: checkpoint.save(engine, tmp_path)) < ALLOWED
        assert grows(lambda: checkpoint.load(engine, tmp_path)) < ALLOWED
        weights = [flat.shard for flat in engine.flats]
        copied = grows(lambda: [shard.clone() for shard in weights])
        assert copied > 100 * MB > ALLOWED, "the measure sees a copy"

    run(Job(1, 3, units=tuple("0123"), optimizer=None), big, action)
    assert grows(lambda: convert(tmp_path, tmp_path / "out")) < ALLOWED
    assert grows(lambda: convert(tmp_path, tmp_path / "half", "bfloat16")) < ALLOWED


def distributed(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    dcp.save({"model": weights}, checkpoint_id=folder, no_dist=True)


WAYS: dict[str, Any] = {
    "DeepSpeed, stage 2 in bf16": lambda folder, weights: write(folder, weights, 2, bf16=True),
    "torch.distributed.checkpoint": distributed,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_others_wrote(tmp_path, way):
    """No page of a mapping stays, and a tensor that is read whole goes before the next one."""
    count, theirs, out = 8, tmp_path / "theirs", tmp_path / "out"
    weights = {f"p{index}.weight": torch.randn(MODEL // 4 // count, 1) for index in range(count)}
    WAYS[way](theirs, weights)
    kept = {name: tensor[:: 1 << 12].clone() for name, tensor in weights.items()}
    del weights
    assert grows(lambda: checkpoint.convert_checkpoint(theirs, out, "float32")) < ALLOWED
    found = load_file(out / "model.safetensors")
    for name, tensor in kept.items():
        assert torch.equal(found[name][:: 1 << 12], tensor), name


BLOCK = 64  # bytes that have a hash of their own


def owned_bytes(engine: Any) -> int:
    """The bytes of this rank's masters and moments, of frozen values, and of buffers."""
    total = sum(buffer.nbytes for buffer in persistent_buffers(engine.module).values())
    for flat in engine.flats:
        elements = sum(len(piece) for piece in flat.layout.pieces(*flat.owned))
        total += elements * (12 if flat.trainable else flat.dtype.itemsize)
    return total


def test_each_rank_reads_what_it_owns_once(tmp_path, monkeypatch):
    """And, to compare hashes, the rest of the blocks at the ends of what it owns."""
    monkeypatch.setattr(tensorfile, "MIN_BLOCK", BLOCK)
    setups = (Setup(2, 1), Setup(4, 3, way="all in files"))
    before, after = (replace(each.at(tmp_path), frozen="h.0.attn") for each in setups)

    def save(engine: Any, rank: int) -> None:
        train(engine, rank, range(1))
        engine.save_checkpoint(str(tmp_path / "run"), tag="a")

    before.run(save)
    begins = {
        path.name: 8 + int.from_bytes(path.read_bytes()[:8], "little")
        for path in (tmp_path / "run" / "a").glob("rank-*")
    }
    reads: dict[str, list[tuple[str, int, int]]] = defaultdict(list)  # behind headers, by rank
    preadv = os.preadv

    def noted(fd: int, buffers: Any, at: int, *flags: int) -> int:
        count, name = preadv(fd, buffers, at, *flags), Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if at >= begins.get(name, sys.maxsize):
            reads[threading.current_thread().name].append((name, at, at + count))
        return count

    monkeypatch.setattr(os, "preadv", noted)

    def load(engine: Any, rank: int) -> int:
        owned = owned_bytes(engine)
        engine.load_checkpoint(str(tmp_path / "run"), verify=verify)
        return owned

    for verify in (None, False):
        reads.clear()
        for rank, owned in enumerate(after.run(load)):
            spans = sorted(reads[f"rank-{rank}"])
            more = sum(end - at for _, at, end in spans) - owned
            assert 0 <= more <= (0 if verify is False else 2 * BLOCK * len(spans)), f"rank {rank}"
            for one, other in itertools.pairwise(spans if verify is False else []):
                assert one[0] != other[0] or one[2] <= other[1], "no byte twice"

"""Saving, loading and converting hold no second copy of the model: the highest resident set is
measured.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from hf_zero import checkpoint
from tests.checkpoint.jobs import Job, run
from tests.helpers import deepspeed_files
from tests.helpers.cells import fast

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


def on_an_engine(action) -> None:
    job = Job(1, 3, units=tuple("0123"), optimizer=None)
    run(job, big, action)


def test_saving_loading_converting(tmp_path):
    def action(engine):
        assert grows(lambda: checkpoint.save(engine, tmp_path)) < ALLOWED
        assert grows(lambda: checkpoint.load(engine, tmp_path)) < ALLOWED

    on_an_engine(action)
    assert grows(lambda: checkpoint.convert_checkpoint(tmp_path, tmp_path / "out")) < ALLOWED
    assert (
        grows(lambda: checkpoint.convert_checkpoint(tmp_path, tmp_path / "half", "bfloat16"))
        < ALLOWED
    )


WAYS = {
    "DeepSpeed, stage 0 in bf16": lambda folder, weights: deepspeed_files.write(
        folder, weights, 0, bf16=True
    ),
    "DeepSpeed, stage 2 in bf16": lambda folder, weights: deepspeed_files.write(
        folder, weights, 2, bf16=True
    ),
    "DeepSpeed, stage 3": lambda folder, weights: deepspeed_files.write(folder, weights, 3),
    "save_pretrained": lambda folder, weights: (
        folder.mkdir(),
        save_file(weights, folder / "model.safetensors"),
    ),
    "torch.distributed.checkpoint": lambda folder, weights: dcp.save(
        {"model": weights}, checkpoint_id=folder, no_dist=True
    ),
}


@pytest.mark.parametrize(
    "way",
    fast(WAYS, lambda way: way in ("DeepSpeed, stage 2 in bf16", "torch.distributed.checkpoint")),
)
def test_what_others_wrote(tmp_path, way):
    """Not a page of a mapping stays, and a tensor that can only be read whole is let go before
    the next one.
    """
    count = 8
    weights = {f"p{index}.weight": torch.randn(MODEL // 4 // count, 1) for index in range(count)}
    WAYS[way](tmp_path / "theirs", weights)
    kept = {name: tensor[:: 1 << 12].clone() for name, tensor in weights.items()}
    del weights
    assert (
        grows(
            lambda: checkpoint.convert_checkpoint(tmp_path / "theirs", tmp_path / "out", "float32")
        )
        < ALLOWED
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in kept.items():
        want = tensor.bfloat16().float() if "stage 0" in way else tensor
        assert torch.equal(found[name][:: 1 << 12], want), name


def test_the_measure_sees_a_mapping(tmp_path):
    torch.save(torch.ones(MODEL // 4), tmp_path / "mapped.pt")
    mapped = torch.load(tmp_path / "mapped.pt", mmap=True)
    assert grows(lambda: mapped.sum()) > 100 * MB > ALLOWED


def test_the_measure_sees_a_copy():
    def action(engine):
        weights = [flat.shard for flat in engine.flats]
        assert grows(lambda: [shard.clone() for shard in weights]) > 100 * MB > ALLOWED

    on_an_engine(action)

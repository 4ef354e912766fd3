"""Saving, loading and converting hold no second copy of the model: the highest resident set is
measured.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from hf_zero import checkpoint
from tests.checkpoint.jobs import Job, run
from tests.helpers.cells import fast
from tests.helpers.deepspeed_files import write
from tests.helpers.engines import start
from tests.helpers.ranks import run_ranks

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


def pretrained(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")


def distributed(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    dcp.save({"model": weights}, checkpoint_id=folder, no_dist=True)


WAYS: dict[str, Any] = {
    "DeepSpeed, stage 0 in bf16": lambda folder, weights: write(folder, weights, 0, bf16=True),
    "DeepSpeed, stage 2 in bf16": lambda folder, weights: write(folder, weights, 2, bf16=True),
    "DeepSpeed, stage 3": lambda folder, weights: write(folder, weights, 3),
    "save_pretrained": pretrained,
    "torch.distributed.checkpoint": distributed,
}
OFTEN = ("DeepSpeed, stage 2 in bf16", "torch.distributed.checkpoint")


@pytest.mark.parametrize("way", fast(WAYS, lambda way: way in OFTEN))
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
        want = tensor.bfloat16().float() if "stage 0" in way else tensor
        assert torch.equal(found[name][:: 1 << 12], want), name


def test_the_measure_sees_a_mapping(tmp_path):
    torch.save(torch.ones(MODEL // 4), tmp_path / "mapped.pt")
    mapped = torch.load(tmp_path / "mapped.pt", mmap=True)
    assert grows(lambda: mapped.sum()) > 100 * MB > ALLOWED


def deep() -> torch.nn.Module:
    """Ten units of 16 MB."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(10))
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


def test_saving_what_is_in_files_takes_the_memory_of_one_flat(tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    optimizer, parameters = {**nvme, "buffer_size": 1 << 18}, {**nvme, "max_in_cpu": 0}
    section = {"stage": 3, "offload_optimizer": optimizer, "offload_param": parameters}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section}

    def on_rank(rank: int) -> None:
        model = deep()
        engine = start(model, torch.optim.AdamW(model.parameters()), config)
        assert len(engine.flats) == 10
        saved = grows(lambda: checkpoint.save(engine, tmp_path / "saved"))
        assert saved < 96 * MB, "state is 480 MB"
        # a flat's master, moments and shard, and buffers beside
        assert grows(lambda: checkpoint.load(engine, tmp_path / "saved")) < 200 * MB
        engine.destroy()

    run_ranks(1, on_rank)

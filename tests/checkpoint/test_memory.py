"""Saving, loading and converting hold no second copy of the model: the highest resident set is measured."""

from __future__ import annotations

import pytest
import torch

from hf_zero import checkpoint
from tests.checkpoint.fakes import Job, run

MB = 1 << 20
MODEL = 128 * MB  # bytes in fp32
ALLOWED = 72 * MB  # a few blocks of 16 MiB and what the allocator keeps


def big():
    module = torch.nn.Module()
    for index in range(4):
        module.register_parameter(f"p{index}", torch.nn.Parameter(torch.full((MODEL // 16, 1), float(index))))
    return module


def status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def grows(action) -> int:
    """Bytes by which the resident set rose above its start while ``action`` ran."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the highest resident set becomes the present one
    except OSError:
        pytest.skip("this kernel does not let a process reset its highest resident set")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


@pytest.fixture(scope="module")
def engine():
    return run(Job(1, 3, cuts=(1, 1), optimizer=None), big, lambda engine: None)[0][0]


def test_saving_loading_converting(tmp_path, engine):
    engine.comm.enter(0)
    assert grows(lambda: checkpoint.save(engine, tmp_path)) < ALLOWED
    assert grows(lambda: checkpoint.load(engine, tmp_path)) < ALLOWED
    assert grows(lambda: checkpoint.convert_checkpoint(tmp_path, tmp_path / "out")) < ALLOWED
    assert grows(lambda: checkpoint.convert_checkpoint(tmp_path, tmp_path / "half", "bfloat16")) < ALLOWED


def test_the_measure_sees_a_copy(tmp_path, engine):
    def copied():
        return [flat.master.clone() for flat in engine.flats]

    assert grows(copied) > 100 * MB > ALLOWED

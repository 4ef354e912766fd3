"""Operations of a model's forward, beside those that its shapes say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.helpers.engines import config_of
from tests.helpers.stacks import on_ranks
from tests.helpers.training import adamw

profiling: Any = deepspeed.profiling.flops_profiler
BATCH = 3


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 6 * 6, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.relu(self.conv(x)))
        return found


CONV, HEAD = 2 * BATCH * 6 * 6 * 4 * 2 * 9, 2 * BATCH * 4 * 6 * 6 * 5
PARAMS = 4 * 2 * 9 + 4 + 4 * 6 * 6 * 5 + 5


def test_a_models_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shape = (BATCH, 2, 8, 8)
    found = profiling.get_model_profile(Two(), shape, as_string=False)
    assert found == (CONV + HEAD, (CONV + HEAD) // 2, PARAMS)
    text = capsys.readouterr().out
    assert "conv: 15.55 Kflops, 78.3%" in text and "  head: 4.32 Kflops, 21.7%" in text
    file = tmp_path / "made" / "profile.txt"
    found = profiling.get_model_profile(
        Two(), args=[torch.ones(shape)], ignore_modules=[nn.Linear], output_file=str(file)
    )
    assert found == ("15.55 K", "7.78 KMACs", "801") and PARAMS == 801
    assert "fwd MACs per GPU" in file.read_text() and not capsys.readouterr().out
    for mode, how in (("forward", "needs input_shape"), ("backward", "neither 'forward' nor")):
        with pytest.raises(ValueError, match=how):
            profiling.get_model_profile(Two(), mode=mode)


def test_a_profile_of_several_forwards(capsys: pytest.CaptureFixture[str]) -> None:
    model = Two()
    sizes = {"world_size": 8, "dp_world_size": None, "seq_dp_world_size": 4, "mp_world_size": 1}
    engine = SimpleNamespace(**sizes, train_micro_batch_size_per_gpu=lambda: BATCH)
    profiler = profiling.FlopsProfiler(model, engine)
    profiler.print_model_profile()
    assert not capsys.readouterr().out
    profiler.start_profile()
    for _ in range(2):
        model(torch.ones(BATCH, 2, 8, 8))
    profiler.stop_profile()
    model(torch.ones(BATCH, 2, 8, 8))
    assert profiler.get_total_flops() == 2 * (CONV + HEAD)
    assert profiler.get_total_duration() > 0 and profiler.get_total_duration(True).endswith("s")
    profiler.print_model_profile(detailed=False)
    printed = capsys.readouterr().out.splitlines()
    lines = {line.partition(":")[0]: line.split()[-1] for line in printed if ": " in line}
    assert lines["data parallel size"] == "4" and lines["batch size per GPU"] == str(BATCH)
    profiler.end_profile()
    assert not profiler.started and not model._forward_hooks


@pytest.mark.parametrize("stage", [0, 3])
def test_a_configuration_profiles_one_step(
    stage: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "profile.txt"
    section = {"enabled": True, "step": 2, "output_file": str(file), "module_depth": 1}

    def run(rank: int, model: Any) -> None:
        config = config_of(stage, gradient_accumulation_steps=2, flops_profiler=section)
        engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
        for step in range(4):
            for _ in range(2):
                assert not file.exists() or step == 3
                engine.backward(engine(torch.ones(BATCH, 2, 8, 8)).sum())
                engine.step()
            assert file.exists() == (step >= 2)
            file.unlink(missing_ok=True) if step == 3 else None
        assert engine.flops_profiler.flops == CONV + HEAD
        assert engine.flops_profiler.params == PARAMS
        engine.destroy()

    on_ranks(1, run, build=Two)


def test_the_profile_of_a_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def run(rank: int, model: Any) -> None:
        section = {"enabled": True, "profile_step": 0, "module_depth": 1, "top_modules": 1}
        config = config_of(1, flops_profiler=section)
        engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(BATCH, 2, 8, 8)).sum())
            engine.step()
        engine.destroy()

    on_ranks(1, run, build=Two)
    printed = capsys.readouterr().out.splitlines()
    heads = [line for line in printed if line.startswith("Profile Summary")]
    assert heads == ["Profile Summary at step 0:"]
    assert "depth 1: Conv2d 15.55 Kflops" in printed
    names = [line.split(":")[0].strip() for line in printed if line.endswith("%")]
    assert names == ["Two", "conv", "head"]


def test_numbers_as_text() -> None:
    assert profiling.number_to_string(1.234e9) == "1.23 G" and profiling.number_to_string(0) == "0 "
    assert profiling.flops_to_string(2e12, "G") == "2000 GFLOPS"
    assert profiling.macs_to_string(1500) == "1.5 KMACs"
    assert profiling.params_to_string(7e9) == profiling.params_to_string(7e9, "B") == "7 B"
    assert profiling.duration_to_string(0.0125) == "12.5 ms"

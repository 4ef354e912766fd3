"""Offload on one GPU: equal to the same training on the device, whatever is slow, in pinned memory
of the size asked for.

tests/ranks/test_offload.py shows the same numbers on the CPU, where transfers are copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.offload.gradient_offload import GradientOffload
from hf_zero.offload.sub_group_update import SubGroupUpdate
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import WAYS, offload, stages_of
from tests.helpers.training import trainable

pytestmark = pytest.mark.usefixtures("process_group")
STEPS = 5
CELLS = [(way, stage) for way in WAYS for stage in stages_of(way)]
SLOW = 20_000_000  # cycles that a delayed stream sleeps: some 10 ms


def wide() -> torch.nn.Module:
    """Blocks of several pieces, so that the staging memory is used again and again."""
    return seeded(lambda: Stack(depth=4, width=128))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 7, generator=generator).cuda() for _ in range(STEPS)]


def rmsprop(model: torch.nn.Module) -> torch.optim.Optimizer:
    """It steps itself, on the device and on the host, by kernels of two devices."""
    return torch.optim.RMSprop(trainable(model), lr=1e-3, eps=1e-6)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), lr=1e-3, eps=1e-6)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Additions and products alone, which every device rounds alike."""
    return torch.optim.SGD(trainable(model), lr=0.125, foreach=False, fused=False)


Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


def train(
    section: dict[str, Any], precision: str = "fp32", make: Make = adamw, clip: float = 1.0
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights (fp32, on the CPU) and losses after :data:`STEPS` steps."""
    model = wide()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": section,
        "gradient_clipping": clip,
        "bf16": {"enabled": precision == "bf16"},
    }
    engine = hf_zero.initialize(model=model, optimizer=make(model), config=config)[0]
    losses = []
    for inputs in batches():
        loss = engine(inputs.bfloat16() if precision == "bf16" else inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    named = [(name, hf_zero.safe_get_full_fp32_param(p)) for name, p in model.named_parameters()]
    weights = {name: whole.float().cpu().clone() for name, whole in named}
    engine.destroy()
    return weights, [loss.item() for loss in losses]


def apart(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The difference, relative in norm."""
    difference = sum(float((got[name] - want[name]).double().square().sum()) for name in want)
    whole = sum(float(weights.double().square().sum()) for weights in want.values())
    return (difference / whole) ** 0.5


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-5), ("bf16", 5e-3)])
@pytest.mark.parametrize("way, stage", CELLS)
def test_every_way_equals_the_device(way, stage, precision, tolerance, tmp_path):
    want, losses = train({"stage": stage}, precision)
    got, away = train(offload(way, stage, tmp_path), precision)
    assert apart(got, want) < tolerance
    assert away == pytest.approx(losses, rel=10 * tolerance)


@pytest.mark.parametrize("way, stage", CELLS)
def test_the_same_additions_give_the_same_bits(way: str, stage: int, tmp_path: Path) -> None:
    """Unclipped, so that no norm is summed in another order."""
    want, losses = train({"stage": stage}, make=sgd, clip=0.0)
    got, away = train(offload(way, stage, tmp_path), make=sgd, clip=0.0)
    assert away == losses
    for name, weights in want.items():
        assert torch.equal(got[name], weights), name


@pytest.mark.parametrize("make", [adamw, rmsprop])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_moments_in_fewer_bits_stay_close(moments: str, make: Make, tmp_path: Path) -> None:
    if moments != "fp32" and make is rmsprop:
        with pytest.raises(ConfigError, match="fp32 only"):
            train(offload("optimizer on cpu", 2, tmp_path, moments=moments), make=make)
        return
    want, _ = train({"stage": 2}, make=make)
    got, _ = train(offload("optimizer on cpu", 2, tmp_path, moments=moments), make=make)
    assert apart(got, want) < (1e-5 if moments == "fp32" else 2e-2)


@pytest.fixture(params=["nothing", "gradients", "parameters", "compute", "host"])
def slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of the parties sleeps before each of its transfers: who does not wait for it reads
    what was there before.
    """
    kind = request.param

    def sleeping(function: Any, stream: Callable[[Any], torch.cuda.Stream | None]) -> Any:
        def slept(owner: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = stream(owner) or torch.cuda.current_stream()
            with torch.cuda.stream(chosen):
                torch.cuda._sleep(SLOW)
            return function(owner, *args, **kwargs)

        return slept

    if kind == "gradients":
        sends = sleeping(GradientOffload.send, lambda offload: offload._stream)
        monkeypatch.setattr(GradientOffload, "send", sends)
    elif kind == "parameters":
        for name in ("store_shard", "fetch_shard"):
            slept = sleeping(getattr(FlatBuffer, name), lambda flat: None)
            monkeypatch.setattr(FlatBuffer, name, slept)
    elif kind == "compute":
        monkeypatch.setattr(Stack, "body", sleeping(Stack.body, lambda model: None))
    elif kind == "host":
        apply = SubGroupUpdate._apply

        def late(update: Any, *args: Any) -> None:
            time.sleep(0.002)
            apply(update, *args)

        monkeypatch.setattr(SubGroupUpdate, "_apply", late)
    return str(kind)


PLACES = [("optimizer on cpu", 0), ("optimizer on cpu", 2), ("optimizer on cpu", 3)]
PLACES += [("all on cpu", 3), ("all in files", 3)]


@pytest.mark.parametrize("make", [adamw, rmsprop])
@pytest.mark.parametrize("way, stage", PLACES)
def test_nobody_reads_what_has_not_come(way, stage, make, slow, tmp_path):
    want, _ = train({"stage": stage}, make=make)
    got, _ = train(offload(way, stage, tmp_path), make=make)
    assert apart(got, want) < 1e-5, slow


def test_evaluation_reads_the_parameters_of_the_last_step(slow: str, tmp_path: Path) -> None:
    """A forward right after step, in no_grad, while the update is under way."""
    outputs = []
    for section in ({"stage": 2}, offload("optimizer on cpu", 2, tmp_path)):
        model = wide()
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": section}
        engine = hf_zero.initialize(model=model, optimizer=adamw(model), config=config)[0]
        seen = []
        for inputs in batches():
            engine.backward(engine(inputs).square().mean())
            engine.step()
            with torch.no_grad():
                seen.append(engine(inputs).clone())
        outputs.append(torch.stack(seen))
        engine.destroy()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)


def peak_of(section: dict[str, Any]) -> tuple[int, int]:
    """Most bytes of the GPU in some bf16 steps of 50M parameters, and the number of elements."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = seeded(lambda: Stack(depth=12, width=1024)).bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": section,
        "bf16": {"enabled": True},
    }
    engine = hf_zero.initialize(model=model, optimizer=adamw(model), config=config)[0]
    torch.cuda.reset_peak_memory_stats()
    for inputs in batches():
        engine.backward(engine(inputs.bfloat16()).float().square().mean())
        engine.step()
    peak = torch.cuda.max_memory_allocated() - before
    numel = sum(flat.layout.numel for flat in engine.flats)
    engine.destroy()
    return peak, numel


def test_offload_takes_its_state_off_the_gpu(tmp_path: Path) -> None:
    """Parameters stay (2 bytes), and gradients of some units; with parameters away, a few units."""
    whole, numel = peak_of({"stage": 2})
    unit = numel // 12
    assert whole > 16 * numel
    away, _ = peak_of(offload("optimizer on cpu", 2, tmp_path, buffer_size=1 << 20))
    assert away < 2 * numel + 2 * 9 * unit + (8 << 20)
    nothing, _ = peak_of(offload("all on cpu", 3, tmp_path, buffer_size=1 << 20))
    assert nothing < 2 * 14 * unit + (8 << 20)

"""Fabric on hf-zero's engine beside plain torch, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.integrations.lightning import FabricPrecision, FabricStrategy
from tests.helpers import launched
from tests.helpers.cells import in_one_item
from tests.integrations.lightning import fabric_loop

pytestmark = pytest.mark.filterwarnings("ignore:::lightning")
LOOP = Path(fabric_loop.__file__)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loop_trains_as_plain_torch(stage: int, tmp_path: Path) -> None:
    fabric_loop.main(stage, str(tmp_path / "saved"))


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_train_as_plain_torch(stage: int, tmp_path: Path) -> None:
    command = [*launched.torchrun_command(LOOP), str(stage), str(tmp_path / "saved")]
    assert "equal\n" in launched.output(command, tmp_path, tmp_path / "log.txt")


def fabric_of(**more: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=1, **{"strategy": "zero_stage_2", **more})
    fabric.launch()
    return fabric


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


@in_one_item(["bf16-mixed", "16-mixed", "bf16-true"])
def test_precision_is_the_engines(precision: str) -> None:
    fabric = fabric_of(precision=precision)
    assert isinstance(fabric.strategy.precision, FabricPrecision)
    with fabric.init_module():
        model = nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, sgd(model))
    engine = fabric.strategy.engines[0]
    assert engine.config.precision == ("fp16" if precision[:2] == "16" else "bf16")
    fabric.backward(model(torch.randn(2, 4)).square().mean())
    optimizer.step()
    assert engine.global_steps == 1 and model.weight.dtype in (torch.bfloat16, torch.float16)
    engine.destroy()


def test_a_step_uses_all_backwards_and_a_closure() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 4), nn.Linear(4, 2)
    plain = nn.Linear(4, 2)
    plain.load_state_dict(model.state_dict())
    fabric = fabric_of()
    model, optimizer = fabric.setup(model, sgd(model))
    other = sgd(plain)
    for _ in range(2):  # two backwards without no_backward_sync, as torch adds them
        fabric.backward(model(x).square().mean())
        plain(x).square().mean().backward()
    optimizer.step()
    other.step()
    optimizer.zero_grad()
    other.zero_grad()

    def closure() -> torch.Tensor:
        loss = model(x).square().mean()
        fabric.backward(loss)
        return loss.detach()

    loss = plain(x).square().mean()
    loss.backward()
    torch.testing.assert_close(optimizer.step(closure), loss.detach())
    other.step()
    torch.testing.assert_close(model.state_dict()["weight"], plain.state_dict()["weight"])
    fabric.strategy.engines[0].destroy()


def test_what_is_refused(tmp_path: Path) -> None:
    fabric = fabric_of()
    first, second = (nn.Linear(2, 2) for _ in range(2))
    with pytest.raises(ConfigError, match=r"fabric.setup got 2 optimizers"):
        fabric.setup(first, sgd(first), sgd(first))
    with pytest.raises(ConfigError, match="shards the optimizer with its model"):
        fabric.setup_optimizers(sgd(first))
    one, of_one = fabric.setup(first, sgd(first))
    two, _ = fabric.setup(second, sgd(second))
    loss = one(torch.ones(1, 2)).sum()
    with pytest.raises(ConfigError, match=r"2 models are set up.*model=model"):
        fabric.backward(loss)
    with pytest.raises(ConfigError, match="takes retain_graph alone"):
        fabric.backward(loss, model=one, create_graph=True)
    fabric.backward(loss, model=one)
    with pytest.raises(ConfigError, match="norm_type at 2"):
        fabric.clip_gradients(one, of_one, max_norm=1.0, norm_type=1.0)
    with pytest.raises(ConfigError, match=r"clip_val=1.0.* pass max_norm"):
        fabric.clip_gradients(one, of_one, clip_val=1.0)
    with pytest.raises(ConfigError, match="a Linear was not set up under ZeRO; pass what"):
        fabric.clip_gradients(first, of_one, max_norm=1.0)
    with pytest.raises(ConfigError, match="a SGD was not set up under ZeRO"):
        fabric.strategy.optimizer_step(sgd(first))
    with pytest.raises(ConfigError, match="no_backward_sync got a Linear"):
        fabric.strategy._backward_sync_control.no_backward_sync(first, True).__enter__()
    with pytest.raises(ConfigError, match=r"fabric.save got 2 models"):
        fabric.save(tmp_path / "a", {"one": one, "two": two})
    with pytest.raises(ConfigError, match=r"fabric.save\(filter=...\)"):
        fabric.save(tmp_path / "a", {"one": one}, filter={"one": lambda name, value: True})
    fabric.save(tmp_path / "a", {"one": one})
    with pytest.raises(CheckpointError, match="sharded checkpoint, and only a state with a model"):
        fabric.load(tmp_path / "a")
    fabric.backward(one(torch.full((1, 2), float("inf"))).sum(), model=one)
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        fabric.clip_gradients(one, of_one, max_norm=1.0)
    for engine in fabric.strategy.engines:
        engine.destroy()


def test_a_strategy_names_what_it_cannot_take() -> None:
    given = FabricStrategy(config={"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}})
    fabric = fabric_of(strategy=given)
    layer = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"Fabric\(precision='bf16-mixed'\)"):
        fabric.setup(layer, sgd(layer))
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match="a loop of Fabric accumulates itself"):
        fabric_of(strategy=FabricStrategy(config=config)).setup(layer, sgd(layer))
    with pytest.raises(ConfigError, match=r"FabricStrategy\(stage=2\) contradicts"):
        FabricStrategy(config=config, stage=2)
    with pytest.raises(ConfigError, match="MixedPrecision cannot drive a ZeRO engine"):
        fabric_of(plugins=MixedPrecision("bf16-mixed", "cpu"))
    with pytest.raises(ConfigError, match=r"Fabric\(precision='64-true'\) cannot run"):
        fabric_of(precision="64-true")

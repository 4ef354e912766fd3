"""The engine names no technique, and takes one that only this file knows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.compression import registry
from hf_zero.config import ZeroConfig
from hf_zero.zero.extensions import StepExtension
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.unit import GatherRequest, ShardGather, Unit
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import on_ranks, squared, stack
from tests.helpers.training import At, plain_sgd

ENGINE = Path(registry.__file__).resolve().parents[1] / "zero"
TECHNIQUES = re.compile(
    r"hpz|\bloco\b|zeropp|qgz|qwz|one.?bit|\b1.?bit|zero.?one|\blamb\b|\bmoq\b|quantize_training"
    r"|compression_training|layer_drop|random.?ltd|token.?drop|curriculum|local_steps|secondary"
    r"|\bmics|two.?hops",
    re.IGNORECASE,
)
SHRINK = 0.5


def test_the_engine_names_no_technique() -> None:
    lines = [
        f"{path.relative_to(ENGINE)}:{number}: {line.strip()}"
        for path in (*ENGINE.rglob("*.py"), *ENGINE.rglob("*.md"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if TECHNIQUES.search(line)
    ]
    assert not lines


def test_each_technique_of_the_registry_is_one_that_the_first_test_looks_for() -> None:
    source = Path(registry.__file__).read_text()
    assert {"one.?bit", "secondary", "two.?hops", "hpz"} <= set(TECHNIQUES.pattern.split("|"))
    assert len(set(TECHNIQUES.findall(source))) >= 6


@in_one_item((0, 1))
def test_nodes_of_one_rank_keep_nothing(ranks: int) -> None:
    config = config_of(3)
    config["zero_optimization"]["zero_hpz_partition_size"] = ranks
    assert registry.secondary_shards(ZeroConfig.from_dict(config), None) == {}


class KeptWhole(ShardGather):
    """Gathers whose backward reads a copy that this rank kept in the forward."""

    keeps_values = True

    def __init__(self, unit: Unit):
        super().__init__(unit)
        self.copies: list[torch.Tensor] = []

    def requests(self, exact: bool, backward: bool) -> Sequence[GatherRequest]:
        if not (backward and self.copies):
            self.copies = []
            return super().requests(exact, backward)
        with torch.no_grad():
            for flat, copy in zip(self.unit.sharded, self.copies):
                flat.full.copy_(copy)
        return []

    def keep(self) -> None:
        if not self.copies:
            self.copies = [flat.full.detach().clone() for flat in self.unit.sharded]

    def forget(self) -> None:
        self.copies = []


class Shrinks(StepExtension):
    """Multiplies the master weights after each update."""

    def __init__(self, step: Any):
        self._trainable: Sequence[FlatBuffer] = step.model.trainable

    def update(self, divisor: torch.Tensor | None) -> Sequence[FlatBuffer]:
        for flat in self._trainable:
            master = flat.optimizer_shard.master
            assert master is not None
            master.mul_(SHRINK)
        return ()


def plain(ranks: int, steps: int) -> dict[str, torch.Tensor]:
    model = stack()
    optimizer = plain_sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (squared(model, At(step, 0, rank)) / ranks).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(SHRINK)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_technique_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    def row(config: Any, optimizer: Any) -> dict[str, Any]:
        return {"gathers": KeptWhole, "steps": (Shrinks,)}

    def run(rank: int, model: torch.nn.Module) -> Any:
        config = config_of(stage)
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_module_granularity_threshold": 0,
        }
        engine = start(model, plain_sgd(model), config)
        for step in range(3):
            loss = squared(engine, At(step, 0, rank))
            before = engine.mesh.stats.counts["all_gather"]
            engine.backward(loss)
            gathers = engine.mesh.stats.counts["all_gather"] - before
            engine.step()
        weights = full_weights(engine)
        engine.destroy()
        return weights, gathers

    dense = [gathers for _, gathers in on_ranks(2, run)]
    monkeypatch.setattr(registry, "ROWS", [*registry.ROWS, row])
    wanted = plain(2, 3)
    for (weights, gathers), usual in zip(on_ranks(2, run), dense):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        assert gathers == 0 and (usual > 0) == (stage == 3)

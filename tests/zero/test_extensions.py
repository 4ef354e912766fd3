"""The engine names no technique, and takes one that only this file knows; state that its owner
alone changes.
"""

from __future__ import annotations

import ast
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
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.plans import APART
from tests.helpers.stacks import on_ranks, squared, stack
from tests.helpers.training import At, plain_sgd

PACKAGE = Path(registry.__file__).resolve().parents[1]
ENGINE = PACKAGE / "zero"
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


def test_nodes_of_one_rank_keep_nothing() -> None:
    config = config_of(3)
    config["zero_optimization"]["zero_hpz_partition_size"] = 1
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


def test_a_technique_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(config: Any, optimizer: Any) -> dict[str, Any]:
        return {"gathers": KeptWhole, "steps": (Shrinks,)}

    def run(rank: int, model: torch.nn.Module) -> Any:
        config = config_of(3, zero_optimization={"stage": 3, **APART})
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

    assert all(gathers > 0 for _, gathers in on_ranks(2, run))
    monkeypatch.setattr(registry, "ROWS", [*registry.ROWS, row])
    wanted = plain(2, 3)
    for weights, gathers in on_ranks(2, run):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        assert gathers == 0


OWNERS = {
    "FlatBuffer": "layout/flat_buffer.py",
    "GradientBuffer": "layout/training_state.py",
    "OptimizerShard": "layout/training_state.py",
}


def attributes(path: Path) -> set[str]:
    """What the methods of the owners in ``path`` set on themselves."""
    return {
        node.attr
        for owner in ast.parse(path.read_text()).body
        if isinstance(owner, ast.ClassDef) and owner.name in OWNERS
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node.value) == "self"
    }


def test_no_file_writes_the_state_of_another() -> None:
    """``flat``, ``gradient`` and ``optimizer_shard`` are what the package calls these objects."""
    owners = {ENGINE / path for path in OWNERS.values()}
    own = "|".join(set[str]().union(*map(attributes, owners)))
    place = rf"(?:flat|gradient|optimizer_shard)\.(?:{own})\b"
    assigned = rf"(?<!`)\b(?:\w*_)?{place}(?:, [\w.]+)* *[-+|&^]?=(?!=)"
    write = re.compile(rf"{assigned}|\bdel [\w.]*{place}")
    for line in ("flat.gradient.state = 1", "a_flat.full, x = 1, 2", "del self._flat.full"):
        assert write.search(line)
    assert not write.search("flat.full == flat.gradient.state")
    found = {path for path in PACKAGE.rglob("*.py") if write.search(path.read_text())}
    assert found <= owners

"""Engines on threaded ranks to save and load, and what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.engine import Engine
from hf_zero.zero.layout.wrap import WHOLE
from tests.helpers.engines import start
from tests.helpers.ranks import run_ranks


@dataclass(frozen=True)
class Job:
    """The training of one model, equal on all ranks.

    ``units`` are the modules that are units of their own beside the root's, or else the blocks
    that :func:`hf_zero.zero.layout.wrap.find_units` finds.
    """

    world: int
    stage: int
    units: tuple[str, ...] = ()
    precision: str = "fp32"
    copies: int = 1  # of the shards
    frozen: Callable[[str], bool] = lambda name: False
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = lambda groups: (
        torch.optim.AdamW(groups, lr=1e-3)
    )
    # which of the two optimizer groups
    decays: Callable[[str], bool] = lambda name: "bias" not in name

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
            self.precision
        ]

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "replicate_size": self.copies,
            "zero_optimization": {"stage": self.stage, "stage3_module_granularity_threshold": 0},
        }
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        return config

    def engine(self, module: nn.Module) -> Engine:
        """The engine of this rank over ``module``. Collective."""
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not self.frozen(name))
        for name in self.units:
            setattr(module.get_submodule(name), WHOLE, True)
        optimizer = None
        if self.optimizer is not None:
            trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
            decayed = [p for n, p in trained if self.decays(n)]
            others = [p for n, p in trained if not self.decays(n)]
            optimizer = self.optimizer(
                [
                    {"params": decayed, "weight_decay": 0.1},
                    {"params": others, "weight_decay": 0.0},
                ]
            )
        engine: Engine = start(module, optimizer, self.config)
        return engine


def value(what: str, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Numbers that tell which parameter and which tensor they are from."""
    seed = int.from_bytes(
        hashlib.blake2b(f"{what}:{name}".encode(), digest_size=4).digest(), "little"
    )
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def train_some(engine: Engine, steps: int = 2) -> None:
    """Optimizer steps on batches that depend on the number of the step. Collective."""
    for _ in range(steps):
        ids = torch.arange(4)[:, None] + torch.arange(3) + engine.counters.global_steps
        module = engine.module
        if isinstance(module, nn.Linear):
            loss = engine(value("batch", str(len(ids)), (4, module.in_features))).square().mean()
        elif isinstance(module, Small):
            loss = engine(ids % 11).float().square().mean() * 1e-2
        else:
            loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()


def state_of(engines: Sequence[Engine]) -> dict[str, dict[str, torch.Tensor]]:
    """Whole tensors by parameter and kind ("weights", "exp_avg", …), put together from the
    ranks' shards; empty ones left out.
    """
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for engine in engines:
        for flat in engine.flats:
            master = flat.optimizer_shard.master
            held = {"weights": flat.shard if master is None else master}
            if engine.bound is not None and flat.trainable:
                held |= {
                    kind: tensor
                    for kind, tensor in engine.bound.tensors(flat.optimizer_shard).items()
                    if kind != "master"
                }
            for slot in flat.layout.slots:
                for kind, tensor in held.items() if slot.numel else ():
                    whole.setdefault(slot.name, {}).setdefault(
                        kind, torch.full((slot.numel,), float("nan"), dtype=tensor.dtype)
                    )
            for piece in flat.layout.pieces(*flat.owned):
                at = piece.offset - flat.owned[0]
                for kind, tensor in held.items():
                    whole[piece.name][kind][piece.start : piece.stop] = tensor[at : at + len(piece)]
    return whole


def run(
    job: Job, make: Callable[[], nn.Module], action: Callable[[Engine], Any]
) -> tuple[list[Engine], list[Any]]:
    """Make an engine per rank, call ``action`` on each; return engines and results.

    An exception comes back in the place of a result, so that a test can see that every rank has
    one.
    """
    modules = [make() for _ in range(job.world)]

    def on_rank(rank: int) -> tuple[Engine, Any]:
        engine = job.engine(modules[rank])
        try:
            return engine, action(engine)
        except Exception as error:
            return engine, error

    ended = run_ranks(job.world, on_rank)
    return [engine for engine, _ in ended], [result for _, result in ended]


def good(results: list[Any]) -> list[Any]:
    """The results; the first exception among them is raised."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Normed(nn.BatchNorm1d):
    """BatchNorm's parameters and buffers; its statistics stay as they are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(input, input.shape[-1:], self.weight, self.bias)


class Small(nn.Module):
    """Tied, scalar and empty parameters, odd sizes, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 13)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.norm = Normed(13)
        self.second = nn.Linear(13, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rope", torch.arange(3.0), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[rows, tokens] to [rows * tokens, 11]."""
        hidden = self.first(self.embed(ids).flatten(0, 1))
        hidden = self.second(self.norm(hidden).relu()) * self.scale
        return self.head(hidden + self.empty.sum())


def small() -> nn.Module:
    module = Small()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(value("start", name, parameter.shape))
        module.norm.running_mean.copy_(value("start", "running_mean", (13,)))
    return module


def other() -> nn.Module:
    """The same model with other values, to load into."""
    module = small()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.0)
        module.norm.running_mean.zero_()
    return module

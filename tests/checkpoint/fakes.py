"""Engines without an engine: flats, an optimizer and a module, cut as the stages cut them, for
ranks that are threads.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_zero.core.accumulation import Counters
from hf_zero.core.layout import FlatLayout
from hf_zero.optim.segments import BoundOptimizer

SECONDS = 60.0


class Comm:
    """Object collectives over threads.

    A rank that never arrives breaks the barrier: a test fails and does not hang.
    """

    def __init__(self, world: int) -> None:
        self.world, self._barrier, self._slots = (
            world,
            threading.Barrier(world, timeout=SECONDS),
            [None] * world,
        )
        self._rank = threading.local()

    def enter(self, rank: int) -> None:
        self._rank.value = rank

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._slots[self._rank.value] = obj
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered


@dataclass
class Flat:
    key: str
    layout: FlatLayout
    trainable: bool
    dtype: torch.dtype
    owned: tuple[int, int]
    writes: bool
    master: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    raw: bool = False
    states: Any = None
    unused: frozenset[str] = frozenset()

    @property
    def optimizer_shard(self) -> Flat:
        return self

    def wait_for_update(self) -> None:
        """Nothing updates it."""

    def store_shard(self, values: torch.Tensor) -> None:
        assert self.shard is not None
        self.shard.copy_(values)

    def store_master(self, values: torch.Tensor) -> None:
        assert self.master is not None
        self.master.copy_(values)


class Scaler:
    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = scale

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = state["scale"]


@dataclass
class Engine:
    module: nn.Module
    flats: list[Flat]
    mesh: Comm
    stage: int
    global_rank: int
    world_size: int
    shard_world: int
    param_dtypes: dict[str, str]
    aliases: dict[str, str]
    config: Any
    bound: BoundOptimizer | None = None
    lr_scheduler: Any = None
    scaler: Scaler = field(default_factory=Scaler)
    counters: Counters = field(default_factory=Counters)
    refreshed: int = 0

    def refresh_params(self) -> None:
        self.refreshed += 1


@dataclass(frozen=True)
class Job:
    """How a model is trained: the same on all ranks.

    ``cuts`` are the numbers of parameters in each unit, the rest last.
    """

    world: int
    stage: int
    cuts: tuple[int, ...] = ()
    precision: str = "fp32"
    shard: int = 0  # size of the shard axis; 0 for all ranks
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


def value(what: str, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Numbers that tell which parameter and which tensor they are from."""
    seed = int.from_bytes(
        hashlib.blake2b(f"{what}:{name}".encode(), digest_size=4).digest(), "little"
    )
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def names_of(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Parameters by the first of their names, and the other names."""
    first: dict[int, str] = {}
    held, aliases = {}, {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)], held[name] = name, parameter
    return held, aliases


def build(module: nn.Module, job: Job, rank: int, mesh: Comm) -> Engine:
    """An engine of ``rank`` whose flats hold the values of ``module``."""
    held, aliases = names_of(module)
    names, units = list(held), []
    for cut in (*job.cuts, len(names)):
        units.append(names[:cut])
        names = names[cut:]
    shard_world = job.shard or job.world
    flats: list[Flat] = []
    for index, unit in enumerate(units):
        for trainable in (True, False):
            chosen = [name for name in unit if job.frozen(name) != trainable]
            chosen.sort(key=lambda name: not job.decays(name))
            if chosen:
                flats.append(_flat(f"unit{index}", chosen, held, trainable, job, rank, shard_world))
    engine = Engine(
        module, flats, mesh, job.stage, rank, job.world, shard_world,
        {name: str(p.dtype).removeprefix("torch.") for name, p in held.items()}, aliases,
        SimpleNamespace(precision=job.precision),
    )  # fmt: skip
    if job.optimizer is not None:
        trained = [name for name in held if not job.frozen(name)]
        groups = [{"params": [held[n] for n in trained if job.decays(n)], "weight_decay": 0.1}]
        groups.append(
            {"params": [held[n] for n in trained if not job.decays(n)], "weight_decay": 0.0}
        )
        group_of = {name: 0 if job.decays(name) else 1 for name in trained}
        engine.bound = BoundOptimizer(
            job.optimizer(groups), flats, group_of, {name: held[name] for name in trained}
        )
    return engine


def _flat(
    unit: str,
    names: list[str],
    held: dict[str, nn.Parameter],
    trainable: bool,
    job: Job,
    rank: int,
    shard_world: int,
) -> Flat:
    sharded = job.stage == 3 or (job.stage > 0 and trainable)
    shards = shard_world if sharded else 1
    layout = FlatLayout.build([(name, held[name].shape) for name in names], shards)
    owned = layout.rank_range(rank % shards)
    # Ranks in a replicate group hold the same chunk; the first of them writes it.
    flat = Flat(
        f"{unit}|{'trainable' if trainable else 'frozen'}|{job.precision}",
        layout,
        trainable,
        job.dtype,
        owned,
        rank == rank % shards,
    )
    weights = torch.full((owned[1] - owned[0],), float("nan"))
    for piece in layout.pieces(*owned):
        at = piece.offset - owned[0]
        weights[at : at + len(piece)] = (
            held[piece.name].detach().reshape(-1)[piece.start : piece.stop].float()
        )
    if trainable:
        flat.master, flat.grad = weights, torch.zeros_like(weights)
    else:
        flat.shard = weights.to(job.dtype)
    return flat


def train_some(engine: Engine, steps: int = 2) -> None:
    """Optimizer steps on gradients that depend on nothing but the parameter and the step."""
    assert engine.bound is not None
    for _ in range(steps):
        for flat in engine.flats:
            if flat.grad is None:
                continue
            for piece in flat.layout.pieces(*flat.owned):
                at = piece.offset - flat.owned[0]
                shape = flat.layout.by_name[piece.name].shape
                flat.grad[at : at + len(piece)] = value(
                    f"grad{engine.counters.global_steps}", piece.name, shape
                ).reshape(-1)[piece.start : piece.stop]
        engine.bound.step()
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.step()
        engine.counters.global_steps += 1
        engine.counters.global_samples += 8


def state_of(engines: Sequence[Engine]) -> dict[str, dict[str, torch.Tensor]]:
    """Whole tensors by parameter and kind ("weights", "exp_avg", …), put together from the
    ranks' chunks; empty ones left out.
    """
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for engine in engines:
        for flat in engine.flats:
            held = {"weights": flat.master if flat.master is not None else flat.shard}
            if engine.bound is not None and flat.trainable:
                held |= {
                    kind: tensor
                    for kind, tensor in engine.bound.tensors(flat).items()
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
    """Build an engine per rank, run ``action`` on each in a thread, return engines and what came of
    it.

    An exception comes back in the place of a result, so that a test can see that every rank has
    one.
    """
    mesh = Comm(job.world)
    engines = [build(make(), job, rank, mesh) for rank in range(job.world)]

    def on_rank(engine: Engine) -> Any:
        torch.set_num_threads(1)
        mesh.enter(engine.global_rank)
        try:
            return action(engine)
        except Exception as error:
            return error

    with ThreadPoolExecutor(job.world) as pool:
        return engines, list(pool.map(on_rank, engines))


def good(results: list[Any]) -> list[Any]:
    """The results; the first exception among them is raised."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Small(nn.Module):
    """Tied, scalar and empty parameters, odd sizes, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 13)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(13)
        self.second = nn.Linear(13, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rope", torch.arange(3.0), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(4))


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

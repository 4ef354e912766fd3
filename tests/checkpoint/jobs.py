"""Engines on threaded ranks to save and load, and what they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import checkpoint
from hf_zero.engine import Engine
from hf_zero.errors import CheckpointError
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
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return kinds[self.precision]

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
            decay, rest = {"weight_decay": 0.1}, {"weight_decay": 0.0}
            optimizer = self.optimizer([{"params": decayed, **decay}, {"params": others, **rest}])
        engine: Engine = start(module, optimizer, self.config)
        return engine


ONE, TWO = (Job(world, 3, units=("first",)) for world in (1, 2))
RANK1 = "rank-00001-of-00002.safetensors"


def value(what: str, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Numbers that tell which parameter and which tensor they are from."""
    digest = hashlib.blake2b(f"{what}:{name}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(tuple(shape), generator=generator)


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
    """Whole tensors by parameter and kind ("weights", "exp_avg", …); empty ones left out."""
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for engine in engines:
        for flat in engine.flats:
            master = flat.optimizer_shard.master
            held = {"weights": flat.shard if master is None else master}
            if engine.bound is not None and flat.trainable:
                held |= engine.bound.state.tensors(flat.optimizer_shard)
            held.pop("master", None)
            for slot in flat.layout.slots:
                for kind, tensor in held.items() if slot.numel else ():
                    empty = torch.full((slot.numel,), float("nan"), dtype=tensor.dtype)
                    whole.setdefault(slot.name, {}).setdefault(kind, empty)
            for piece in flat.layout.pieces(*flat.owned):
                at = piece.offset - flat.owned[0]
                for kind, tensor in held.items():
                    whole[piece.name][kind][piece.start : piece.stop] = tensor[at : at + len(piece)]
    return whole


class Failed(AssertionError):
    """The exceptions of ranks, and what the others returned."""

    def __init__(self, results: list[Any], engines: list[Engine]) -> None:
        super().__init__(results)
        self.results, self.engines = results, engines


def run(
    job: Job, make: Callable[[], nn.Module], action: Callable[[Engine], Any]
) -> tuple[list[Engine], list[Any]]:
    """Make an engine per rank, call ``action`` on each; return engines and results.

    Raises :class:`Failed` once every rank has ended, so that a test can see that each has raised.
    """
    modules = [make() for _ in range(job.world)]

    def on_rank(rank: int) -> tuple[Engine, Any]:
        engine = job.engine(modules[rank])
        try:
            return engine, action(engine)
        except Exception as error:
            return engine, error

    engines, results = zip(*run_ranks(job.world, on_rank))
    raised = [result for result in results if isinstance(result, Exception)]
    if raised:
        raise Failed(list(results), list(engines)) from raised[0]
    return list(engines), list(results)


def errors(call: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """What the CheckpointError says that each rank raises."""
    with pytest.raises(Failed) as failed:
        call(*args, **options)
    results = failed.value.results
    assert [type(result) for result in results] == [CheckpointError] * len(results), results
    return [str(result) for result in results]


def fails(parts: Sequence[str], call: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Each rank raises a CheckpointError, and all of them hold all ``parts``."""
    for text in errors(call, *args, **options):
        for part in parts:
            assert part in text, f"{part!r} is not in {text!r}"


def saved(folder: Any, job: Job | None = None, steps: int = 1, **options: Any) -> list[Engine]:
    """Engines that have trained and saved."""

    def action(engine: Engine) -> Any:
        train_some(engine, steps)
        return checkpoint.save(engine, folder, **options)

    return run(job or TWO, small, action)[0]


def load(
    folder: Any, job: Job | None = None, make: Callable[[], nn.Module] | None = None, **options: Any
) -> list[Engine]:
    """Engines of another model that have loaded."""
    action = lambda engine: checkpoint.load(engine, folder, **options)  # noqa: E731
    return run(job or TWO, make or other, action)[0]


def weights(engines: Sequence[Engine]) -> dict[str, torch.Tensor]:
    return {name: kinds["weights"].clone() for name, kinds in state_of(engines).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def names(folder: Any) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def run_holds(folder: Any) -> list[str]:
    """What the folder of a run holds beside ``latest`` and the script, which are there."""
    found = names(folder)
    assert {"latest", "zero_to_fp32.py"} <= {*found}, found
    return [name for name in found if name not in ("latest", "zero_to_fp32.py")]


def edit(path: Any, change: Callable[[dict[str, Any]], Any] | tuple[str, str]) -> None:
    """Change a manifest, as somebody does who knows what the digest is for: its document, or
    the first text in it to the second.
    """
    text = path.read_text()
    document = json.loads(text.replace(*change) if isinstance(change, tuple) else text)
    if not isinstance(change, tuple):
        change(document)
    document.pop("digest", None)
    path.write_text(json.dumps(document))


def flip(path: Any, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


class Harm:
    """Runs when it is unpickled, if anything unpickles it."""

    done: list[str] = []

    def __reduce__(self):
        return Harm.done.append, ("run",)


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


def trained(steps: int) -> Engine:
    engines, _ = run(ONE, small, lambda engine: train_some(engine, steps))
    return engines[0]


def other() -> nn.Module:
    """The same model with other values, to load into."""
    module = small()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.0)
        module.norm.running_mean.zero_()
    return module

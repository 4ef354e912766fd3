"""Random programs of parallel training: a causal model type on a mesh of ranks, which then goes on
from its checkpoint on another mesh; and the same program in one process of plain PyTorch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, NotBuiltError, PartitionError
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers.causal_zoo import VOCAB, model_types, tiny
from tests.helpers.engines import start
from tests.helpers.ranks import RankFailed, run_ranks

Batch = dict[str, torch.Tensor]
ROWS, TOKENS, MICRO = 2, 16, 4  # micro-batches of a step, of all ranks together
STEPS = 2  # before the checkpoint, and after it
REFUSALS = (ConfigError, NotBuiltError, PartitionError)


@dataclass(frozen=True)
class Mesh:
    """The numbers of ranks that share layers, sequences and experts, and of groups that
    read data.
    """

    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    data: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.sequence * self.data

    @property
    def keys(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if self.tensor > 1:
            keys["tensor_parallel"] = {"autotp_size": self.tensor}
        if self.sequence > 1:
            keys["sequence_parallel_size"] = self.sequence
        if self.expert > 1:
            keys["expert_parallel"] = {"enabled": True, "autoep_size": self.expert}
        return keys


MESHES = [
    Mesh(tensor, sequence, expert, data)
    for tensor in (1, 2, 4)
    for sequence in (1, 2, 4)
    for data in (1, 2, 4)
    for expert in (1, 2, 4)
    if 2 <= tensor * sequence * data <= 4 and data * sequence % expert == 0
]


def _plain(ids: torch.Tensor) -> Batch:
    return {"input_ids": ids, "labels": ids}


def _half_labelled(ids: torch.Tensor) -> Batch:
    labels = ids.clone()
    labels[:, : TOKENS // 2 + 3] = -100
    return {"input_ids": ids, "labels": labels}


def _padded(ids: torch.Tensor, place: slice) -> Batch:
    mask = torch.ones_like(ids)
    mask[1, place] = 0
    masked = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    return {**masked, "labels": ids.masked_fill(mask == 0, -100)}


def _packed(ids: torch.Tensor) -> Batch:
    positions = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)])
    return {**_plain(ids), "position_ids": positions.expand_as(ids).contiguous()}


BATCHES: dict[str, Callable[[torch.Tensor], Batch]] = {
    "plain": _plain,
    "half labelled": _half_labelled,
    "padded right": lambda ids: _padded(ids, slice(-5, None)),
    "padded left": lambda ids: _padded(ids, slice(5)),
    "packed": _packed,
}


@cache
def kinds() -> list[str]:
    """Causal model types, in an order of chance that does not change."""
    return random.Random(0).sample(names := sorted(model_types()), len(names))


@dataclass(frozen=True)
class Program:
    """The random choices of one seed. Meshes are tried in turn: some model types do not support
    some.
    """

    seed: int
    kind: str
    meshes: tuple[Mesh, ...]
    stages: tuple[int, int]
    batch: str
    clip: float
    adam: bool
    tied: bool
    evaluates: bool
    generates: int  # tokens of the first reader

    @staticmethod
    def drawn(seed: int) -> Program:
        """Every model type comes once in so many seeds."""
        draw = random.Random(seed)
        meshes = [*draw.sample(MESHES, len(MESHES)), Mesh(data=2)]
        return Program(
            seed,
            kinds()[seed % len(kinds())],
            tuple(meshes),
            (draw.randrange(4), draw.randrange(4)),
            draw.choice(list(BATCHES)),
            draw.choice((0.0, 0.5)),
            draw.random() < 0.25,
            draw.random() < 0.5,
            draw.random() < 0.5,
            draw.choice((0, 0, 3)),
        )

    def model(self) -> Any:
        return tiny(self.kind, **({"tie_word_embeddings": True} if self.tied else {}))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def tokens(self, step: int, micro: int) -> torch.Tensor:
        seed = (self.seed * 101 + step) * MICRO + micro
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCAB - 6, (ROWS, TOKENS), generator=draw)

    def batch_of(self, step: int, micro: int) -> Batch:
        return BATCHES[self.batch](self.tokens(step, micro))

    def generated(self, model: Any, step: int, reader: int) -> list[list[int]]:
        """Return the tokens that ``model`` generates, of another length on each reader."""
        ids = self.tokens(step, reader)[:, :6]
        new = self.generates + reader
        asked = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **asked)
        return made.tolist()  # type: ignore[no-any-return]


@dataclass
class Record:
    """The results of a run: for each step the losses of the micro-batches, the norm, and the
    results of evaluation and generation; and the final weights.
    """

    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[list[float]] = field(default_factory=list)
    generated: list[Any] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def in_one_process(program: Program) -> Record:
    model, found = program.model(), Record()
    optimizer = program.optimizer(model)
    for step in range(2 * STEPS):
        losses = []
        for micro in range(MICRO):
            loss = model(**program.batch_of(step, micro)).loss
            (loss / MICRO).backward()
            losses.append(float(loss.detach()))
        found.losses.append(losses)
        norm = nn.utils.clip_grad_norm_(model.parameters(), program.clip or float("inf"))
        found.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        _look(program, model, step, range(MICRO), found)
    found.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return found


# what some model types cannot do by themselves, the most first
PLAINER: tuple[dict[str, Any], ...] = (
    {},
    {"generates": 0},
    {"generates": 0, "tied": False},
    {"generates": 0, "batch": "plain"},
    {"generates": 0, "batch": "plain", "tied": False},
)


def runnable(program: Program) -> tuple[Program, Record] | None:
    """``program`` without what its model type cannot do in plain PyTorch, and what that gives; None
    where nothing of it can be built tiny, or comes to finite losses.
    """
    for change in PLAINER:
        plainer = replace(program, **change)
        try:
            found = in_one_process(plainer)
        except Exception:  # whatever a model that is new, or odd, raises
            continue
        if all(map(isfinite, sum(found.losses + found.evaluated, [*found.norms]))):
            return plainer, found
    return None


@torch.no_grad()
def _look(program: Program, model: Any, step: int, readers: Any, found: Record) -> None:
    """Evaluate, and generate, in the middle of the training."""
    model.eval()
    if program.evaluates:
        batches = [program.batch_of(step + 50, reader) for reader in readers]
        found.evaluated.append([float(model(**batch).loss) for batch in batches])
    if program.generates and step == STEPS - 1:
        found.generated.append([program.generated(model, step, reader) for reader in readers])
    model.train()


def _on_rank(
    rank: int, program: Program, mesh: Mesh, part: int, models: list[Any], folder: Path
) -> Record:
    readers, reader = mesh.data, rank // (mesh.tensor * mesh.sequence)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO // readers,
        "zero_optimization": {"stage": program.stages[part]},
        **({"gradient_clipping": program.clip} if program.clip else {}),
        **mesh.keys,
    }
    engine = start(models[rank], program.optimizer(models[rank]), config)
    shares = hf_zero.sequence_parallel() if mesh.sequence > 1 else None
    if part:
        engine.load_checkpoint(folder)
    found = Record()
    for step in range(part * STEPS, (part + 1) * STEPS):
        losses = []
        for micro in range(reader, MICRO, readers):
            batch = program.batch_of(step, micro)
            given = shares.shard(batch) if shares else batch
            loss = engine(**given).loss
            if shares:
                loss = shares.mean_loss(loss, given["labels"])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found.losses.append(losses)
        found.norms.append(float(engine.get_global_grad_norm()))
        _look(program, engine.module, step, [reader], found)
    if part:
        found.weights = whole_state_dict(engine, dtype=torch.float32)
    else:
        engine.save_checkpoint(folder)
    engine.destroy()
    return found


def on_ranks(program: Program, folder: Path) -> tuple[list[tuple[Mesh, list[Record]]], list[str]]:
    """The records of the ranks of each of two meshes, the second of which goes on from what the
    first has saved; and which meshes were refused, and why.
    """
    done: list[tuple[Mesh, list[Record]]] = []
    refused, whole = list[str](), program.model()
    left = list(program.meshes)
    while len(done) < 2:
        mesh = left.pop(0) if left else Mesh(data=2)
        if mesh.expert > 1 and not _has_experts(whole):
            continue
        models = [copy.deepcopy(whole) for _ in range(mesh.world)]
        try:
            records = run_ranks(mesh.world, _on_rank, program, mesh, len(done), models, folder)
        except RankFailed as failed:
            if not left or not isinstance(failed.__cause__, REFUSALS):
                raise
            refused.append(f"{program.kind} on {mesh}: {failed.__cause__}")
            continue
        done.append((mesh, records))
    return done, refused


def _has_experts(model: Any) -> bool:
    return bool(getattr(model, "_ep_plan", None) or getattr(model, "ep_plan", None))

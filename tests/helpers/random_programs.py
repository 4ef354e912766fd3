"""Random programs of parallel training: the life of a causal model type on meshes of ranks (steps,
evaluations, saves, loads, other engines), and the same life in one process by the reference engine.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, NotBuiltError, PartitionError
from hf_zero.parallel.tensor import agreement
from hf_zero.parity.reference import Reference
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers.causal_zoo import VOCAB, model_types, tiny
from tests.helpers.engines import start
from tests.helpers.ranks import RankFailed, run_ranks

Batch = dict[str, torch.Tensor]
ROWS, TOKENS, MICRO = 2, 16, 4  # micro-batches of a step, of all ranks together: MICRO or twice so
GENERATED = 3  # tokens, for the first reader
LOSS, NORM, WEIGHTS = 2e-4, 2e-3, 5e-3  # relative; weights: of what the training has changed
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


def _half_labeled(ids: torch.Tensor) -> Batch:
    labels = ids.clone()
    labels[:, : TOKENS // 2 + 3] = -100
    return {"input_ids": ids, "labels": labels}


def _padded(ids: torch.Tensor, place: slice) -> Batch:
    mask = torch.ones_like(ids)
    mask[1, place] = 0
    masked = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    return {**masked, "labels": ids.masked_fill(mask == 0, -100)}


def _packed(ids: torch.Tensor) -> Batch:
    positions = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)]).to(ids.device)
    return {**_plain(ids), "position_ids": positions.expand_as(ids).contiguous()}


BATCHES: dict[str, Callable[[torch.Tensor], Batch]] = {
    "plain": _plain,
    "half labeled": _half_labeled,
    "padded right": lambda ids: _padded(ids, slice(-5, None)),
    "padded left": lambda ids: _padded(ids, slice(5)),
    "packed": _packed,
}


@cache
def kinds() -> list[str]:
    """Causal model types, in an order of chance that does not change."""
    return random.Random(0).sample(names := sorted(model_types()), len(names))


# "start": a new engine, with its stage and micro-batches; "step looked at" evaluates within its
# window, "step written" changes a gradient, evaluates after clipping and changes the rate, "step
# broken" drops all but the last micro-batch of its window and begins anew; "load" goes back to the
# last save, "abandon" does within a window. Without a save neither does anything.
STEPS = ("step", "step looked at", "step written", "step broken")
ACTS = ("start", *STEPS, "evaluate", "generate", "save", "load", "abandon")


@dataclass(frozen=True)
class Act:
    do: str
    stage: int = 0
    micros: int = MICRO


Life = tuple[Act, ...]
Part = list[tuple[int, Act]]  # the acts of one engine, with their numbers in the life


def _life(draw: random.Random, stages: tuple[int, int], evaluates: bool, generates: int) -> Life:
    """Four steps in two or three engines, and what may come after them."""
    acts: list[Act] = []
    steps = draw.choice(((2, 2), (2, 1, 1)))
    for part, count in enumerate(steps):
        stage = stages[part] if part < 2 else draw.randrange(4)
        acts.append(Act("start", stage, MICRO if draw.random() < 0.8 else 2 * MICRO))
        if part:
            acts.append(Act("load"))
        for _ in range(count):
            acts.append(Act(draw.choice(STEPS)))
            acts += [Act(do) for do in draw.choice(((), (), ("save",), ("load",), ("abandon",)))]
        acts += [Act("evaluate")] if evaluates and part < 2 else []
        acts += [Act("generate")] if generates and part == 0 else []
        if part < len(steps) - 1:
            acts.append(Act("save"))
            if draw.random() < 0.25:  # the next engine goes back behind this step
                acts.append(Act("step"))
    return tuple(acts)


@dataclass(frozen=True)
class Program:
    """The random choices of one seed. Meshes are tried in turn: some model types do not support
    some.
    """

    seed: int
    kind: str
    meshes: tuple[Mesh, ...]
    batch: str
    clip: float
    adam: bool
    tied: bool
    life: Life
    device: str = "cpu"
    kernels: str = "off"

    @staticmethod
    def drawn(seed: int) -> Program:
        """Every model type comes once in so many seeds."""
        draw = random.Random(seed)
        meshes = [*draw.sample(MESHES, len(MESHES)), Mesh(data=2)]
        stages = (draw.randrange(4), draw.randrange(4))
        batch, clip = draw.choice(list(BATCHES)), draw.choice((0.0, 0.5))
        adam, tied = draw.random() < 0.25, draw.random() < 0.5
        life = _life(draw, stages, draw.random() < 0.5, draw.choice((0, 0, GENERATED)))
        kind = kinds()[seed % len(kinds())]
        return Program(seed, kind, tuple(meshes), batch, clip, adam, tied, life)

    def __str__(self) -> str:
        acts = [
            f"start(stage {act.stage}, {act.micros} micro-batches)" if act.do == "start" else act.do
            for act in self.life
        ]
        features = f"batch={self.batch!r}, clip={self.clip}, adam={self.adam}, tied={self.tied}"
        mesh = f"the first of {len(self.meshes)} meshes that is supported, {self.meshes[0]}"
        return f"{self.kind} on {mesh}, {features}:\n    {', '.join(acts)}"

    def model(self) -> Any:
        tied = {"tie_word_embeddings": True} if self.tied else {}
        return tiny(self.kind, **tied).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def tokens(self, act: int, micro: int) -> torch.Tensor:
        seed = (self.seed * 101 + act) * 2 * MICRO + micro
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(3, VOCAB - 6, (ROWS, TOKENS), generator=draw).to(self.device)

    def batch_of(self, act: int, micro: int) -> Batch:
        return BATCHES[self.batch](self.tokens(act, micro))

    def generated(self, model: Any, act: int, reader: int) -> list[list[int]]:
        """Return the tokens that ``model`` generates, of another length on each reader."""
        ids, new = self.tokens(act, reader)[:, :6], GENERATED + reader
        asked = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        model.eval()
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **asked)
        model.train()
        return made.tolist()  # type: ignore[no-any-return]

    @torch.no_grad()
    def evaluated(self, model: Any, act: int, readers: Any) -> list[float]:
        model.eval()
        batches = [self.batch_of(act + 50, reader) for reader in readers]
        losses = [float(model(**batch).loss) for batch in batches]
        model.train()
        return losses


@dataclass
class Seen:
    """The results of an act, on a rank or of all readers: losses of the micro-batches, the norm of
    the gradient, losses of an evaluation and generated tokens by reader.
    """

    losses: list[float] = field(default_factory=list)
    norm: float = 0.0
    evaluated: list[float] = field(default_factory=list)
    generated: list[Any] = field(default_factory=list)


@dataclass
class Record:
    """The results of all acts, and the weights at the end."""

    acts: list[Seen] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def slow_down(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


class Alone:
    """The life of a program in one process, by the reference engine."""

    def __init__(self, program: Program, noise: float) -> None:
        self.program, self.noise = program, noise
        self.saved: Any = None

    @torch.no_grad()
    def start(self, act: Act) -> None:
        self.model, self.micros = self.program.model(), act.micros
        draw = torch.Generator(self.program.device).manual_seed(self.program.seed)
        for parameter in self.model.parameters() if self.noise else ():
            drawn = torch.randn(parameter.shape, generator=draw, device=parameter.device)
            parameter.mul_(1 + self.noise * drawn)
        self.optimizer = self.program.optimizer(self.model)
        sizes = {"gradient_accumulation_steps": self.micros}
        config = ZeroConfig(stage=0, gradient_clipping=self.program.clip or 0.0, **sizes)
        self.engine = Reference(self.model, self.optimizer, config.resolve(1))

    def window(self, number: int, seen: Seen) -> None:
        """The micro-batches of a window, without the step that ends it."""
        for micro in range(self.micros):
            loss = self.engine(**self.program.batch_of(number, micro)).loss
            self.engine.backward(loss)
            seen.losses.append(float(loss.detach()))
            if micro + 1 < self.micros:
                self.engine.step()

    def load(self) -> None:
        self.engine.zero_grad()
        if self.saved is not None:
            weights, state = copy.deepcopy(self.saved)
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)

    def does(self, act: Act, number: int) -> Seen:
        seen, program = Seen(), self.program
        if act.do == "start":
            self.start(act)
        elif act.do == "save":
            state = self.model.state_dict(), self.optimizer.state_dict()
            self.saved = copy.deepcopy(state)
        elif act.do == "load":
            self.load()
        elif act.do == "abandon" and self.saved is not None:
            self.window(number, seen)
            self.load()
        elif act.do.startswith("step"):
            self.window(number, seen)
            if act.do == "step written":
                self.model.get_input_embeddings().weight.grad.mul_(0.5)
            if act.do in ("step looked at", "step written"):
                seen.evaluated = program.evaluated(self.model, number, range(MICRO))
            if act.do == "step written":
                slow_down(self.optimizer)
            self.engine.step()
            seen.norm = self.engine.get_global_grad_norm()
        elif act.do == "evaluate":
            seen.evaluated = program.evaluated(self.model, number, range(MICRO))
        elif act.do == "generate":
            readers = range(MICRO)
            seen.generated = [program.generated(self.model, number, each) for each in readers]
        return seen


def in_one_process(program: Program, noise: float = 0.0) -> Record:
    """``noise``: relative, of the first weights."""
    alone = Alone(program, noise)
    found = Record([alone.does(act, number) for number, act in enumerate(program.life)])
    found.weights = {name: value.clone() for name, value in alone.model.state_dict().items()}
    return found


def _without(life: Life, do: str) -> Life:
    return tuple(act for act in life if act.do != do)


def runnable(program: Program) -> tuple[Program, Record] | None:
    """``program`` without what its model type cannot do in plain PyTorch, and what that gives; None
    where nothing of it can be built tiny, or comes to finite losses.
    """
    silent = {"life": _without(program.life, "generate")}
    plainer: tuple[dict[str, Any], ...] = (
        {},
        silent,
        {**silent, "tied": False},
        {**silent, "batch": "plain"},
        {**silent, "batch": "plain", "tied": False},
    )
    for change in plainer:
        changed = replace(program, **change)
        try:
            found = in_one_process(changed)
        except Exception:  # whatever a model that is new, or odd, raises
            continue
        if all(isfinite(sum([*seen.losses, *seen.evaluated, seen.norm])) for seen in found.acts):
            return changed, found
    return None


class OnRank:
    """A part of the life of a program, in one engine, on one rank."""

    def __init__(self, program: Program, mesh: Mesh, rank: int, model: Any, folder: Path) -> None:
        self.program, self.mesh, self.folder, self.model = program, mesh, folder, model
        self.reader = rank // (mesh.tensor * mesh.sequence)
        self.saved = (folder / "latest").exists()

    def start(self, act: Act) -> None:
        self.mine = range(self.reader, act.micros, self.mesh.data)
        names_limit = self.program.clip or self.program.seed % 2  # 0 and no key are one
        clipping = {"gradient_clipping": self.program.clip} if names_limit else {}
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": len(self.mine),
            "zero_optimization": {"stage": act.stage},
            "kernels": self.program.kernels,
            **clipping,
            **self.mesh.keys,
        }
        self.engine = start(self.model, self.program.optimizer(self.model), config)
        self.shares = hf_zero.sequence_parallel() if self.mesh.sequence > 1 else None

    def window(self, number: int, seen: Seen, micros: Any, do: str = "step") -> None:
        for at, micro in enumerate(micros):
            batch = self.program.batch_of(number, micro)
            given = self.shares.shard(batch) if self.shares else batch
            loss = self.engine(**given).loss
            if self.shares:
                loss = self.shares.mean_loss(loss, given["labels"])
            self.engine.backward(loss)
            if do == "step looked at" and at == 0:
                self.look(number, seen)
            if do == "step written" and at == len(micros) - 1:
                self.write(number, seen)
            self.engine.step()
            seen.losses.append(float(loss.detach()))

    def write(self, number: int, seen: Seen) -> None:
        """Halve a gradient, clip, evaluate and change the rate before the step."""
        embedding = self.model.get_input_embeddings().weight
        gradient = hf_zero.safe_get_full_grad(embedding)
        assert gradient is not None
        hf_zero.safe_set_full_grad(embedding, gradient * 0.5)
        if self.program.clip:
            self.engine.clip_gradient(self.program.clip)
        self.look(number, seen)
        slow_down(self.engine.optimizer)

    def look(self, number: int, seen: Seen) -> None:
        seen.evaluated = self.program.evaluated(self.engine.module, number, [self.reader])

    def does(self, act: Act, number: int) -> Seen:
        seen = Seen()
        if act.do == "start":
            self.start(act)
        elif act.do == "save":
            self.engine.save_checkpoint(self.folder)
            self.saved = True
        elif act.do == "load" and self.saved:
            self.engine.load_checkpoint(self.folder)
        elif act.do == "abandon" and self.saved:
            if len(self.mine) > 1:
                self.window(number, seen, self.mine[:1])
            self.engine.load_checkpoint(self.folder)
        elif act.do.startswith("step"):
            if act.do == "step broken":
                self.window(number, Seen(), self.mine[: len(self.mine) - 1])
                self.engine.zero_grad()
            self.window(number, seen, self.mine, act.do)
            seen.norm = float(self.engine.get_global_grad_norm())
        elif act.do == "evaluate":
            self.look(number, seen)
        elif act.do == "generate":
            seen.generated = [self.program.generated(self.engine.module, number, self.reader)]
        return seen


class MeshRefused(Exception):
    """The start of an engine has refused a mesh."""


def _on_rank(rank: int, program: Program, mesh: Mesh, part: Part, models: Any, folder: Path) -> Any:
    on_rank, record = OnRank(program, mesh, rank, models[rank], folder), Record()
    for number, act in part:
        try:
            record.acts.append(on_rank.does(act, number))
        except REFUSALS as error:
            if act.do == "start":
                raise MeshRefused from error
            raise
    if part[-1][0] == len(program.life) - 1:
        record.weights = whole_state_dict(on_rank.engine, dtype=torch.float32)
    on_rank.engine.destroy()
    return record


def parts_of(life: Life) -> list[Part]:
    parts: list[Part] = []
    for number, act in enumerate(life):
        if act.do == "start":
            parts.append([])
        parts[-1].append((number, act))
    return parts


def on_ranks(
    program: Program, folder: Path, run: Callable[..., list[Record]] = run_ranks
) -> list[tuple[Mesh, Part, list[Record]]]:
    """The records of the ranks of each engine, on the next mesh that the model type supports."""
    done: list[tuple[Mesh, Part, list[Record]]] = []
    parts, whole, left = parts_of(program.life), program.model(), list(program.meshes)
    while len(done) < len(parts):
        mesh, part = left.pop(0) if left else Mesh(data=2), parts[len(done)]
        if mesh.expert > 1 and not _has_experts(whole):
            continue
        if mesh.sequence > 1 and program.batch == "padded left":  # refused with the batch
            continue
        models = [copy.deepcopy(whole) for _ in range(mesh.world)]
        try:
            with _generators_of_their_own(run):
                records = run(mesh.world, _on_rank, program, mesh, part, models, folder)
        except RankFailed as failed:
            if not left or not isinstance(failed.__cause__, MeshRefused):
                raise
            continue
        done.append((mesh, part, records))
    return done


@contextmanager
def _generators_of_their_own(run: Callable[..., list[Record]]) -> Iterator[None]:
    """Let ranks that are threads compare a state that stays: they share one generator, from which
    another rank may draw (Phi-MoE does) between the comparison and the end of a forward.
    """
    state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        if run is run_ranks:
            patch.setattr(agreement, "generator_states", lambda device: [state])
        yield


def _has_experts(model: Any) -> bool:
    return bool(getattr(model, "_ep_plan", None) or getattr(model, "ep_plan", None))


def _compare(seen: Seen, want: Seen, readers: slice, mesh: Mesh, where: str) -> None:
    losses = want.losses[readers.start :: mesh.data][: len(seen.losses)]
    assert seen.losses == pytest.approx(losses, rel=LOSS), where
    assert seen.norm == pytest.approx(want.norm, rel=NORM), where
    assert seen.evaluated == pytest.approx(want.evaluated[readers], rel=LOSS), where
    assert seen.generated == want.generated[readers], where


def _compare_weight(name: str, got: Record, want: Record, changes: dict[str, float]) -> None:
    """``changes``: by the training, of each weight."""
    total = sum(change**2 for change in changes.values()) ** 0.5
    error = float((got.weights[name].float().cpu() - want.weights[name].float().cpu()).norm())
    limit = WEIGHTS * changes[name] + 1e-3 * WEIGHTS * total + 1e-6
    assert error <= limit, (name, error, changes[name])


def check(
    program: Program,
    want: Record,
    folder: Path,
    run: Callable[..., list[Record]] = run_ranks,
) -> tuple[list[Mesh], set[int | str]]:
    """Compare the life of ``program`` on ranks with ``want``, act by act, and the weights.

    Returns:
        The meshes of the engines, and the acts and weights that differ, all of which rounding alone
        changes in one process, too.
    """
    done = on_ranks(program, folder, run)
    errors = _differences(program, want, done)
    rounded: set[int | str] = set()
    if errors:
        noisy = (Mesh(), [*enumerate(program.life)], [in_one_process(program, noise=1e-7)])
        rounded = {*_differences(program, want, [noisy], alone=True)}
    for what, error in errors.items():
        if what not in rounded:
            raise error
    return [mesh for mesh, *_ in done], {*errors}


def _differences(
    program: Program, want: Record, done: list[tuple[Mesh, Part, list[Record]]], alone: bool = False
) -> dict[int | str, AssertionError]:
    """The first error of each act, by its number, and of each weight. ``alone``: one process has
    the evaluations and tokens of all readers.
    """
    found: dict[int | str, AssertionError] = {}

    def note(what: int | str, compare: Callable[..., None], *given: Any) -> None:
        try:
            compare(*given)
        except AssertionError as error:
            found.setdefault(what, error)

    for mesh, part, ranks in done:
        for rank, record in enumerate(ranks):
            reader = rank // (mesh.tensor * mesh.sequence)
            readers = slice(reader, None if alone else reader + 1)
            for (number, act), seen in zip(part, record.acts, strict=True):
                where = f"rank {rank} of {mesh}, act {number}: {act.do}"
                note(number, _compare, seen, want.acts[number], readers, mesh, where)
    begun = program.model().state_dict()
    changes = {
        name: float((want.weights[name].float() - begun[name].float()).norm()) for name in begun
    }
    for record in done[-1][2]:
        for name in changes if record.weights else ():
            note(name, _compare_weight, name, record, want, changes)
    return found

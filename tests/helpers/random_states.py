"""Random lives of training state: a small model of odd sizes, an optimizer and what a script does
to both between steps, on ranks and in one process by the reference engine.
"""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.optim import Adam8bit, AdamW8bit, Lion8bit, SGD8bit
from hf_zero.parity.driven_reference import DrivenReference
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import seeded
from tests.helpers.offloads import DEVICE, WAYS, offload, stages_of
from tests.helpers.oracle import total_norm
from tests.helpers.stacks import on_ranks

ROWS, WIDTH = 12, 50  # of a micro-batch of all ranks together: a multiple of each world
# of the losses, and of the length of the way that all weights have moved. A norm that differs in
# its last bit can change a code of 8 bits; several ranks sum micro-batches in bf16 in another order
LOSS, WEIGHTS, CLIPPED_8_BITS, IN_BF16 = 1e-5, 1e-4, 1e-3, 3e-2

Optimizer = torch.optim.Optimizer
Groups = list[dict[str, Any]]
Run = Callable[..., list[Any]]  # as on_ranks: of the world, a function of rank and model, and more
OPTIMIZERS: dict[str, Callable[[Groups], Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, 1e-3, eps=1e-4),
    "Adam amsgrad": lambda groups: torch.optim.Adam(groups, 1e-3, eps=1e-4, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, 0.05),
    "SGD nesterov": lambda groups: torch.optim.SGD(groups, 0.02, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, 1e-3, 0.9, 1e-3, momentum=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, 1e-2, eps=1e-4),
    "NAdam": lambda groups: torch.optim.NAdam(groups, 1e-3, eps=1e-4),
    "AdamW8bit": lambda groups: AdamW8bit(groups, lr=1e-3),
    "Adam8bit": lambda groups: Adam8bit(groups, lr=1e-3),
    "Lion8bit": lambda groups: Lion8bit(groups, lr=1e-4),
    "SGD8bit": lambda groups: SGD8bit(groups, lr=1e-2, momentum=0.9),
}
ON_HOST = {"AdamW", "SGD", "SGD nesterov", "Adagrad"}  # of torch's, those that offload has
WEIGHTS_IN_16, STATES_IN_16 = "bf16_master_weights_and_grads", "bf16_optimizer_states"
IN_16_BITS = (
    "enabled",
    f"enabled {WEIGHTS_IN_16}",
    f"enabled {STATES_IN_16}",
    f"enabled {WEIGHTS_IN_16} {STATES_IN_16}",
)
# "start": a new engine, often on other ranks; the others are what a script does between steps.
ACTS = (
    *("start", "step", "step of two", "skipped", "write", "write all", "set state"),
    *("freeze", "thaw", "rate", "own state", "own weights", "save", "load"),
    *("step written", "step twice", "step broken", "step hooked", "write equal", "zeros"),
)
PLAIN = ("step",) * 6 + ("step of two",) * 2 + ACTS[3:]
EXPERTS = 8  # of a mixture: rows of a step leave some out


@dataclass(frozen=True)
class Act:
    do: str
    which: int = 0  # of the layers
    world: int = 1
    stage: int = 0
    place: str = DEVICE


@dataclass(frozen=True)
class Life:
    """The random choices of one seed."""

    seed: int
    optimizer: str
    widths: tuple[int, ...]
    decays: bool  # matrices in one group, the rest in another
    tied: bool
    clip: float
    bf16: str  # its keys: none, masters in fp32, weights or moments or both in bf16 alone
    acts: tuple[Act, ...]
    parametrized: bool = False  # a layer whose weight is computed from its parameter
    in_backward: bool = False  # updates in the backward
    experts: int = 0  # each used by the rows that chance routes there

    @staticmethod
    def drawn(seed: int) -> Life:
        draw = random.Random(seed)
        optimizer = draw.choice(list(OPTIMIZERS))
        widths = tuple(draw.choice((50, 64, 82, 90)) for _ in range(draw.randint(2, 4)))
        acts: list[Act] = []
        for part in range(draw.randint(2, 3)):
            places = WAYS if optimizer in ON_HOST or "8bit" in optimizer else (DEVICE,)
            place = draw.choice((DEVICE, DEVICE, *places))
            stage = draw.choice(stages_of(place))
            acts.append(Act("start", world=draw.choice((1, 2, 2, 3, 4)), stage=stage, place=place))
            acts += [Act("load")] if part else []
            count = draw.randint(3, 8)
            # docs/optimizers.md: state in files cannot be written by way of the groups
            plain = [act for act in PLAIN if act != "step hooked" or "files" not in place]
            acts += [Act(draw.choice(plain), draw.randrange(len(widths))) for _ in range(count)]
            acts += [Act("step"), Act("save")]
        decays, tied = draw.random() < 0.5, draw.random() < 0.3
        clip, bf16 = draw.choice((0.0, 0.0, 0.05)), draw.choice((*("",) * 6, *IN_16_BITS))
        if "states" in bf16 and optimizer not in ("AdamW", "SGD nesterov"):
            bf16 = "enabled"
        if bf16 or "8bit" in optimizer:  # the mean over three ranks of equal numbers is rounded
            acts = [replace(act, world=4) if act.world == 3 else act for act in acts]
        parametrized = draw.random() < 0.3
        in_backward, experts = draw.random() < 0.3, draw.choice((0, 0, EXPERTS))
        if in_backward and not clip:  # docs/offload.md: what acts on the step is refused before it
            written = "step written"
            acts = [replace(a, do="step of two") if a.do == written else a for a in acts]
        chosen = (seed, optimizer, widths, decays, tied, clip, bf16)
        return Life(*chosen, tuple(acts[:-1]), parametrized, in_backward, experts)

    def on(self, world: int) -> Life:
        """Return the same life on ``world`` ranks throughout."""
        return replace(self, acts=tuple(replace(act, world=world) for act in self.acts))

    @property
    def exact(self) -> bool:
        """Whether all ranks have the same rows: a gradient that differs in its last bit can change
        a code of 8 bits, or a weight in bf16, by one.
        """
        return self.in_8_bits or bool(self.bf16)

    @property
    def in_8_bits(self) -> bool:
        return "8bit" in self.optimizer

    @property
    def limit(self) -> float:
        if self.bf16:
            return IN_BF16
        return CLIPPED_8_BITS if self.in_8_bits and self.clip else WEIGHTS

    def model(self) -> Net:
        widths = (WIDTH, *self.widths)
        kinds = self.tied, self.parametrized, self.experts
        return seeded(lambda: Net(widths, *kinds))  # type: ignore[return-value]

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        parameters = list(model.parameters())
        if not self.decays:
            return OPTIMIZERS[self.optimizer]([{"params": parameters}])
        matrices = [p for p in parameters if p.dim() > 1]
        rest = [p for p in parameters if p.dim() < 2]
        groups = [{"params": rest, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
        return OPTIMIZERS[self.optimizer](groups)

    def rows(self, number: int, micro: int, rank: int = 0, world: int = 0) -> torch.Tensor:
        draw = torch.Generator().manual_seed((self.seed * 101 + number) * 2 + micro)
        rows = torch.randn(ROWS, WIDTH, generator=draw)
        rows = rows.bfloat16() if self.bf16 and world else rows
        return rows if self.exact else rows[rank :: world or 1]


class Counted(nn.Module):
    """A parametrization that counts its calls: each forward makes one."""

    calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight * 0.9


class Net(nn.Module):
    """Linear layers of ``widths``, a mixture of ``experts``, a scalar parameter, and one that no
    forward uses. A buffer has the sum of the rows that this rank has seen, which differs between
    ranks.
    """

    breaks = False  # in the next forward

    def __init__(
        self, widths: tuple[int, ...], tied: bool, parametrized: bool = False, experts: int = 0
    ) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(widths[0]), persistent=False)
        self.count = Counted()
        self.last: nn.Module = nn.Identity()
        if parametrized:
            self.last = nn.Linear(widths[-1], widths[-1])
            register_parametrization(self.last, "weight", self.count)
            self.count.calls = 0
        pairs = list(itertools.pairwise(widths))
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(7))
        self.experts = nn.ModuleList(nn.Linear(widths[-1], widths[-1]) for _ in range(experts))
        if tied:
            for layer, later in zip(self.layers, list(self.layers)[1:]):
                if later.weight.shape == layer.weight.shape:
                    later.weight = layer.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += rows.detach().to(self.seen.dtype).sum(0)
        routed = (rows[:, 0].float() * 1000).long() % max(len(self.experts), 1)
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
            if self.breaks:
                self.breaks = False
                raise ArithmeticError("a forward that a script catches")
        mixed = rows
        for number, expert in enumerate(self.experts):
            (own,) = torch.where(routed == number)
            if len(own):
                mixed = mixed.index_add(0, own, expert(rows[own]))
        return self.last(mixed) * self.scale  # type: ignore[no-any-return]


@dataclass
class Seen:
    losses: list[list[float]] = field(default_factory=list)  # of each step, by micro-batch
    halved: list[tuple[int, int]] = field(default_factory=list)  # number of the act, dimensions
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    # of each engine: the buffer at its end, and the calls of the parametrization
    buffers: list[torch.Tensor] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def end(self, model: Net) -> None:
        """Record the end of an engine."""
        self.buffers.append(model.seen.detach().float().cpu().clone())
        self.calls.append(model.count.calls)


class Alone:
    """A life in one process, by the reference engine. The subclass has an engine in its place."""

    def __init__(self, life: Life, device: str) -> None:
        self.life, self.device, self.saved = life, device, None
        self.seen = Seen()
        self.model: Any = None
        self.frozen: set[int] = set()

    def start(self, act: Act) -> None:
        if self.model is not None:
            self.seen.end(self.model)
        self.model = self.life.model().to(self.device)
        self.freeze_again()
        self.optimizer: Any = self.life.optimizer_of(self.model)
        settings = ZeroConfig(stage=0, gradient_clipping=self.life.clip).resolve(1)
        self.engine: Any = DrivenReference(self.model, self.optimizer, settings)

    def rows(self, number: int, micro: int) -> torch.Tensor:
        return self.life.rows(number, micro).to(self.device)

    def freeze_again(self) -> None:
        for which, layer in enumerate(self.model.layers):
            layer.bias.requires_grad_(which not in self.frozen)

    def window(self, number: int, micros: int, written: Any = None) -> None:
        """``written``: the layer that is written between the last backward and the step."""
        self.engine.set_batches(ROWS, micros)
        losses = []
        for micro in range(micros):
            loss = self.engine(self.rows(number, micro)).float().pow(2).mean()
            self.engine.backward(loss)
            losses.append(float(loss.detach()))
            if micro == micros - 1 and written is not None:
                losses.append(self.between(written, number))
            self.engine.step()
        self.seen.losses.append(losses)

    def between(self, written: Any, number: int) -> float:
        if written.bias.requires_grad:
            gradient = hf_zero.safe_get_full_grad(written.bias)
            assert gradient is not None
            hf_zero.safe_set_full_grad(written.bias, gradient * 0.5)
        if self.life.clip:
            self.engine.clip_gradient(self.life.clip * 0.5)
        return self.after_clipping(written, number)

    def skipped(self, number: int) -> None:
        """A backward whose gradients are dropped."""
        self.engine.set_batches(ROWS, 2)
        self.engine.backward(self.engine(self.rows(number, 0)).pow(2).mean())
        self.engine.zero_grad()

    @torch.no_grad()
    def after_clipping(self, layer: Any, number: int) -> float:
        """Change settings and weights, and return the loss of a metric before that."""
        loss = float(self.model(self.rows(number, 1)).float().pow(2).mean())
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        with self.whole(layer.bias):
            layer.bias.mul_(0.99)
        return loss

    def broken(self, number: int) -> None:
        """A window whose second forward raises."""
        self.engine.set_batches(ROWS, 2)
        self.engine.backward(self.engine(self.rows(number, 0)).float().pow(2).mean())
        self.engine.step()
        self.model.breaks = True
        with pytest.raises(ArithmeticError):
            self.engine(self.rows(number, 1))
        self.engine.zero_grad()

    @contextmanager
    def whole(self, parameter: Any, modifier: int | None = 0) -> Iterator[None]:
        yield

    def hooked(self, number: int) -> None:
        """A step whose hooks load the state that is there, and decay all members of the groups."""
        optimizer = self.optimizer

        def load(*_: object) -> None:
            if self.life.bf16 in ("", "enabled"):  # refused where bf16 state is stepped in fp32
                optimizer.load_state_dict(optimizer.state_dict())

        before = optimizer.register_step_pre_hook(load)
        after = optimizer.register_step_post_hook(lambda *_: self.decay())
        self.window(number, 1)
        before.remove()
        after.remove()

    @torch.no_grad()
    def decay(self) -> None:
        for group in self.optimizer.param_groups:
            for member in group["params"]:
                member.mul_(0.99)

    def halve(self, layer: Any, number: int) -> None:
        """Halve the first moments of ``layer`` that are there, in fp32."""
        for parameter in () if self.life.exact else (layer.weight, layer.bias):
            state = self.optimizer.state.get(parameter, {})
            if "exp_avg" in state:
                state["exp_avg"].mul_(0.5)
                self.seen.halved.append((number, parameter.dim()))

    def save(self) -> None:
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self) -> None:
        if self.saved is not None:
            weights, state = copy.deepcopy(self.saved)
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)

    def does(self, act: Act, number: int) -> None:
        layer = self.model.layers[act.which] if self.model is not None else None
        match act.do:
            case "start":
                self.start(act)
            case "step" | "step of two":
                self.window(number, 1 + (act.do != "step"))
            case "step written":
                self.window(number, 2, layer)
            case "step twice":
                self.window(number, 1)
                self.engine.step()  # without a backward: in torch there is no gradient left
            case "step broken":
                self.broken(number)
                self.window(number, 2)
            case "step hooked":
                self.hooked(number)
            case "skipped":
                self.skipped(number)
            case "zeros":
                self.engine.zero_grad(set_to_none=False)
            case "write" | "write all" | "write equal":
                written = list(self.model.parameters()) if act.do == "write all" else [layer.bias]
                for parameter in written:
                    modifier = None if act.do == "write equal" else 0
                    with self.whole(parameter, modifier), torch.no_grad():
                        parameter.mul_(1.01).add_(0.001)
            case "set state":
                self.halve(layer, number)
            case "freeze" | "thaw":
                (self.frozen.add if act.do == "freeze" else self.frozen.discard)(act.which)
                self.freeze_again()
            case "rate":
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.7
            case "own state":
                self.optimizer.load_state_dict(self.optimizer.state_dict())
            case "own weights":
                self.model.load_state_dict(self.model.state_dict())
            case "save":
                self.save()
            case "load":
                self.load()


def in_one_process(life: Life, device: str = "cpu") -> Seen:
    alone = Alone(life, device)
    for number, act in enumerate(life.acts):
        alone.does(act, number)
    alone.seen.weights = {n: p.detach().cpu() for n, p in alone.model.named_parameters()}
    alone.seen.end(alone.model)
    return alone.seen


class OnRank(Alone):
    """A part of a life, in one engine, on one rank."""

    def __init__(
        self, life: Life, rank: int, model: Net, folder: Path, frozen: set[int], want: Seen
    ) -> None:
        super().__init__(life, "")
        self.rank, self.built, self.folder = rank, model, folder
        self.frozen, self.halved = set(frozen), want.halved
        self.saved = (folder / "latest").exists() or None

    def start(self, act: Act) -> None:
        self.world, self.model = act.world, self.built
        self.freeze_again()
        self.never_trained = [p for p in self.model.parameters() if not p.requires_grad]
        more = {"stage3_param_persistence_threshold": 100} if act.stage == 3 else {}
        self.folder.mkdir(exist_ok=True)
        section = offload(act.place, act.stage, self.folder) | more
        section["update_in_backward"] = self.life.in_backward
        config = config_of(act.stage, zero_optimization=section, gradient_clipping=self.life.clip)
        config["bf16"] = dict.fromkeys(self.life.bf16.split(), True)
        self.engine = start(self.model, self.life.optimizer_of(self.model), config)
        self.optimizer = self.engine.optimizer

    def rows(self, number: int, micro: int) -> torch.Tensor:
        rows = self.life.rows(number, micro, self.rank, self.world)
        return rows.to(self.engine.device)

    def window(self, number: int, micros: int, written: Any = None) -> None:
        self.never_trained = [p for p in self.never_trained if not p.requires_grad]
        super().window(number, micros, written)

    @contextmanager
    def whole(self, parameter: Any, modifier: int | None = 0) -> Iterator[None]:
        with hf_zero.GatheredParameters([parameter], modifier_rank=modifier):
            yield

    def decay(self) -> None:
        with hf_zero.GatheredParameters(self.never_trained, modifier_rank=0):
            super().decay()

    def halve(self, layer: Any, number: int) -> None:
        for parameter in (layer.weight, layer.bias):
            if (number, parameter.dim()) in self.halved:
                value = hf_zero.safe_get_full_optimizer_state(parameter, "exp_avg")
                assert value is not None
                hf_zero.safe_set_full_optimizer_state(parameter, value * 0.5, "exp_avg")

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder)
        self.saved = True  # type: ignore[assignment]

    def load(self) -> None:
        if self.saved:  # docs/loop.md: the state of what is frozen at a load is dropped
            for layer in self.model.layers:
                layer.bias.requires_grad_(True)
            self.engine.load_checkpoint(self.folder)
            self.never_trained = []
            self.freeze_again()


def _part(rank: int, model: Any, life: Life, part: list[tuple[int, Act]], *known: Any) -> OnRank:
    on_rank = OnRank(life, rank, model, *known)
    for number, act in part:
        on_rank.does(act, number)
    on_rank.seen.weights = {n: value.cpu() for n, value in full_weights(on_rank.engine).items()}
    on_rank.seen.end(on_rank.model)
    on_rank.engine.destroy()
    return on_rank


def on_engines(life: Life, folder: Path, halved: Seen, run: Run = on_ranks) -> Seen:
    """Return the losses, averaged over ranks, and the weights of ``life`` on its ranks."""
    parts: list[list[tuple[int, Act]]] = []
    for number, act in enumerate(life.acts):
        if act.do == "start":
            parts.append([])
        parts[-1].append((number, act))
    seen, frozen = Seen(), set[int]()
    for part in parts:
        world = part[0][1].world
        ranks = run(world, _part, life, part, folder, frozen, halved, build=life.model)
        frozen, seen.weights = ranks[0].frozen, ranks[0].seen.weights
        for step in range(len(ranks[0].seen.losses)):
            of_ranks = torch.tensor([rank.seen.losses[step] for rank in ranks])
            seen.losses.append(of_ranks.mean(0).tolist())
        buffers = torch.stack([rank.seen.buffers[-1] for rank in ranks])
        seen.buffers.append(buffers.mean(0) if life.exact else buffers.sum(0))
        assert len({rank.seen.calls[-1] for rank in ranks}) == 1
        seen.calls.append(ranks[0].seen.calls[-1])
    return seen


def check(life: Life, folder: Path, run: Run = on_ranks, device: str = "cpu") -> None:
    """Compare ``life`` on ranks with the same in one process, in bf16 with an engine of one rank
    at stage 0: the losses of each step, and the weights at the end.
    """
    want = in_one_process(life, device)
    if life.bf16:
        halved, alone = want, [replace(a, world=1, stage=0, place=DEVICE) for a in life.acts]
        want = on_engines(replace(life, acts=tuple(alone)), folder / "alone", halved, run)
    got = on_engines(life, folder / "ranks", want if not life.bf16 else halved, run)
    for step, (losses, expected) in enumerate(zip(got.losses, want.losses, strict=True)):
        limit = life.limit if life.exact else LOSS
        near = [abs(a - b) < limit * abs(b) for a, b in zip(losses, expected, strict=True)]
        assert all(near), f"loss of step {step}: {losses}, alone {expected}"
    for buffer, expected in zip(got.buffers, want.buffers, strict=True):
        assert torch.allclose(buffer, expected, rtol=1e-3, atol=1e-2), "the buffers of the ranks"
    assert got.calls == want.calls, f"calls of a parametrization: {got.calls}, alone {want.calls}"
    begun = {name: p.detach() for name, p in life.model().named_parameters()}
    moved = total_norm(
        {name: value.view_as(begun[name]) - begun[name] for name, value in want.weights.items()}
    )
    for name, value in want.weights.items():
        off = float((got.weights[name].view_as(value) - value).norm())
        assert off <= life.limit * moved, f"{name} is off by {off:.3g} of {moved:.3g}"


def fails(life: Life, run: Run = on_ranks, device: str = "cpu") -> str:
    """Return the error of ``life``, or "" where it is as in one process."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(life, Path(folder), run, device)
        except Exception as error:  # of an engine as of a comparison
            return f"{type(error).__name__}: {error}"
    return ""


def shrunk(life: Life) -> Life:
    """Return ``life`` with as few acts, and as plain ones, as it still fails with."""
    number = len(life.acts) - 1
    while number > 0:
        act = life.acts[number]
        simpler = [(), *((replace(act, **one),) for one in ({"place": DEVICE}, {"world": 1}))]
        for instead in simpler if act.do != "start" or number else simpler[1:]:
            acts = (*life.acts[:number], *instead, *life.acts[number + 1 :])
            if acts != life.acts and fails(shorter := replace(life, acts=acts)):
                life = shorter
                break
        number -= 1
    return life

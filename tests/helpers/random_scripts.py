"""What :mod:`tests.helpers.random_loops` draws: models, optimizers beside plain ones, schedules,
and scripts with what they read and write at each point of a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.checkpoint import checkpoint

from hf_zero import optim
from tests.helpers.models import seeded
from tests.helpers.offloads import DEVICE, WAYS, stages_of

ROWS, CLASSES = 12, 11  # rows of a micro-batch of all ranks: a multiple of each world
Rule = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], None]


class Ruled(Optimizer):
    """An optimizer that applies ``rule`` to each parameter with a gradient."""

    def __init__(self, groups: Any, rule: Rule, **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self.rule = rule

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    self.rule(p, p.grad, state, group)


def moment(state: dict[str, Any], key: str, like: Tensor) -> Tensor:
    value: Tensor = state.setdefault(key, torch.zeros_like(like))
    return value


def lion(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    (beta1, beta2), m = group["betas"], moment(state, "exp_avg", p)
    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * m.lerp(g, 1 - beta1).sign())
    m.lerp_(g, 1 - beta2)


def adam(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    (beta1, beta2), step = group["betas"], state["step"]
    m, v = moment(state, "exp_avg", p).lerp_(g, 1 - beta1), moment(state, "exp_avg_sq", p)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.mul_(1 - group["lr"] * group["weight_decay"])
    scale = (v / (1 - beta2**step)).sqrt_().add_(group["adam_eps"])
    p.sub_(group["lr"] / (1 - beta1**step) * m / scale)


def lamb(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    (beta1, beta2), step = group["betas"], state["step"]
    m, v = moment(state, "exp_avg", p).lerp_(g, 1 - beta1), moment(state, "exp_avg_sq", p)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
    norm, of_update = float(p.norm()), float(update.norm())
    ratio = min(max(norm / of_update, 0.01), 10.0) if norm > 0 and of_update > 0 else 1.0
    p.sub_(group["lr"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step) * ratio * update)


def lars(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    decay, norm, of_g = group["weight_decay"], float(p.norm()), float(g.norm())
    ratio = group["trust_coefficient"] * norm / (of_g + decay * norm + 1e-8)
    scaled = p.dim() > 1 and norm > 0 and of_g > 0
    buffer = moment(state, "momentum_buffer", p).mul_(group["momentum"])
    p.sub_(buffer.add_(g + decay * p, alpha=group["lr"] * (ratio if scaled else 1.0)))


def muon(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not group["use_muon"]:
        return adam(p, g, state, group)
    buffer = moment(state, "momentum_buffer", p).lerp_(g, 1 - group["momentum"])
    update = g.lerp(buffer, group["momentum"])
    update = _zeropower_via_newtonschulz(update, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.sub_(group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * update)


class Kind(NamedTuple):
    """An optimizer: what an engine gets, what the plain loop has, the first moment's key."""

    ours: Callable[..., Optimizer]
    plain: Callable[..., Optimizer]
    key: str
    settings: dict[str, Any]
    host: bool = False  # whether offload has it
    whole: bool = False  # whether it needs whole tensors

    def defaults(self) -> dict[str, Any]:
        return self.plain([nn.Parameter(torch.ones(1, 1))], **self.settings).defaults


def of_torch(name: str, key: str, host: bool = False, **settings: Any) -> Kind:
    return Kind(getattr(torch.optim, name), getattr(torch.optim, name), key, settings, host)


def ruled(
    ours: Any, rule: Rule, key: str, more: dict[str, Any], *of: bool, **settings: Any
) -> Kind:
    return Kind(ours, partial(Ruled, rule=rule, **more), key, settings, *of)


BETAS = {"betas": (0.9, 0.99)}
OPTIMIZERS: dict[str, Kind] = {
    "SGD": of_torch("SGD", "momentum_buffer", True, lr=0.1),
    "SGD momentum": of_torch("SGD", "momentum_buffer", True, lr=0.05, momentum=0.9, dampening=0.2),
    "SGD nesterov": of_torch("SGD", "momentum_buffer", True, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": of_torch("Adam", "exp_avg", True, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "AdamW": of_torch("AdamW", "exp_avg", True, lr=1e-2, eps=1e-3, weight_decay=0.05),
    "AdamW amsgrad": of_torch("AdamW", "exp_avg", True, lr=1e-2, eps=1e-3, amsgrad=True),
    "AdamW maximize": of_torch("AdamW", "exp_avg", lr=1e-3, eps=1e-3, maximize=True),
    "Adagrad": of_torch("Adagrad", "sum", True, lr=2e-2, eps=1e-3, lr_decay=0.1),
    "RMSprop": of_torch("RMSprop", "square_avg", lr=1e-3, eps=1e-3, momentum=0.5, centered=True),
    "Adadelta": of_torch("Adadelta", "acc_delta", lr=1.0, eps=1e-4),
    "NAdam": of_torch("NAdam", "exp_avg", lr=1e-2, eps=1e-3),
    "RAdam": of_torch("RAdam", "exp_avg", lr=1e-2, eps=1e-3),
    "Adamax": of_torch("Adamax", "exp_inf", lr=1e-2, eps=1e-3),
    "ASGD": of_torch("ASGD", "ax", lr=5e-2, t0=2),
    "Rprop": of_torch("Rprop", "prev", lr=1e-3),
    "Lion": ruled(optim.Lion, lion, "exp_avg", {}, True, lr=2e-3, weight_decay=0.1, **BETAS),
    "Lamb": ruled(
        optim.Lamb, lamb, "exp_avg", {}, True, True, lr=1e-2, weight_decay=0.1, eps=1e-3, **BETAS
    ),
    "LARS": ruled(
        optim.LARS, lars, "momentum_buffer", {}, True, True,
        lr=0.3, trust_coefficient=0.02, weight_decay=0.01, momentum=0.9,
    ),
    "Muon": ruled(
        optim.Muon, muon, "momentum_buffer", {"use_muon": True}, True, True,
        lr=2e-2, weight_decay=0.1, momentum=0.9, adam_eps=1e-3, **BETAS,
    ),
    "Adafactor": Kind(
        optim.Adafactor, transformers.Adafactor, "exp_avg",
        {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "beta1": 0.9}, True, True,
    ),
    "OneBitAdam": Kind(
        partial(optim.OneBitAdam, freeze_step=1000), torch.optim.AdamW, "exp_avg",
        {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}, False, True,
    ),
    "CPUAdam": Kind(optim.CPUAdam, torch.optim.AdamW, "exp_avg",
                    {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}, True),
    "AdamW8bit": Kind(  # of parameters below 4,096 elements the moments are in fp32
        optim.AdamW8bit, torch.optim.AdamW, "exp_avg",
        {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}, True,
    ),
}  # fmt: skip


def warmup(optimizer: Optimizer, steps: int = 3) -> Any:
    """DeepSpeed's, which counts from -1."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(step - 1, 0) / steps))


SCHEDULES: dict[str, Callable[[Optimizer], Any] | None] = {
    "none": None,
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=60),
    # named in the configuration
    "config StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "config WarmupLR": warmup,
}
IN_CONFIG = {
    "config StepLR": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}},
    "config WarmupLR": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 3, "warmup_type": "linear"},
    },
}
PARTS = (
    *("embedding", "conv", "batch norm", "layer norm", "tied", "tied embedding", "experts"),
    *("skipped", "unused", "float64", "checkpointed", "reentrant", "custom", "frozen", "deep"),
)
READS = (
    *("weight", "gathered", "summoned", "state", "norm", "rate", "state dict", "engine state dict"),
    *("evaluated", "forward", "average", "streamed", "copied"),
)
# What a script does at a point of a step, and at which: between steps, after the forward of a
# micro-batch, after its backward, after the last backward.
EVENTS: dict[str, str] = {
    **dict.fromkeys((f"read {read}" for read in READS), "bfml"),
    "read grad": "bfml",
    "set weight": "bfml",
    "write gathered": "bml",
    "write gathered equal": "bml",
    "write summoned": "bml",
    "write in place": "bml",
    "write data": "bfml",
    "write grad": "ml",
    "assign grad": "bfml",
    "drop grad": "ml",
    "rate": "bfml",
    "decay": "bfml",
    "limit": "bfml",
    "set state": "bfml",
    "write state": "bfml",
    "clear state": "bfml",
    "take state": "b",
    "give state": "bfml",
    "take weights": "b",
    "give weights": "bml",
    "hook before": "b",
    "hook after": "b",
    "hook parameter": "b",
    "hook module": "b",
    "hook backward": "b",
    "hook tensor": "b",
    "freeze": "bbbl",
    "thaw": "b",
    "zeros": "b",
    "zero grad": "bf",
    "add group": "b",
    "replace": "b",
    "micros": "b",
    "buffer": "bfml",
    "save": "b",
    "load": "b",
    "restart engine": "b",
}
WINDOWS = (
    *("plain",) * 8,
    *("own backward", "twice", "retain", "two forwards", "broken", "restarted", "not finite"),
    *("input gradient", "penalty", "weight penalty", "no sync", "forward left out", "undivided"),
    *("rank left out", "overflow", "accumulated by hand"),
)


@dataclass(frozen=True)
class Event:
    do: str
    at: str
    which: int = 0


@dataclass(frozen=True)
class Window:
    kind: str = "plain"
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Part:
    """A life of one engine. ``keys`` are of the section zero_optimization or of the top."""

    world: int
    stage: int
    place: str
    micros: int
    keys: tuple[tuple[str, Any], ...]
    windows: tuple[Window, ...]


@dataclass(frozen=True)
class Loop:
    """The random choices of one seed."""

    seed: int
    parts: frozenset[str]
    width: int
    optimizer: str
    groups: str
    schedule: str
    clip: float
    precision: str
    lives: tuple[Part, ...]

    @staticmethod
    def drawn(seed: int) -> Loop:
        draw = random.Random(seed)
        parts = frozenset(part for part in PARTS if draw.random() < 0.2)
        precision = draw.choice(("fp32",) * 6 + ("bf16", "fp16", "autocast"))
        if precision != "fp32":
            parts -= {"batch norm", "float64", "experts"}
        name = draw.choice(list(OPTIMIZERS))
        if name == "Rprop":  # a sign that turns moves a weight by a whole step
            precision = "fp32"
        kind, schedule = OPTIMIZERS[name], draw.choice(("none",) * 4 + tuple(SCHEDULES))
        if schedule == "one cycle" and not {"betas", "momentum"} & {*kind.defaults()}:
            schedule = "cosine"
        lives = []
        for _ in range(draw.choice((1, 1, 2, 2, 3))):
            world = draw.choice((1, 2, 2, 3, 4))
            place = draw.choice((DEVICE, DEVICE, *WAYS)) if kind.host else DEVICE
            stage = draw.choice(stages_of(place)) if name != "OneBitAdam" else 1
            keys: dict[str, Any] = {}
            if stage == 3:
                keys["stage3_param_persistence_threshold"] = draw.choice((0, 30, 100, 100_000))
                keys["stage3_prefetch_bucket_size"] = draw.choice((0, 200, 50_000_000))
            keys["stage3_module_granularity_threshold"] = draw.choice((None, 0, 0, 300))
            if world == 4 and name != "OneBitAdam":
                keys |= draw.choice(
                    ({}, {"replicate_size": 2}, {"mics_shard_size": 2})
                    + (({"zero_hpz_partition_size": 2},) if stage == 3 else ())
                )
            for key in ("keep_step_buffers", "keep_parameter_shards", "prescale_gradients"):
                keys |= {key: True} if draw.random() < 0.15 else {}
            if draw.random() < 0.3 and name != "OneBitAdam":
                keys["update_in_backward"] = True
            if draw.random() < 0.15:
                keys["gradient_allreduce_op"] = "sum"
            if draw.random() < 0.2:
                keys["activation_checkpointing"] = {"blocks": True}
            if draw.random() < 0.1:
                keys["activation_offload"] = {"enabled": True, "min_bytes": 1}
            windows = []
            for _ in range(draw.randint(2, 5)):
                events = []
                for _ in range(draw.choice((0, 1, 1, 2, 3))):
                    do = draw.choice(list(EVENTS))
                    at = draw.choice(EVENTS[do])
                    # docs/offload.md: reads there have the values after the step
                    at = "b" if at == "l" and "update_in_backward" in keys else at
                    # docs/optimizers.md: no writes to members in files; docs/offload.md: a hook
                    # before the step finds no offloaded gradients
                    if (do == "hook after" and "files" in place) or (
                        do == "hook before" and place != DEVICE
                    ):
                        continue
                    events.append(Event(do, at, draw.randrange(60)))
                of = stage, precision, parts, "update_in_backward" in keys
                windows.append(Window(_allowed(draw.choice(WINDOWS), *of), tuple(events)))
            micros = draw.choice((1, 1, 2, 3, 4))
            lives.append(Part(world, stage, place, micros, tuple(keys.items()), tuple(windows)))
        groups = draw.choice(("one", "decays", "reversed", "with frozen", "config"))
        if groups == "config" and name not in ("SGD", "SGD momentum", "AdamW", "Adagrad", "Lion"):
            groups = "one"
        clip = draw.choice((0.0, 0.0, 0.1, 0.5))
        return Loop(seed, parts, draw.choice((6, 9, 16, 21)), name, groups, schedule, clip,
                    precision, tuple(lives))  # fmt: skip

    def model(self) -> Net:
        net: Any = seeded(lambda: Net(self.parts, self.width))
        if "float64" in self.parts:
            net.wide.double()
        return net  # type: ignore[no-any-return]

    def groups_of(self, net: nn.Module) -> list[dict[str, Any]]:
        named = [p for p in net.parameters() if p.requires_grad or self.groups == "with frozen"]
        matrices = [p for p in named if p.dim() == 2]
        rest = [p for p in named if p.dim() != 2]
        muon = {"use_muon": False} if self.optimizer == "Muon" else {}
        if self.groups == "decays" or muon:
            rate = OPTIMIZERS[self.optimizer].settings["lr"] * 0.5
            return [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": rate, **muon}]
        return [{"params": named[::-1] if self.groups == "reversed" else named}]

    def batch(self, number: int, micro: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed((self.seed * 101 + number) * 8 + micro)
        rows = torch.randn(ROWS, self.width, generator=draw)[rank::world]
        ids = torch.randint(0, CLASSES, (ROWS,), generator=draw)[rank::world]
        return rows, ids


def _allowed(
    kind: str, stage: int, precision: str, parts: frozenset[str], in_backward: bool
) -> str:
    """Return ``kind``, or a plain window where docs/limits.md and docs/offload.md refuse it."""
    gradient = kind in ("input gradient", "penalty")
    if gradient and ("reentrant" in parts or precision == "fp16"):
        return "plain"
    if in_backward and kind in ("restarted", "twice"):
        return "plain"
    if kind == "broken" and "skipped" in parts and stage == 3:  # ranks break at other places
        return "plain"
    return "input gradient" if kind == "penalty" and stage == 3 else kind


class Custom(torch.autograd.Function):
    """A product, differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return g * weight, (g * x).sum(0)


class Block(nn.Module):
    def __init__(self, parts: frozenset[str], width: int) -> None:
        super().__init__()
        self.parts = parts
        self.up, self.down = nn.Linear(width, width + 3), nn.Linear(width + 3, width)
        self.norm: nn.Module = nn.LayerNorm(width) if "layer norm" in parts else nn.Identity()
        self.experts = nn.ModuleList(
            nn.Linear(width, width) for _ in range(4 * ("experts" in parts))
        )

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        routed = ids % 4
        mixed = x
        for number, expert in enumerate(self.experts):
            (own,) = torch.where(routed == number)
            if len(own):
                mixed = mixed.index_add(0, own, expert(x[own]))
        return mixed


class Net(nn.Module):
    breaks = False  # in the next forward
    tapped = False  # a hook halves the gradient of an activation

    def __init__(self, parts: frozenset[str], width: int) -> None:
        super().__init__()
        self.parts = parts
        self.register_buffer("seen", torch.zeros(width))
        self.blocks = nn.ModuleList(Block(parts, width) for _ in range(3 + 2 * ("deep" in parts)))
        if "embedding" in parts or "tied embedding" in parts:
            self.embedding = nn.Embedding(CLASSES, width)
        if "conv" in parts:
            self.conv = nn.Conv1d(1, 2, 3, padding=1)
        if "batch norm" in parts:
            self.batch_norm = nn.BatchNorm1d(width)
        if "float64" in parts:
            self.wide = nn.Linear(width, width)
        if "custom" in parts:
            self.factor = nn.Parameter(torch.ones(width))
        if "unused" in parts:
            self.unused = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head, self.aside = nn.Linear(width, CLASSES), nn.Linear(width, 1)
        if "tied" in parts:
            self.blocks[2].up.weight = self.blocks[0].up.weight
        if "tied embedding" in parts:
            self.head.weight = self.embedding.weight
        if "frozen" in parts:
            self.blocks[1].requires_grad_(False)

    def forward(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = rows.to(self.head.weight.dtype)
        self.seen += rows.detach().to(self.seen.dtype).sum(0)
        if hasattr(self, "embedding"):
            x = x + self.embedding(ids)
        if hasattr(self, "conv"):
            x = x + self.conv(x[:, None]).mean(1)
        if hasattr(self, "batch_norm"):
            x = self.batch_norm(x)
        for number, block in enumerate(self.blocks):
            if self.breaks and number == 2:
                self.breaks = False
                raise ArithmeticError("a forward that a script catches")
            if "skipped" in self.parts and number == 1 and int(ids[0]) % 2:
                continue
            if {"checkpointed", "reentrant"} & self.parts and self.training:
                x = checkpoint(block, x, ids, use_reentrant="reentrant" in self.parts)
            else:
                x = block(x, ids)
        if hasattr(self, "wide"):
            x = torch.tanh(self.wide(x.to(self.wide.weight.dtype))).to(x.dtype)
        if hasattr(self, "factor"):
            x = Custom.apply(x, self.factor)
        if self.tapped and x.requires_grad:
            x.register_hook(lambda g: g * 0.5)
        return self.head(x) * self.scale, self.aside(x)


def losses_of(out: tuple[Tensor, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
    first = nn.functional.cross_entropy(out[0].float(), ids)
    return first, out[1].float().pow(2).mean()

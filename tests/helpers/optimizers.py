"""Optimizers by name: rows of the tables over them. A row says what an engine is given and what the
plain loop has, and how close their weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from hf_zero.ops import reference
from hf_zero.optim import LARS, Adafactor, CPUAdam, Lamb, Lion, Muon
from hf_zero.optim.bf16_state import key_of
from tests.helpers import oracle
from tests.helpers.training import trainable

Make = Callable[[Any], Any]
Weights = Mapping[str, torch.Tensor]


def near(got: Weights, want: Weights, sums_alike: bool) -> None:
    oracle.compare_tensors("weights", got, want)


@dataclass(frozen=True)
class Row:
    """``ours`` makes the optimizer of an engine, ``plain`` that of the plain loop (the same, if
    none is given), of a model; ``read`` returns numbers that are alike, too. ``compare`` is also
    told whether gradients were added up in the order of the plain loop.
    """

    ours: Make
    plain: Make | None = None
    compare: Callable[[Weights, Weights, bool], None] = near
    read: Callable[[Any], list[float]] = field(default=lambda optimizer: [])

    @property
    def by_hand(self) -> Make:
        return self.plain or self.ours


# Element-wise, of groups of parameters.
ELEMENTWISE: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-6, weight_decay=0.1),
    "amsgrad": lambda groups: torch.optim.AdamW(
        groups, lr=1e-2, eps=1e-6, weight_decay=0.1, amsgrad=True
    ),
    "unfused": lambda groups: torch.optim.Adam(
        groups, lr=1e-2, eps=1e-6, weight_decay=0.1, foreach=True
    ),
    "sgd": lambda groups: torch.optim.SGD(
        groups, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.1
    ),
    "lion": lambda groups: Lion(groups, lr=1e-3, weight_decay=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(
        groups, lr=1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1
    ),
    "rmsprop": lambda groups: torch.optim.RMSprop(
        groups, lr=1e-3, weight_decay=0.1, momentum=0.5, eps=1e-4
    ),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, eps=1e-6, weight_decay=0.1),
    "cpu adam": lambda groups: CPUAdam(groups, lr=1e-2, eps=1e-6, weight_decay=0.1),
}
# With sums over whole tensors, too.
OF_GROUPS: dict[str, Make] = {
    **ELEMENTWISE,
    "lamb": lambda groups: Lamb(groups, lr=1e-2, weight_decay=0.1, max_coeff=0.3),
}


def adafactor(**settings: Any) -> Row:
    """The weights of transformers'."""
    return Row(
        lambda model: Adafactor(trainable(model), **settings),
        lambda model: transformers.Adafactor(trainable(model), **settings),
    )


def _groups(model: Any) -> list[dict[str, Any]]:
    """Matrices, and what has another weight decay and rate."""
    return [
        {"params": [p for p in trainable(model) if p.ndim > 1]},
        {"params": [p for p in trainable(model) if p.ndim < 2], "weight_decay": 0.0, "lr": 0.01},
    ]


MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAM_OF_MUON: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0}


def parted(model: Any) -> tuple[list[Any], list[Any]]:
    """Matrices, and other parameters."""
    matrices = [p for p in trainable(model) if p.ndim == 2]
    return matrices, [p for p in trainable(model) if p.ndim != 2]


class MuonAndAdamW(torch.optim.Optimizer):
    """torch.optim's two, stepped together."""

    def __init__(self, model: Any, **settings: Any) -> None:
        matrices, others = parted(model)
        self.each = [
            torch.optim.Muon(matrices, **{**MUON, **settings}),
            torch.optim.AdamW(others, **ADAM_OF_MUON),
        ]

    def step(self) -> None:  # type: ignore[override]
        for each in self.each:
            each.step()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for each in self.each:
            each.zero_grad()


def same_directions(got: Weights, want: Weights, sums_alike: bool = True) -> None:
    """In norm: Newton and Schulz's bf16 makes updates some 1 % off of other sums' order."""
    for name, tensor in want.items():
        if sums_alike:
            torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=5e-4)
        off = float((got[name] - tensor).norm()) / 2  # four steps
        assert off < 0.03 * MUON["lr"] * tensor.numel() ** 0.5, (name, off)


def muon(**settings: Any) -> Row:
    def ours(model: Any) -> Muon:
        matrices, others = parted(model)
        groups = [{"params": matrices}, {"params": others, "use_muon": False, **ADAM_OF_MUON}]
        return Muon(groups, **{**MUON, **settings})

    return Row(ours, lambda model: MuonAndAdamW(model, **settings), same_directions)


# Those whose update of an element depends on other elements.
WHOLE: dict[str, Row] = {
    "adafactor": adafactor(beta1=0.9, weight_decay=0.1),
    "adafactor, relative": adafactor(),
    "adafactor, warm": adafactor(warmup_init=True, weight_decay=0.1, clip_threshold=0.2),
    "adafactor, given rate": adafactor(lr=0.02, relative_step=False, scale_parameter=False),
    "lamb": Row(
        lambda model: Lamb(_groups(model), lr=0.02, weight_decay=0.1, max_coeff=0.3),
        read=lambda optimizer: sorted(optimizer.get_lamb_coeffs()),
    ),
    "lars": Row(
        lambda model: LARS(_groups(model), lr=0.5, weight_decay=0.01, trust_coefficient=0.02)
    ),
    "muon": muon(),
    "muon, other rates": muon(nesterov=False, adjust_lr_fn="match_rms_adamw"),
}
MAIN = ("adafactor", "lamb", "lars", "muon")


SEED = 7  # of stochastic rounding


def rounded(values: torch.Tensor, name: str, state: str, step: int) -> torch.Tensor:
    """``values`` in bf16: up if the cut-off 16 bits and 16 random ones carry."""
    random = reference.random_bits(key_of(SEED, name, state, step), 0, values.numel())
    bits = values.reshape(-1).view(torch.int32).long() + (random & 0xFFFF)
    return (bits >> 16 << 16).to(torch.int32).view(torch.float32).view(values.shape)


class InBf16(torch.optim.Optimizer):
    """An optimizer in fp32 whose weights, and ``moments``, are rounded to bf16 after a step."""

    def __init__(self, model: Any, make: Make, moments: bool = False, kahan: bool = False) -> None:
        self.named, self.inner = dict(model.named_parameters()), make(model)
        self.moments, self.kahan, self.steps = moments, kahan, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        for name, p in self.named.items():
            near = p.bfloat16().float()
            error = (p - near).bfloat16().float()
            p.copy_(near + error if self.kahan else rounded(p, name, "master", self.steps))
            for key, value in self.inner.state[p].items() if self.moments else ():
                if key != "step":
                    value.copy_(rounded(value, name, key, self.steps))
        self.steps += 1

    def zero_grad(self, *_: Any, **__: Any) -> None:
        self.inner.zero_grad()

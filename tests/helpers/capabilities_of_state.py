"""Rows of optimizers, of places of their state, and of its precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_zero.optim import Adam8bit, AdamW8bit, Lamb, Lion8bit, SGD8bit, bf16_state
from tests.helpers.capability import (
    COLUMNS,
    TWO_BLOCKS,
    Keys,
    Row,
    Weights,
    always,
    exact,
    in_16_bits,
    near,
    stack_with,
)
from tests.helpers.engines import STAGES
from tests.helpers.models import ARCHITECTURES, Stack
from tests.helpers.offloads import DEVICE, PLACES, offload
from tests.helpers.optimizers import (
    ELEMENTWISE,
    MAIN,
    SEED,
    WHOLE,
    InBf16,
    MuonAndAdamW,
    same_directions,
)
from tests.helpers.training import ArchitectureJob, Way, sgd, trainable


def _whole(name: str, **more: Any) -> Row:
    """One whose update of an element depends on other elements."""
    row, job = WHOLE[name], f"optimizer {name}"
    compare = same_directions if name.startswith("muon") else None
    return Row(
        stack_with(job, row.ours),
        plain=stack_with(f"{job}, plainly", row.by_hand),
        compare=(lambda got, want, initial: compare(got, want, False)) if compare else near,
        traced=False,
        **more,
    )


def _away(way: str, **more: Any) -> Callable[[int, Path], Keys]:
    """Sub-groups end in the middle of rows; directions of matrices travel."""
    return lambda stage, folder: {"zero_optimization": offload(way, stage, folder, **more)}


def _elementwise(name: str, way: str) -> Row:
    """One that a host kernel updates, or that steps itself."""
    job = stack_with(
        f"optimizer {name}, offloaded", lambda model: ELEMENTWISE[name](trainable(model))
    )
    return Row(job, _away(way), plan={"clip": 1.0}, traced=False).only("oracle", "destroy")


def _lion(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Lion (arXiv 2302.06675) as one would write it down, with the betas of DeepSpeed's default."""

    class Written(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    update = torch.sign(0.9 * moment + 0.1 * p.grad)
                    p.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)
                    moment.lerp_(p.grad, 1 - 0.999)

    return Written(parameters, {})


def _muon_whose_adam_decays(model: nn.Module) -> MuonAndAdamW:
    """Linear layers by Muon, the rest by AdamW."""
    both = MuonAndAdamW(model)
    both.each[1].param_groups[0]["weight_decay"] = 0.1
    return both


LAMBS = {"lr": 0.02, "weight_decay": 0.1, "max_coeff": 0.3, "min_coeff": 0.01}
NESTEROV = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
# (parameters of the section, the plain optimizer)
BY_NAME: dict[str, tuple[Keys, Callable[..., Any]]] = {
    "SGD": (NESTEROV, torch.optim.SGD),
    "Lion": ({"lr": 1e-4, "weight_decay": 0.1}, _lion),
    "FusedLamb": (LAMBS, Lamb),
    "Adafactor": (
        {"lr": 0.02, "relative_step": False, "scale_parameter": False},
        transformers.Adafactor,
    ),
}
MUONS = {"momentum": 0.9, "weight_decay": 0.1, "muon_lr": 0.02, "adam_lr": 0.01}


def _by_name(name: str, params: Keys, plain: Callable[[nn.Module], Any], **more: Any) -> Row:
    """Of the section ``optimizer``."""
    job = stack_with(f"section {name}", lambda model: None)
    keys = always(optimizer={"type": name, "params": params})
    made = stack_with(f"section {name}, plainly", plain)
    return Row(job, keys, plain=made, traced=False, **more).only("oracle")


def _in_8_bits(way: str, make: Callable[[Any], Any]) -> Row:
    """All ranks read the same rows, so that codes are those of one process, bit for bit. Matrices
    have 8,192 elements, and sub-groups end with blocks of 256.
    """
    job = Way(f"8 bits {way}", lambda: Stack(2, 64), make_optimizer=make)
    keys = _away(way, buffer_size=1000) if way != DEVICE else always()
    return Row(job, keys, readers=1, elsewhere=4, compare=exact, traced=False)


WHOLE_AWAY = [
    ("adafactor", "optimizer on cpu", STAGES),
    ("lamb", "optimizer in files", STAGES),
    ("lars", "half on cpu", STAGES),
    ("muon", "all in files", (3,)),
]
OPTIMIZERS: dict[str, Row] = {
    **{name: _whole(name) if name in MAIN else _whole(name).only("oracle") for name in WHOLE},
    "muon, accumulated and clipped": _whole("muon", plan={"accumulation": 2, "clip": 0.1}).only(
        "oracle"
    ),
    **{
        f"{name}, {way}": replace(
            _whole(name, stages=stages), keys=_away(way, buffer_size=500)
        ).only("oracle", *(["resume"] if stages == STAGES else []))
        for name, way, stages in WHOLE_AWAY
    },
    **{
        f"{name}, {way}": _elementwise(name, way)
        for name, way in zip(ELEMENTWISE, itertools.cycle(PLACES))
    },
    **{
        f"{name} by name": _by_name(
            name, params, lambda model, kind=kind, params=params: kind(trainable(model), **params)
        )
        for name, (params, kind) in BY_NAME.items()
    },
    "AdamW in 8 bits": _in_8_bits(DEVICE, lambda m: AdamW8bit(trainable(m), 1e-3)),
    "SGD in 8 bits": _in_8_bits(
        "half on cpu", lambda m: SGD8bit(trainable(m), 1e-2, momentum=0.9, nesterov=True)
    ),
    "Lion in 8 bits": _in_8_bits("optimizer on cpu", lambda m: Lion8bit(trainable(m), 1e-4)),
    "Adam in 8 bits": _in_8_bits("optimizer in files", lambda m: Adam8bit(trainable(m), 1e-3)),
    "Muon by name": replace(
        _by_name("Muon", MUONS, _muon_whose_adam_decays),
        compare=lambda got, want, initial: same_directions(got, want),
    ),
}


def _placed(way: str, **plan: Any) -> Row:
    stages = (3,) if way.startswith(("all", "parameters")) else STAGES
    return Row(TWO_BLOCKS, _away(way), stages=stages, plan=plan)


def _tied(way: str, architecture: str, stages: tuple[int, ...], **plan: Any) -> Row:
    """A model of transformers, whose weights are tied, or in fp32."""
    job = ArchitectureJob(ARCHITECTURES[architecture])
    return Row(job, _away(way), stages=stages, plan=plan).only("oracle")


PLACEMENTS: dict[str, Row] = {
    "optimizer on cpu": _placed("optimizer on cpu", accumulation=2),
    "all on cpu": _placed("all on cpu", clip=0.5),
    "optimizer in files": _placed("optimizer in files", clip=0.5),
    "all in files": _placed("all in files", accumulation=2),
    "parameters on cpu": _placed("parameters on cpu"),
    "all on cpu, t5": _tied("all on cpu", "t5", (3,), precision="bf16"),
    **{
        f"updates in the backward, {way}": Row(
            TWO_BLOCKS,
            lambda stage, folder, way=way: {
                "zero_optimization": {**offload(way, stage, folder), "update_in_backward": True}
            },
            traced=False,
        ).only("oracle", "destroy", "resume")
        for way in (DEVICE, "half on cpu")
    },
}
PRECISIONS: dict[str, Row] = {
    precision: Row(
        TWO_BLOCKS, plan={"precision": precision, "accumulation": 2}, compare=in_16_bits
    ).only("bytes", "destroy", "resume", "overflow")
    for precision in ("bf16", "fp16")
}


def nearest(got: Weights, want: Weights, initial: Weights) -> None:
    """The errors of Kahan sums are beside the weights."""
    exact(got, {name: value.bfloat16().float() for name, value in want.items()}, initial)


def _in_bf16(
    kind: str, way: str = DEVICE, moments: bool = False, kahan: bool = False, **more: Any
) -> Row:
    """All ranks read the same rows, so that bits are those of one process."""

    def build() -> nn.Module:
        return Stack(2, 64).bfloat16()  # to begin with the same values

    make = IN_BF16[kind]
    name = f"{kind} in bf16, {way}, {moments}, {kahan}"
    section = {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": moments,
        "kahan_summation": kahan,
        "stochastic_rounding_seed": SEED,
    }

    def keys(stage: int, folder: Path) -> Keys:
        away = {} if way == DEVICE else _away(way, buffer_size=1000)(stage, folder)
        return {"bf16": section, **away}

    row = Row(
        Way(name, build, make_optimizer=make),
        keys,
        plain=Way(
            f"{name}, plainly",
            build,
            make_optimizer=lambda model: InBf16(model, make, moments, kahan),
        ),
        readers=1,
        elsewhere=4,
        plan={"precision": "bf16"},
        compare=nearest if kahan else exact,
        traced=False,
        **more,
    )
    return row.only("oracle", "bytes", "destroy", "resume")


IN_BF16: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda m: torch.optim.AdamW(trainable(m), 1e-3, weight_decay=0.1, foreach=False),
    "SGD": sgd,
    "AdamW8bit": lambda m: AdamW8bit(trainable(m), 1e-3, weight_decay=0.1),
}
PRECISIONS |= {
    # else shards have no memory of their own: a gather casts the master weights
    "bf16, kept shards": replace(
        PRECISIONS["bf16"],
        keys=always(zero_optimization={"keep_parameter_shards": True}),
        stages=(3,),
        columns=COLUMNS,
    ),
    "AdamW in bf16": _in_bf16(
        "AdamW",
        moments=True,
        around=lambda patch: patch.setattr(bf16_state, "WIDENED", 1024),  # several batches
    ),
    "SGD in bf16": _in_bf16("SGD"),
    "AdamW in bf16 on cpu": _in_bf16("AdamW", "optimizer on cpu"),
    "AdamW in bf16 in files": _in_bf16("AdamW", "optimizer in files", True),
    "8 bits beside bf16 in files": _in_bf16("AdamW8bit", "optimizer in files"),
    "Kahan sums": _in_bf16("SGD", kahan=True),
    "Kahan sums of AdamW": _in_bf16("AdamW", moments=True, kahan=True),
    "Kahan sums on cpu": replace(
        _in_bf16("SGD", "optimizer on cpu", kahan=True), compare=in_16_bits
    ),
}

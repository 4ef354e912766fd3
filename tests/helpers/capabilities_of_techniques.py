"""Rows of training techniques."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hf_zero.optim import OneBitAdam, ZeroOneAdam
from hf_zero.techniques.quantization import noise_for
from tests.helpers.capability import (
    Keys,
    Row,
    WithoutGradients,
    always,
    dropped,
    in_few_bits,
    no_compilation,
    stack_with,
    within,
)
from tests.helpers.engines import STAGES
from tests.helpers.layer_drop import LayerDropJob
from tests.helpers.models import ARCHITECTURES, LENGTH, Batch, Stack, seeded
from tests.helpers.one_bit import ADAM, BLOCK, RARE
from tests.helpers.plans import APART
from tests.helpers.token_drop import TokenDropJob
from tests.helpers.training import (
    ArchitectureJob,
    At,
    Driver,
    StackJob,
    Way,
    plain_sgd,
    sgd,
    trainable,
)

GROWING = [3, 5, 8, LENGTH]  # tokens of a row, by step
SCHEDULE = {
    "min_difficulty": 3,
    "max_difficulty": 64,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": GROWING, "max_step": [1, 2, 3]},
}
LEGACY: Keys = {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", **SCHEDULE}}


def by_metric(name: str, **more: Any) -> Keys:
    metrics = {name: {**SCHEDULE, **more}}
    learning = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"enabled": True, "curriculum_learning": learning}
    return {"data_efficiency": {"enabled": True, "data_sampling": sampling}}


def cut(batch: Batch, length: int) -> Batch:
    return {name: value[:, :length].contiguous() for name, value in batch.items()}


def reshaped(batch: Batch, length: int) -> Batch:
    rows = LENGTH // length
    return {
        name: torch.cat([value[i : i + 1, : rows * length].reshape(rows, length) for i in (0, 1)])
        for name, value in batch.items()
    }


@dataclass
class CutByHand(ArchitectureJob):
    """Batches that are cut, or reshaped, before the model is called."""

    by: Callable[[Batch, int], Batch] = cut

    def __post_init__(self) -> None:
        self.name = f"{self.architecture.name}, {self.by.__name__} by hand"

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        loss: torch.Tensor = net(**self.by(self.batch(at), GROWING[at.step])).loss
        return loss


def _grown(architecture: str, by: Callable[[Batch, int], Batch], keys: Keys, **plan: Any) -> Row:
    chosen = ARCHITECTURES[architecture]
    return Row(
        ArchitectureJob(chosen),
        always(**keys),
        plain=CutByHand(chosen, by=by),
        plan={"steps": len(GROWING), **plan},
    )


MOQ: Keys = {
    "enabled": True,
    "quantize_bits": {"start_bits": 6, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": 2,
}
BITS = [None, 6, 5, 4, 4, 4]  # of each step's forwards


def rounded(name: str, weight: torch.Tensor, step: int, section: Keys) -> torch.Tensor:
    """Weights in few bits by their definition, group by group."""
    bits = BITS[step]
    if bits is None:
        return weight
    levels, found = 2**bits, []
    stochastic = section.get("quantize_rounding") == "stochastic"
    symmetric = section.get("quantize_type", "symmetric") == "symmetric"
    noise = noise_for(weight, name, 0, step - 1).flatten()
    groups = section["quantize_groups"]
    for part, drawn in zip(weight.flatten().chunk(groups), noise.chunk(groups)):
        shift = torch.zeros(()) if symmetric else part.min()
        span = 2 * part.abs().max() if symmetric else part.max() - part.min()
        low = -levels // 2 if symmetric else 0
        scaled = (part - shift) * (levels / span)
        whole = torch.floor(scaled + drawn) if stochastic else torch.round(scaled)
        found.append(whole.clamp(low, low + levels - 1) * (span / levels) + shift)
    value = torch.cat(found).view(weight.shape)
    mixed = section.get("fp16_mixed_quantize", {"enabled": False})
    if mixed["enabled"]:
        share = max(0.0, 1 - mixed["quantize_change_ratio"] * (step - BITS.index(bits)))
        value = share * weight + (1 - share) * value
    return value


@dataclass
class RoundedJob(StackJob):
    """Weights of blocks are rounded before each forward of the plain loop."""

    section: Keys
    make: Callable[[], nn.Module] = Stack
    chosen: Callable[[str], bool] = lambda name: name.startswith(("blocks.", "transformer.h."))

    def __post_init__(self) -> None:
        self.name = f"rounded {id(self)}"

    def build(self) -> nn.Module:
        return seeded(self.make)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        if not hasattr(net, "engine"):
            net = _Rounded(net, self, at.step)
        return self.loss_of(net, at)

    def loss_of(self, net: Driver, at: At) -> torch.Tensor:
        return super().loss(net, at)


class _Rounded(Driver):
    def __init__(self, net: Driver, job: RoundedJob, step: int) -> None:
        self.module, self.dtype = net.module, net.dtype
        self.weights = {
            name: p + (rounded(name, p.detach(), step, job.section) - p.detach())
            if job.chosen(name) and p.dim() > 1
            else p
            for name, p in net.module.named_parameters()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.module, self.weights, args, kwargs)


def _rounded(more: Keys, **fields: Any) -> Row:
    section = {**MOQ, **more}
    plan = {"steps": 3, **fields.pop("plan", {})}
    return Row(RoundedJob(section), always(quantize_training=section), plan=plan, **fields)


FEW = {"block_size": 32}
FOUR: Keys = {"compressed_communication": {"bits": 4, **FEW}}
ERRORS = {"err_beta": 0.8, "reset_T": 3}


def partly_frozen() -> nn.Module:
    model = Stack(2)
    model.blocks[0].requires_grad_(False)
    return model


def _compressed(keys: Keys, stages: tuple[int, ...], **zero: Any) -> Row:
    keys = {"compressed_communication": FEW, "zero_optimization": zero, **keys}
    return Row(
        stack_with("4 bits", plain_sgd),
        always(**keys),
        stages=stages,
        plan={"accumulation": 2},
        compare=in_few_bits,
        traced=False,
    )


def _one_bit(cls: Any, settings: Keys, dense: Any) -> Row:
    """Before its freeze, where it is the dense optimizer."""
    shared = {name: value for name, value in settings.items() if "freeze" not in name}
    name = f"{cls.__name__} before its freeze: {shared}"
    return Row(
        stack_with(name, lambda model: cls(trainable(model), **{**shared, "freeze_step": 1000})),
        always(compressed_communication={"block_size": BLOCK}),
        plain=stack_with(f"{name}, plainly", lambda model: dense(trainable(model), **shared)),
        stages=(1, 2, 0),
        plan={"accumulation": 2, "clip": 0.3},
        traced=False,
        columns=("oracle", "resume"),
    )


def _frozen(name: str, cls: Any, settings: Keys, limit: float) -> Row:
    """After it, where no parameter moves further than the others."""
    return Row(
        stack_with(name, lambda model: cls(trainable(model), **settings)),
        always(compressed_communication={"block_size": BLOCK}),
        plain=stack_with(f"{name}, plainly", lambda model: torch.optim.AdamW(trainable(model))),
        stages=(1, 2, 0),
        plan={"steps": 3},
        compare=within(limit),
        traced=False,
        session=WithoutGradients,
        columns=("destroy", "resume", "overflow"),
    )


def _plain_sgd_of(sums: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(trainable(model), lr=0.05 * sums)


def _travels(sums: float = 1.0, stages: tuple[int, ...] = STAGES, **keys: Any) -> Row:
    """Options of how gradients travel, which may not change what they are but for ``sums``."""
    job = stack_with("plain SGD", _plain_sgd_of(1.0))
    plain = stack_with(f"plain SGD, {sums} times", _plain_sgd_of(sums))
    plan = {"accumulation": 2}
    row = Row(job, always(**keys), plain=plain, plan=plan, stages=stages, traced=sums == 1.0)
    return row.only("oracle")


DROPS = {"tolerance": 1e-4, "compare": dropped}
COMPILED: Keys = {"compile": {"blocks": True, "backend": "eager"}}
CHECKPOINTED: Keys = {"activation_checkpointing": {"blocks": True}}


def _dropping(job: Any, ranks: int = 1, **keys: Any) -> Row:
    """Of another family of models, or beside what else is on blocks; without a resume, by rank."""
    row = Row(job, always(**job.keys, **keys), ranks=ranks, elsewhere=0, **DROPS)
    return replace(row, around=no_compilation).only("oracle")


TECHNIQUES: dict[str, Row] = {
    "prescaled": _travels(prescale_gradients=True),
    "divided before": _travels(gradient_predivide_factor=2.0),
    "prescaled and divided before": _travels(
        stages=(3, 0), prescale_gradients=True, gradient_predivide_factor=2.0
    ),
    "summed": _travels(2.0, gradient_allreduce_op="sum"),
    "prescaled and summed": _travels(
        2.0, (0,), gradient_allreduce_op="sum", prescale_gradients=True
    ),
    "layer drop": Row(
        LayerDropJob("stack"),
        lambda stage, folder: {**LayerDropJob("stack").keys, "zero_optimization": APART},
        plan={"steps": 3, "accumulation": 2, "clip": 0.5},
        **DROPS,
    ).only("oracle", "bytes", "destroy", "resume"),
    "layer drop by rank": Row(
        LayerDropJob("stack", per_rank=True),
        lambda stage, folder: {
            **LayerDropJob("stack", per_rank=True).keys,
            "zero_optimization": APART,
        },
        stages=(3,),
        plan={"steps": 3, "accumulation": 2},
        elsewhere=0,
        **DROPS,
    ).only("oracle", "resume"),
    "token drop": Row(
        TokenDropJob("bert", padded=True),
        always(**TokenDropJob("bert", padded=True).keys),
        plan={"accumulation": 2},
        elsewhere=0,
        **DROPS,
    ),
    "layer drop, T5": _dropping(LayerDropJob("t5")),
    "layer drop, ViT": _dropping(LayerDropJob("vit")),
    "layer drop, compiled": _dropping(LayerDropJob("gpt2"), 2, **CHECKPOINTED, **COMPILED),
    "layer drop, replicated": _dropping(LayerDropJob("gpt2"), 2, replicate_size=2),
    "token drop, GPT-2": _dropping(TokenDropJob("gpt2")),
    "token drop, Llama": _dropping(TokenDropJob("llama", eager=True, padded=True), **CHECKPOINTED),
    "token drop, T5": _dropping(TokenDropJob("t5", chosen=(1, 3, 6, 8), padded=True)),
    # four patches and the token of the class, of which a step or two leave one out
    "token drop, ViT": _dropping(TokenDropJob("vit")),
    "curriculum": _grown("gpt2", cut, LEGACY, accumulation=2),
    "curriculum by truncation": _grown("t5", cut, by_metric("seqlen_truncate")).only("oracle"),
    "curriculum by reshaping": _grown("bert", reshaped, by_metric("seqlen_reshape")).only("oracle"),
    "weights in few bits": _rounded({}, plan={"accumulation": 2}),
    "weights in few bits, asymmetric": _rounded({"quantize_type": "asymmetric"}).only("oracle"),
    "weights in few bits, stochastic": _rounded(
        {"quantize_rounding": "stochastic", "quantize_groups": 8}
    ).only("oracle", "resume"),
    "weights in few bits, mixed": _rounded(
        {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3}}
    ).only("oracle"),
    # parameters lag behind the master weights
    "4 bits both ways": _compressed(FOUR, (1, 2)).only("oracle", "bytes", "resume", "overflow"),
    "4 bits up, 8 down": _compressed(
        {}, (3,), zero_quantized_gradients=True, zero_quantized_weights=True
    ),
    "4 bits both ways, replicated": replace(
        _compressed({**FOUR, "replicate_size": 2}, (1, 2)), ranks=4, elsewhere=2
    ).only("oracle", "resume"),
    "4 bits up, 8 down, partly frozen": replace(
        _compressed({}, (3,), zero_quantized_gradients=True, zero_quantized_weights=True),
        job=Way("4 bits, partly frozen", partly_frozen, make_optimizer=plain_sgd),
    ).only("oracle"),
    "4 bits up, offloaded": _compressed(
        {}, (2, 3), zero_quantized_gradients=True, offload_optimizer={"device": "cpu"}
    ).only("oracle"),
    "4 bits both ways, offloaded": _compressed(
        FOUR, (2,), offload_optimizer={"device": "cpu"}
    ).only("oracle"),
    "4 bits up, errors fed back": _compressed(
        {},
        (1, 2, 3),
        zero_quantized_gradients=True,
        zeropp_loco_param={**ERRORS, "reset_T": 64},  # cleared by a step
    ).only("oracle", "resume"),
    "1-bit Adam, dense": _one_bit(OneBitAdam, ADAM, torch.optim.AdamW),
    "1-bit Adam": _frozen("1-bit Adam", OneBitAdam, {**ADAM, "freeze_step": 1}, 120 * ADAM["lr"]),
    "0/1 Adam, local steps": _frozen(
        "local steps", ZeroOneAdam, {**ADAM, **RARE, "lr": 1e-3, "var_freeze_step": 1}, 0.1
    ),
}

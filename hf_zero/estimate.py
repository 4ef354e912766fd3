"""``hf_zero.estimate``: bytes of training state a rank will hold, from layouts, without memory for the model.

The model is cut as the engine cuts it, laid out as the engine lays it out (padding included), and priced by the stage
table. Activations are not counted: they depend on the batch.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.config import OptimizerConfig, ZeroConfig
from hf_zero.core.grads import IN_FLIGHT
from hf_zero.core.layout import FlatLayout
from hf_zero.core.policy import POLICIES, Policy
from hf_zero.core.precision import compute_dtype
from hf_zero.core.wrap import Cut, cut
from hf_zero.errors import ConfigError
from hf_zero.optim.build import build_optimizer

MASTER_BYTES = 4
PRECISIONS = {"fp32": "fp32", "float32": "fp32", "no": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}


@dataclass(frozen=True)
class StageEstimate:
    """Bytes one rank holds at one stage.

    ``parameters``, ``gradients`` and ``optimizer`` (fp32 master weights and moments) are there all the time. The largest
    unit is whole while it computes (stage 3), and so are its neighbours ahead. ``gradient_buffers`` hold gradients on
    their way between ranks and stay for the next step; over gloo with more than two ranks, chunks from all peers add to it.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    largest_unit: int
    largest_unit_name: str
    gradient_buffers: int

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "state": self.state}


@dataclass(frozen=True)
class MemoryEstimate:
    """What :func:`estimate` returns: the model counted, and one row a stage. ``moments``: fp32 numbers the optimizer keeps a parameter."""

    model: str
    total_parameters: int
    trainable_parameters: int
    units: int
    ranks: int
    replicas: int
    precision: str
    optimizer: str
    moments: int
    stages: tuple[StageEstimate, ...]

    def at(self, stage: int) -> StageEstimate:
        for row in self.stages:
            if row.stage == stage:
                return row
        raise ConfigError(f"stage {stage!r} was not estimated; estimated were {[row.stage for row in self.stages]}")

    def to_dict(self) -> dict[str, Any]:
        """Everything, fit for JSON."""
        plain = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {**plain, "stages": [row.to_dict() for row in self.stages]}


@dataclass(frozen=True)
class _Group:
    """Parameters that share a flat: as many elements, computed in ``dtype``, gathered with unit ``unit``."""

    unit: str
    trainable: bool
    dtype: torch.dtype
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    def layout(self, shards: int) -> FlatLayout:
        return FlatLayout.build(self.shapes, shards)

    @property
    def has_master(self) -> bool:
        return self.trainable and self.dtype in (torch.bfloat16, torch.float16)


def estimate(
    model: Any,
    ranks: int,
    precision: str = "bf16",
    optimizer: str | OptimizerConfig = "AdamW",
    stage: int | None = None,
    *,
    config: Any = None,
) -> MemoryEstimate:
    """Bytes of parameters, gradients and optimizer state per rank, for every stage or for one.

    Args:
        model: a module (on any device, meta too), a transformers configuration or a dict of one, a model folder, a
            ``config.json``, or the name of a model in the local cache or on the hub.
        ranks: the world size.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        optimizer: a name, or an ``OptimizerConfig`` with the parameters that decide what it keeps (momentum, amsgrad).
        stage: 0 to 3; None estimates all four.
        config: whatever ``ZeroConfig.coerce`` reads; its precision, optimizer and replicas take the place of the arguments'.

    Raises:
        ConfigError: a model, precision, optimizer, stage or number of ranks that cannot be.
    """
    replicas = 1
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"ranks = {ranks!r} is not a number of ranks; pass an integer of at least 1")
    if config is not None:
        settings = ZeroConfig.coerce(config, allow_auto=True).resolve(ranks, training=False)
        precision, optimizer, replicas = settings.precision, settings.optimizer or optimizer, settings.replicate_size
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r} is unknown; choose one of fp32, bf16, fp16")
    if stage is not None and stage not in POLICIES:
        raise ConfigError(f"stage {stage!r} is unknown; choose one of {sorted(POLICIES)}")
    precision = PRECISIONS[precision]
    wanted = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig(optimizer, {})
    name, module = _open(model)
    cuts, _ = cut(module)
    groups = [group for piece in cuts for group in _groups(piece, module, precision)]
    moments = moments_of(wanted)
    return MemoryEstimate(
        model=name,
        total_parameters=sum(group.layout(1).numel for group in groups),
        trainable_parameters=sum(group.layout(1).numel for group in groups if group.trainable),
        units=len(cuts),
        ranks=ranks,
        replicas=replicas,
        precision=precision,
        optimizer=wanted.type,
        moments=moments,
        stages=tuple(
            _row(POLICIES[each], groups, ranks, replicas, moments) for each in ([stage] if stage is not None else sorted(POLICIES))
        ),
    )


def _open(model: Any) -> tuple[str, nn.Module]:
    if isinstance(model, nn.Module):
        return type(model).__name__, model
    from hf_zero.integrations.meta_model import build_on_meta

    module = build_on_meta(model)
    return os.fspath(model) if isinstance(model, (str, os.PathLike)) else type(module).__name__, module


def _groups(piece: Cut, module: nn.Module, precision: str) -> list[_Group]:
    kinds: dict[tuple[bool, torch.dtype], list[tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in piece.parameters:
        kind = (parameter.requires_grad, compute_dtype(name, parameter, precision, module))
        kinds.setdefault(kind, []).append((name, tuple(parameter.shape)))
    return [_Group(piece.name or "(root)", trainable, dtype, tuple(shapes)) for (trainable, dtype), shapes in kinds.items()]


def _row(policy: Policy, groups: Sequence[_Group], ranks: int, replicas: int, moments: int) -> StageEstimate:
    shards = policy.shards(ranks, replicas)
    parameters = gradients = optimizer = 0
    whole: Counter[str] = Counter()
    for group in groups:
        layout = group.layout(shards if group.trainable else policy.parameter_shards(shards))
        price = policy.bytes_per_parameter(layout.shards, str(group.dtype).removeprefix("torch."), moments)
        parameters += round(price["parameters"] * layout.padded)
        whole[group.unit] += layout.padded * group.dtype.itemsize
        if group.trainable:
            gradients += round(price["gradients"] * layout.padded)
            optimizer += round(price["optimizer"] * layout.padded)
    largest, size = max(whole.items(), key=lambda item: item[1], default=("", 0))
    return StageEstimate(policy.stage, parameters, gradients, optimizer, size, largest, _buffers(policy, groups, shards, ranks))


def _buffers(policy: Policy, groups: Sequence[_Group], shards: int, ranks: int) -> int:
    """Gradients on the wire and the chunks that arrive for them, as many of each size as the engine keeps for the next unit.

    Whole fp32 gradients that are there anyway (stages 0 and 1) travel from where they are.
    """
    sizes = Counter((group.layout(shards).padded, group.dtype.itemsize) for group in groups if group.trainable)
    total = 0
    for (padded, itemsize), count in sizes.items():
        copied = policy.shards_gradients or (itemsize < MASTER_BYTES and ranks > 1)
        if copied and count > 1:
            total += IN_FLIGHT * itemsize * padded
        if shards > 1:
            total += min(count, shards) * itemsize * (padded // shards)
    return total


def moments_of(optimizer: OptimizerConfig) -> int:
    """Numbers the optimizer keeps for each parameter, found by letting it take one step over three of them."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    built = build_optimizer(optimizer, [parameter])
    built.step()
    return sum(isinstance(value, torch.Tensor) and value.numel() == 3 for value in built.state[parameter].values())

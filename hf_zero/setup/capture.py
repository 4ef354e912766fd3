"""Refusals of ``compile.capture``: what the host decides or reads anew in each step cannot be in
a graph of the device that is captured once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.device import graphs
from hf_zero.errors import ConfigError
from hf_zero.logging import listed
from hf_zero.optim.bf16_state import Bf16State
from hf_zero.optim.fused import reads_16_bits
from hf_zero.optim.own_step import is_own
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.step.captured_step import KEY

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# (the key in conflict, whether it is one, why and the remedy)
Conflict = tuple[str, Callable[[ZeroConfig], Any], str]
CONFLICTS: tuple[Conflict, ...] = (
    (
        "zero_optimization.stage: 3",
        lambda s: s.stage == 3,
        "gathers give units other memory in each pass; write stage 0, 1 or 2",
    ),
    (
        "zero_optimization.offload_optimizer",
        lambda s: s.offload_optimizer.device != "none",
        "the host makes the update; remove the section",
    ),
    (
        "zero_optimization.offload_param",
        lambda s: s.offload_param.device != "none",
        "the host holds the parameters; remove the section",
    ),
    (
        "activation_offload",
        lambda s: s.activation_offload.enabled or s.activation_checkpointing.cpu_checkpointing,
        "the host holds activations; remove the section",
    ),
    (
        "activation_checkpointing",
        lambda s: s.activation_checkpointing.number != 0,
        "recomputation reads the state of the random generator on the host; remove the section",
    ),
    (
        "fp16.enabled",
        lambda s: s.precision == "fp16",
        "the host reads in each step whether gradients overflow; write bf16",
    ),
    (
        "bf16.check_grad_overflow",
        lambda s: s.bf16.enabled and s.bf16.check_grad_overflow,
        "the host reads in each step whether gradients overflow; remove it",
    ),
    (
        "zero_optimization.ignore_unused_parameters: false",
        lambda s: not s.zero.ignore_unused_parameters,
        "the host reads in each step which parameters are used; remove it",
    ),
    (
        "zero_optimization.update_in_backward",
        lambda s: s.zero.update_in_backward,
        "the update is a graph of its own; remove the key",
    ),
    (
        "compressed_communication",
        lambda s: (
            s.compressed_communication.bits is not None
            or s.zero.quantized_gradients
            or s.zero.quantized_weights
        ),
        "messages in few bits change by step; remove it, and zero_quantized_gradients and "
        "zero_quantized_weights",
    ),
    (
        "tensor_parallel, sequence_parallel_size, context_parallel_size, expert_parallel",
        lambda s: (
            s.tensor_parallel.size > 1
            or s.ranks_of_a_sequence > 1
            or s.expert_parallel.enabled
            or s.tiled_mlp.enabled
        ),
        "their messages follow the batch; leave them out",
    ),
    (
        "comms_logger.enabled, flops_profiler.enabled",
        lambda s: s.comms_logger.enabled or s.flops_profiler.enabled,
        "they measure calls of the host, which a graph does not make; remove them",
    ),
    (
        "sparse_attention",
        lambda s: s.sparse_attention is not None,
        "the host plans each layout; remove it",
    ),
)


def check_capture(
    settings: ZeroConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    techniques: Any,
    device: torch.device,
    in_stages: bool,
) -> None:
    """Raise ConfigError for everything in a call of ``initialize`` that no graph of ``device`` can
    hold. ``techniques``: the keys of those that are on; ``in_stages``: the model is a pipeline.
    """
    if settings.compile.capture is None or optimizer is None:
        return
    reasons = [*_reasons(settings, model, optimizer, techniques, device, in_stages)]
    if reasons:
        raise ConfigError(
            f'{KEY}: "step" captures what a step launches in graphs of the device, which excludes '
            f"{'; '.join(reasons)}. Or remove {KEY}"
        )


def _reasons(
    settings: ZeroConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    techniques: Any,
    device: torch.device,
    in_stages: bool,
) -> Iterator[str]:
    if not graphs.supports(device):
        yield f"the device {device.type} (it has no such graphs; train on a GPU)"
        return
    for name, conflicts, why in CONFLICTS:
        if conflicts(settings):
            yield f"{name} ({why})"
    if in_stages:
        yield "a pipeline (its schedule is the host's; pass the model without stages)"
    if techniques:
        yield f"{listed(techniques)} (the step changes with its number; remove the section)"
    plain = is_own(optimizer.step, optimizer) and Bf16State.of(settings, optimizer) is None
    if not plain or not reads_16_bits(optimizer, settings.kernels, device):
        yield (
            f"{type(optimizer).__name__} as it is configured (its update reads its settings on the "
            "host; use Adam, AdamW or Lion with fp32 states and kernels: auto, and leave fused, "
            "foreach and amsgrad as they are)"
        )
    if optimizer._optimizer_step_pre_hooks:  # type: ignore[attr-defined]
        yield "hooks before the optimizer's step (a graph calls none; remove them)"
    hooked = [
        name or "the model"
        for name, module in model.named_modules()
        if any(
            not isinstance(hook, Attached)
            for kind in HOOKS
            for hook in module.__dict__[kind].values()
        )
    ]
    if hooked:
        yield f"hooks on {listed(hooked, 3)} (a graph calls none; remove them before initialize)"
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        yield "gradient checkpointing of the model (call model.gradient_checkpointing_disable())"

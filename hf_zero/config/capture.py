"""Keys that ``compile.capture`` excludes: with them the host decides or reads in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hf_zero.config.zero_config import ZeroConfig

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


def capture_conflicts(settings: ZeroConfig) -> Iterator[str]:
    """Yield each key of ``settings`` that no captured step has, with the reason and the remedy."""
    for name, conflicts, why in CONFLICTS:
        if conflicts(settings):
            yield f"{name} ({why})"

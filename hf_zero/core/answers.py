"""What an engine answers about itself, in the field's names: sizes, rates, precision, progress,
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.config import ZeroConfig
from hf_zero.core.flat import Flat
from hf_zero.storage.placement import Placement
from hf_zero.storage.states import MASTER


@dataclass
class Counters:
    """How far training is."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0


class Answers:
    """Read-only methods of :class:`hf_zero.core.engine.Engine`."""

    config: ZeroConfig
    counters: Counters
    device: torch.device
    stage: int
    world_size: int
    optimizer: Any
    bound: Any
    flats: Sequence[Flat]
    scaler: Any
    _accumulation: int
    _norm: torch.Tensor | None
    _applied: bool
    _placement: Placement

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu or 1

    def train_batch_size(self) -> int:
        return self.config.train_batch_size or self.world_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a micro-batch on one rank, micro-batches of a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self._accumulation

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0.0: never."""
        return float(self.config.gradient_clipping or 0.0)

    def get_global_grad_norm(self) -> float:
        """Norm of the last step's gradient before clipping, loss scale removed; 0.0 before the
        first step.

        The host waits for the device: :meth:`grad_norm_tensor` does not.
        """
        return 0.0 if self._norm is None else float(self._norm)

    def grad_norm_tensor(self) -> torch.Tensor:
        """The same as a 0-dim tensor on the device, which later steps leave as it is."""
        return (
            torch.zeros((), dtype=torch.float64, device=self.device)
            if self._norm is None
            else self._norm
        )

    def get_lr(self) -> list[float]:
        return (
            []
            if self.optimizer is None
            else [float(group["lr"]) for group in self.optimizer.param_groups]
        )

    def get_mom(self) -> list[Any]:
        """Each group's momentum or betas, whichever its optimizer has; None for neither."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def was_step_applied(self) -> bool:
        """Whether the last step() changed the weights: False between boundaries and after an
        overflow.
        """
        return self._applied

    def loss_scale(self) -> float:
        """What an fp16 loss is multiplied by now; 1.0 in other precisions."""
        return float(self.scaler.scale)

    def dynamic_loss_scale(self) -> bool:
        return bool(self.scaler.dynamic)

    def fp16_enabled(self) -> bool:
        return self.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.config.precision == "bf16"

    def zero_optimization(self) -> bool:
        return self.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.stage == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return bool(self.config.zero.gather_16bit_weights_on_model_save)

    @property
    def global_steps(self) -> int:
        return self.counters.global_steps

    @property
    def global_samples(self) -> int:
        return self.counters.global_samples

    @property
    def micro_steps(self) -> int:
        return self.counters.micro_steps

    @property
    def skipped_steps(self) -> int:
        return self.counters.skipped_steps

    def state_bytes(self) -> dict[str, int]:
        """Bytes of state on this rank now, wherever they live: parameters (gathered ones
        excluded at stage 3), gradients, optimizer.
        """
        held = self._held()
        return {
            kind: sum(nbytes for (each, _), nbytes in held.items() if each == kind)
            for kind in ("parameters", "gradients", "optimizer")
        }

    def bytes_by_tier(self) -> dict[str, int]:
        """The same bytes by where they are: ``device``, ``ram`` (of what is offloaded, with the
        buffers between it and files) and ``disk``.
        """
        held = self._held()
        tiers = {
            tier: sum(nbytes for (_, each), nbytes in held.items() if each == tier)
            for tier in ("device", "ram", "disk")
        }
        tiers["ram"] += sum(self._placement.held().values())
        return tiers

    def _held(self) -> Counter[tuple[str, str]]:
        """Bytes by kind and tier."""
        found: Counter[tuple[str, str]] = Counter()
        counted: set[int] = set()

        def add(kind: str, tier: str, tensor: torch.Tensor | None) -> None:
            if tensor is not None and tensor.numel() and tensor.data_ptr() not in counted:
                counted.add(tensor.data_ptr())
                found[kind, tier] += tensor.nbytes

        for flat in self.flats:
            if flat.sharded and flat.is_away:
                for tier, nbytes in flat.shard_bytes().items():
                    found["parameters", tier] += nbytes
            else:
                add("parameters", "device", flat.shard if flat.sharded else flat.full)
            if not flat.trainable:
                continue
            add("gradients", "device", flat.window)
            if flat.states is not None:
                add("gradients", "ram", flat.grad)
                for tier, nbytes in flat.states.nbytes().items():
                    found["optimizer", tier] += nbytes
                continue
            if flat.window is None:
                add("gradients", "device", flat.grad)
            if flat.has_own_master:
                add("optimizer", "device", flat.master)
            for name, tensor in self.bound.tensors(flat).items() if self.bound is not None else ():
                if name != MASTER:
                    add("optimizer", "device", tensor)
        return found

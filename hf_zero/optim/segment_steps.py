"""Steps of the user's optimizer over some of its segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.offload.storage import MASTER
from hf_zero.optim import torch_fused
from hf_zero.optim.offloaded_state import BEGIN_WITH_GRADIENT
from hf_zero.optim.table import Segment


class SegmentSteps:
    """Steps of ``optimizer``; ``base`` is its class among those with a known update."""

    def __init__(self, optimizer: torch.optim.Optimizer, base: Any) -> None:
        self._optimizer = optimizer
        self._base = base

    def over(
        self,
        segments: Sequence[Segment],
        gradients: list[Tensor],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        in_kernel: bool,
        step: Callable[[], Any],
    ) -> None:
        """Run ``step`` with ``gradients`` of ``segments``; the optimizer skips all others."""
        optimizer: Any = self._optimizer
        if grad_scale is not None and not in_kernel and gradients:
            torch._foreach_div_(
                gradients, grad_scale.to(dtype=gradients[0].dtype, device=gradients[0].device)
            )
        try:
            if in_kernel:
                # The kernels skip only if the flag is exactly 1.0, and take fp32.
                optimizer.grad_scale = (
                    None
                    if grad_scale is None
                    else grad_scale.detach().to(torch.float32).reshape(())
                )
                optimizer.found_inf = (
                    None if found_inf is None else found_inf.ne(0).to(torch.float32).reshape(())
                )
            for segment, gradient in zip(segments, gradients):
                segment.tensor.grad = gradient
            step()
        finally:
            for segment in segments:
                segment.tensor.grad = None
            if in_kernel:
                del optimizer.grad_scale, optimizer.found_inf

    def takes_scale(self) -> bool:
        return torch_fused.takes_scale(self._optimizer, self._base, None)

    def bare(self) -> None:
        """Run the class's own step without hooks, which run once for the whole step."""
        own = type(self._optimizer).step
        getattr(own, "__wrapped__", own)(self._optimizer)

    def sub_group(
        self, segment: Segment, held: Mapping[str, Any], grad: Tensor, divisor: float, fresh: bool
    ) -> None:
        """Make one update of ``segment`` by the optimizer itself, over the arrays in ``held``."""
        entries: Any = self._optimizer.state[segment.tensor]
        waiting = segment.tensor.data
        between = {name: entries[name] for name in held if name in entries}
        segment.tensor.data = held[MASTER]
        entries.update({name: held[name] for name in between})
        if fresh and self._base in BEGIN_WITH_GRADIENT:
            entries.pop("momentum_buffer", None)
        gradient = grad if grad.dtype == segment.tensor.dtype else grad.to(segment.tensor.dtype)
        scale = None if divisor == 1.0 else torch.tensor(divisor, dtype=torch.float32)
        self.over([segment], [gradient], scale, None, self.takes_scale(), self.bare)
        for name, entry in between.items():
            made = entries.get(name)
            if made is not None and made.data_ptr() != held[name].data_ptr():
                held[name].copy_(made)
            entries[name] = entry
        segment.tensor.data = waiting

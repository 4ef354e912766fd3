"""The norm of gradients that are in host memory, on the device: the same bits, and one copy."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.zero.reduce.norm import squared_norm


class Crossings(TorchDispatchMode):
    """Copies from the CPU to the device "meta"."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (
            isinstance(out, torch.Tensor)
            and out.device.type == "meta"
            and getattr(args[0], "device", out.device).type == "cpu"
        ):
            self.shapes.append(tuple(out.shape))
        return out


def flat(grad, squares=None):
    return type(
        "FlatOf", (), {"__hash__": object.__hash__, "shard": grad, "grad_sq_norm": squares}
    )()


def test_sums_taken_in_host_memory_cross_to_the_device_together():
    flats = [flat(torch.randn(100)) for _ in range(5)] + [
        flat(torch.empty(3), torch.empty((), dtype=torch.float64, device="meta"))
    ]
    with Crossings() as crossings:
        total = squared_norm(flats, torch.device("meta"))
    assert crossings.shapes == [(5,)] and total.device.type == "meta" and total.shape == ()


def test_the_sum_is_that_of_all_flats_in_their_order():
    grads = [torch.randn(1000) for _ in range(4)]
    flats = [flat(grad) for grad in grads]
    flats[2].grad_sq_norm = grads[2].double().square().sum()
    total = squared_norm(flats, torch.device("cpu"))
    assert torch.isclose(total, torch.cat(grads).double().square().sum(), rtol=1e-6)

"""Compressed communication from its equations, on whole vectors in one process.

C(z) of a block is s * round(z / s), s = max|z| / 7 (127 in 8 bits) in bf16. Blocks are of 64
elements (256 in 8 bits) where none is given, and count from the start of each owner's chunk. A
reduce-scatter gives sum_i C(g_i), in fp32 and in the order of the ranks; a gather of weights C(w);
an update of whole copies xh = round(xh + C(x - xh)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.engines import config_of, start
from tests.helpers.stacks import squared
from tests.helpers.training import At, Plan, adamw


def C(z: Tensor, bits: int, block: int | None = None) -> Tensor:
    """Return the vector ``z`` after quantization to ``bits`` bits, block by block, in fp32."""
    top = float(2 ** (bits - 1) - 1)
    block = block or {4: 64, 8: 256}[bits]
    out = torch.empty_like(z, dtype=torch.float32)
    for at in range(0, z.numel(), block):
        part = z[at : at + block].float()
        most = part.abs().max()
        if not bool(most.isfinite()):
            out[at : at + block] = float("nan")
        elif float(most) == 0.0:
            out[at : at + block] = 0.0
        else:
            scale = (most / torch.tensor(top)).bfloat16().float()
            out[at : at + block] = torch.round(part * (1.0 / scale)) * scale
    return out


def by_owner(z: Tensor, owners: int, bits: int, block: int | None = None) -> Tensor:
    """C of each owner's chunk of ``z``."""
    return torch.cat([C(chunk, bits, block) for chunk in z.chunk(owners)])


def compressible(layout: Any, block: int | None = None) -> bool:
    """Whether a flat buffer holds matrices of a block and more, and as much on each rank."""
    block = block or 256
    tensors = all(len(slot.shape) > 1 and slot.numel >= block for slot in layout.slots)
    return tensors and layout.num_shards > 1 and layout.padded // layout.num_shards >= block


def flat_of(layout: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """``tensors``, by name, end to end as ``layout`` has them: [padded]; zeros where none is."""
    out = torch.zeros(layout.padded, dtype=dtype)
    for slot in layout.slots:
        if slot.name in tensors:
            out[slot.offset : slot.end] = tensors[slot.name].reshape(-1).to(dtype)
    return out


def reduced(layout: Any, grads: Sequence[Tensor], bits: int, block: int | None = None) -> Tensor:
    """The sum over ranks of flat gradients [padded], as it comes out of a reduce-scatter."""
    if not compressible(layout, block):
        return torch.stack([grad.float() for grad in grads]).sum(0)
    total = by_owner(grads[0], layout.num_shards, bits, block)
    for grad in grads[1:]:
        total = total + by_owner(grad, layout.num_shards, bits, block)
    return total


GRADIENTS = {"zero_quantized_gradients": True}


def config(stage: int, plan: Plan | None = None, zero: Any = None, **more: Any) -> dict[str, Any]:
    made = config_of(stage, plan, **more)
    made["zero_optimization"].update(stage3_param_persistence_threshold=0, **(zero or {}))
    return made


class Recorder:
    """The gradients that autograd computes in a window, by micro-batch and parameter."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.micro: list[dict[str, torch.Tensor]] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, name=name: self._add(name, grad))

    def begin(self) -> None:
        self.micro.append({})

    def _add(self, name: str, grad: torch.Tensor) -> None:
        self.micro[-1][name] = grad.detach().clone()


def window(engine: Any, rank: int, number: int, plan: Plan, record: Recorder) -> None:
    """The backwards of a step, and the steps but for the last."""
    record.micro.clear()
    for micro in range(plan.accumulation):
        record.begin()
        engine.backward(squared(engine, At(number, micro, rank), plan.dtype))
        if micro + 1 < plan.accumulation:
            engine.step()


def gradients(engine: Any, unscaled: float) -> dict[str, torch.Tensor]:
    """This rank's parts of the reduced gradients, by key."""
    return {
        flat.key: flat.gradient.shard.detach().clone().float() * unscaled
        for flat in engine.flats
        if flat.trainable
    }


def trained(rank: int, model: Any, stage: int, plan: Plan, zero: Any, more: Any) -> list[Any]:
    engine = start(model, adamw(model), config(stage, plan, zero, **more))
    record, seen = Recorder(model), []
    for number in range(plan.steps):
        window(engine, rank, number, plan, record)
        own = gradients(engine, 1.0)
        engine.step()
        seen.append((own, list(record.micro)))
    return [seen, {flat.key: (flat.layout, flat.dtype) for flat in engine.flats}]


def expected_gradient(
    stage: int, plan: Plan, layout: Any, dtype: torch.dtype, micros: list[Any], block: int | None
) -> torch.Tensor:
    """From the gradients of all ranks, [rank][micro], the average: [padded]."""
    ranks, share = len(micros), 1.0 / plan.accumulation
    flats = [[flat_of(layout, grads, dtype) for grads in rank] for rank in micros]
    if stage == 1:  # summed over the window, reduced once
        sums = [
            sum((g.float() * share for g in rank[1:]), rank[0].float() * share) for rank in flats
        ]
        return reduced(layout, sums, 4, block) * (1.0 / ranks)
    total = torch.zeros(layout.padded)
    for micro in range(plan.accumulation):
        found = reduced(layout, [rank[micro] for rank in flats], 4, block)
        total = total + found * (share / ranks)
    return total


def check_gradients(
    answers: Sequence[Any], stage: int, plan: Plan, block: int | None = None
) -> None:
    """Assert that the gradients of :func:`trained` on each rank are those of the equations."""
    ranks, layouts = len(answers), answers[0][1]
    chosen = [key for key, (layout, _) in layouts.items() if compressible(layout, block)]
    assert bool(chosen) == (ranks > 1) and len(chosen) < len(layouts)
    for number in range(plan.steps):
        micros = [answer[0][number][1] for answer in answers]
        for key, (layout, dtype) in layouts.items():
            got = torch.cat([answer[0][number][0][key] for answer in answers])
            want = expected_gradient(stage, plan, layout, dtype, micros, block)
            if key not in chosen:
                tolerance = 1e-5 if plan.precision == "fp32" else 2e-2
                assert float((got - want).norm()) <= tolerance * float(want.norm()), (number, key)
                continue
            assert torch.equal(got, want), (number, key)
            dense = sum(
                flat_of(layout, grads, torch.float32) for rank in micros for grads in rank
            ) / (ranks * plan.accumulation)
            error = float((got - dense).norm() / dense.norm())
            assert 0.01 < error < 0.3, (key, error)


def sent_bytes(monkeypatch: Any) -> dict[int, list[tuple[str, int]]]:
    """Record the collectives of each rank as (operation, bytes)."""
    found: dict[int, list[tuple[str, int]]] = {}
    names = {
        "all_to_all_single": 1,
        "all_gather_into_tensor": 0,
        "all_gather_single": 0,
        "reduce_scatter_tensor": 1,
        "reduce_scatter_single": 1,
    }

    def counted(name: str, place: int) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found.setdefault(dist.get_rank(), []).append((name, args[place].nbytes))
            return original(*args, **kwargs)

        return call

    for name, place in names.items():
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, counted(name, place))
    return found

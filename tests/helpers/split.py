"""A small model that can be split over tensor- and expert-parallel ranks by hand, and its oracle:
the same modules without axes in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hf_zero
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import ParallelGroups, init_parallel
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.sharding import Sharding, set_sharding, sharding_of
from tests.helpers.engines import config_of, full_weights
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan

After = Callable[[Any], None]

HIDDEN, HEADS, INNER, EXPERTS, WIDE = 12, 4, 16, 4, 8
ROWS = 6  # tokens of a micro-batch on a rank


class Copied(torch.autograd.Function):
    """The input of a column-parallel layer: the gradients of its parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshDim) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].contiguous().clone()
        ctx.axis.all_reduce(total, "input gradient").wait()
        return total, None


class Added(torch.autograd.Function):
    """The output of a row-parallel layer: its parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshDim) -> Tensor:
        total = x.contiguous().clone()
        axis.all_reduce(total, "output").wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def _gather(x: Tensor, axis: MeshDim) -> Tensor:
    full = x.new_empty(axis.size * x.numel())
    axis.all_gather([(full, x.contiguous().view(-1))], "tokens").wait()
    return full.view(axis.size * x.shape[0], *x.shape[1:])


def _scatter(x: Tensor, axis: MeshDim) -> Tensor:
    own = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    axis.reduce_scatter(x.contiguous().view(-1), "tokens").reduce_into(own.view(-1), False, 1.0)
    return own


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshDim) -> Tensor:
        ctx.axis = axis
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _scatter(grads[0], ctx.axis), None


class Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshDim) -> Tensor:
        ctx.axis = axis
        return _scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gather(grads[0], ctx.axis), None


class Column(nn.Linear):
    axis: MeshDim | None = None
    packed = 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.axis is None else Copied.apply(x, self.axis))


class Row(nn.Linear):
    axis: MeshDim | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return (y if self.axis is None else Added.apply(y, self.axis)) + self.bias


class HeadScale(nn.Module):
    """One weight for all heads: a rank that has some of them has a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unflatten(-1, (-1, HIDDEN // HEADS)) * self.weight).flatten(-2)


class Experts(nn.Module):
    axis: MeshDim | None = None

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        first = 0
        if self.axis is not None:
            x, weights = Gathered.apply(x, self.axis), Gathered.apply(weights, self.axis)
            first = self.axis.rank * len(self.up)
        each = torch.einsum("nd,edw,ewh->neh", x, self.up, self.down)
        y = torch.einsum("neh,ne->nh", each.tanh(), weights[:, first : first + len(self.up)])
        return y if self.axis is None else Scattered.apply(y, self.axis)


class Block(nn.Module):
    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.value = Column(HIDDEN, HIDDEN)
        self.scale = HeadScale()
        self.out = Row(HIDDEN, HIDDEN)
        self.gate_up = Column(HIDDEN, 2 * INNER, bias=False)
        self.gate_up.packed = 2
        self.down = Row(INNER, HIDDEN)
        self.experts = Experts() if experts else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.scale(self.value(self.norm(x))).tanh())
        gate, up = self.gate_up(x).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return x if self.experts is None else x + self.experts(x)


class Split(nn.Module):
    """[rows, hidden] -> a loss: the mean over rows."""

    def __init__(self, experts: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(blocks))
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def split(model: nn.Module, groups: ParallelGroups) -> nn.Module:
    """Cut ``model``, which is whole, for this rank, in place."""
    tensor, expert = groups.along("tensor"), groups.along("expert")

    def cut(module: nn.Module, name: str, axes: tuple[str, ...], box: Callable[[Any], Box]) -> None:
        whole = getattr(module, name)
        part = nn.Parameter(box(whole.shape).take(whole.detach()).clone())
        set_sharding(part, Sharding(axes, box=box(whole.shape)))
        setattr(module, name, part)

    for module in model.modules():
        if tensor.size > 1 and isinstance(module, Column):
            module.axis = tensor
            for name, _ in list(module.named_parameters(recurse=False)):
                cut(
                    module,
                    name,
                    ("tensor",),
                    lambda s, m=module: Box.even(s, 0, tensor.rank, tensor.size, m.packed),
                )
        elif tensor.size > 1 and isinstance(module, Row):
            module.axis = tensor
            cut(module, "weight", ("tensor",), lambda s: Box.even(s, 1, tensor.rank, tensor.size))
        elif tensor.size > 1 and isinstance(module, HeadScale):
            set_sharding(module.weight, Sharding(partial=True))
        elif expert.size > 1 and isinstance(module, Experts):
            module.axis = expert
            for name in ("up", "down"):
                cut(module, name, ("expert",), lambda s: Box.even(s, 0, expert.rank, expert.size))
    return model


def batches(steps: int, accumulation: int, ranks: int) -> Tensor:
    """[steps, accumulation, ranks that read different rows, rows, hidden]"""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(steps, accumulation, ranks, ROWS, HIDDEN, generator=generator)


def config_of_split(stage: int, accumulation: int = 1, clip: float = 0.0, **zero: Any) -> Any:
    """A configuration in which each block is a unit, and none of its parameters stays whole."""
    made = config_of(stage, Plan(accumulation=accumulation, clip=clip))
    made["train_micro_batch_size_per_gpu"] = ROWS
    made["zero_optimization"].update(
        stage3_param_persistence_threshold=0, stage3_module_granularity_threshold=0
    )
    made["zero_optimization"].update(zero)
    return made


class Record:
    """The results of each step of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.grads: list[dict[str, Tensor]] = []
        self.weights: dict[str, Tensor] = {}


def plain(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    data: Tensor,
    clip: float = 0.0,
) -> Record:
    """The oracle: one process, whole tensors, all rows of a step."""
    model = copy.deepcopy(model)
    optimizer, record = make_optimizer(model), Record()
    for step in data:
        losses = [model(rows) for micro in step for rows in micro]
        torch.stack(losses).mean().backward()
        record.losses.append(torch.stack(losses).mean().item())
        record.grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
        limit = clip or float("inf")
        record.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
    record.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return record


def train(
    rank: int, whole: nn.Module, data: Tensor, sizes: Any, made: Any, optimizer: Any, after: After
) -> Any:
    """A run of one rank: its record, with its parts of gradients and weights, and their boxes."""
    dims = ParallelDims.over(4, **sizes)
    groups = init_parallel(dims)
    model = split(copy.deepcopy(whole), groups)
    boxes = {name: sharding_of(p).box for name, p in model.named_parameters()}
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer(model), config={"gradient_clipping": 0.0, **made}
    )[0]
    record, own = Record(), dims.coordinate(rank, "data")
    for step in data:
        losses = []
        for place, micro in enumerate(step):
            loss = engine(micro[own])
            engine.backward(loss)
            losses.append(loss.item())
            if place < len(step) - 1:
                engine.step()
        record.grads.append(
            {n: hf_zero.safe_get_full_grad(p).clone() for n, p in model.named_parameters()}
        )
        engine.step()
        record.losses.append(sum(losses) / len(losses))
        record.norms.append(engine.get_global_grad_norm())
        after(engine)
    record.weights = full_weights(engine)
    engine.destroy()
    return record, boxes


def check(
    sizes: Any,
    stage: int,
    accumulation: int,
    optimizer: Any,
    clip: float = 0.0,
    after: After = lambda engine: None,
    model: Callable[[bool], nn.Module] = Split,
    data: Tensor | None = None,
    **zero: Any,
) -> None:
    """Train ``model(experts)`` over four ranks and in one process, and compare. ``after`` each step
    nothing may be other than before.
    """
    dims = ParallelDims.over(4, **sizes)
    whole = seeded(lambda: model(dims.expert > 1))
    data = batches(3, accumulation, dims.data) if data is None else data
    want = plain(whole, optimizer, data, clip)
    made = config_of_split(stage, accumulation, clip, **zero)
    got = run_ranks(4, train, whole, data, sizes, made, optimizer, after)
    assert len({tuple(record.norms) for record, _ in got}) == 1, "norms differ between ranks"
    for record, boxes in got:
        assert record.norms == pytest.approx(want.norms, rel=1e-5), "norm"
        pairs = [(record.weights, want.weights, "weights")]
        pairs += [(own, all_, "gradient") for own, all_ in zip(record.grads, want.grads)]
        for own, all_, what in pairs:
            assert own.keys() == all_.keys()
            for name, value in own.items():
                box = boxes[name]
                part = all_[name] if box is None else box.take(all_[name])
                torch.testing.assert_close(
                    value, part, rtol=1e-5, atol=1e-5, msg=partial(_named, f"{what} {name}")
                )
    tensor = dims.tensor
    for step, loss in enumerate(want.losses):
        mean = sum(record.losses[step] for record, _ in got[::tensor]) / dims.data
        assert mean == pytest.approx(loss, rel=1e-5), f"loss of step {step}"


def _named(what: str, difference: str) -> str:
    return f"{what}: {difference}"

"""Parts of tensors, of sequences and of models: tensors cut over ranks beside slices and means of
whole ones, tiled computation beside the whole sequence, schedules of pipelines.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import deepspeed
import torch
from torch import nn

from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, full_grads
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import run_ranks
from tests.helpers.training import adamw


@in_one_item([(8, 3), (7, 5), (3,), (1,), ()])
def test_a_tensor_in_parts_is_put_together_again(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def run(rank: int) -> list[int]:
        group = deepspeed.comm.get_world_group()
        part = deepspeed.runtime.utils.PartitionedTensor(whole, group)
        assert part.full_size() == list(shape) and part.local_size() == part.data().shape
        assert torch.equal(part.full(), whole)
        sent = part.to_meta()
        assert torch.equal(type(part).from_meta(sent, part.data(), group).full(), whole)
        return part.data().tolist()

    parts = run_ranks(3, run)
    assert [*chain(*parts)] == whole.flatten().tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@in_one_item([[(6,)], [(2, 3), (3,)], [(1,)], [(7,), (5, 2), (2,)]])
def test_means_in_parts(sizes: list[Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [[torch.randn(size, generator=draw) for size in sizes] for _ in range(2)]
    mean = [torch.stack(tensors).mean(0).flatten() for tensors in zip(*given)]

    def run(rank: int) -> list[torch.Tensor]:
        before = [tensor.clone() for tensor in given[rank]]
        parts = deepspeed.runtime.comm.coalesced_collectives.reduce_scatter_coalesced(given[rank])
        assert all(map(torch.equal, before, given[rank]))
        return parts

    first, second = run_ranks(2, run)
    for whole, *parts in zip(mean, first, second):
        assert len(parts[0]) == -(-len(whole) // 2)
        torch.testing.assert_close(torch.cat(parts), whole)


ulysses: Any = deepspeed.runtime.sequence_parallel.ulysses_sp
HIDDEN, WORDS, LENGTH, SHARDS = 8, 11, 13, 4


def mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.down(torch.relu(module.up(x)))
    return found


def token_loss(module: Any, x: torch.Tensor, y: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
    losses = nn.functional.cross_entropy(module.head(x), y, reduction="none")
    return (losses * mask[0]).sum() if mask else losses.sum()


class Tiled(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.way == "plain":
            return token_loss(self, mlp(self, x).flatten(0, 1), y.flatten())
        if self.way == "generic":
            given = ({"x": x}, {"module": self}, "x")
            x = ulysses.sequence_tiled_compute(
                lambda x, module: mlp(module, x), LENGTH, SHARDS, *given, output_reduction=None
            )
        else:
            x = ulysses.TiledMLP.apply(mlp, self, x, SHARDS, list(self.parameters()))
        mask = torch.ones_like(y) if self.way == "mask" else None
        loss: torch.Tensor = ulysses.TiledFusedLogitsLoss.apply(
            token_loss, self, x, y, mask, SHARDS, None, "sum"
        )
        return loss


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(2, LENGTH, HIDDEN, generator=draw)
    return x.requires_grad_(), torch.randint(WORDS, (2, LENGTH), generator=draw)


@in_one_item([(3, "mask"), (2, "generic")])
def test_tiles_have_the_gradients_of_the_whole(case: tuple[int, str]) -> None:
    stage, way = case
    plain, inputs = Tiled("plain"), []
    for rank in range(2):
        x, y = given(rank)
        (plain(x, y) / 2).backward()
        assert x.grad is not None
        inputs.append(x.grad * 2)
    want = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    models = [Tiled(way) for _ in range(2)]

    def run(rank: int) -> None:
        model = models[rank]
        config = config_of(stage)
        engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
        for _ in range(2):
            x, y = given(rank)
            engine.backward(engine(x, y))
            compare_tensors("gradients", full_grads(engine), want)
            torch.testing.assert_close(x.grad, inputs[rank])
            engine.zero_grad()
        engine.destroy()

    run_ranks(2, run)


def test_means_of_tiles_and_scalars() -> None:
    x = torch.arange(12.0).reshape(2, 6)
    apart = ulysses.sequence_tiled_compute(
        lambda x: x.sum(), 6, 4, {"x": x}, {}, "x", None, 0, "mean"
    )
    assert apart == x.sum() / 3
    same = ulysses.SequenceTiledCompute.apply(
        lambda x, add: (x + add).sum(), 6, 3, ["x"], ["add"], "x", None, 0, "sum", x, 1.0
    )
    assert same == x.sum() + 12


def test_keywords_of_a_tile_reach_its_function() -> None:
    """Those that torch.utils.checkpoint has itself, too, and tensors on the device whose random
    state a checkpoint keeps.
    """
    x = torch.ones(1, 4, 2, requires_grad=True)
    own = {"function": 1.0, "debug": 2.0, "fn": 3.0, "preserve_rng_state": 4.0}
    found = ulysses.sequence_tiled_compute(
        lambda x, **keys: x * sum(keys.values()), 4, 2, {"x": x}, own, "x", output_reduction="sum"
    )
    found.backward()
    assert found == 80 and x.grad is not None and x.grad.eq(10).all()


schedule = deepspeed.runtime.pipe.schedule
SHAPES = [(1, 1), (4, 1), (1, 3), (3, 3), (8, 3), (5, 2)]  # micro-batches, stages


class Stage:
    """One stage with its buffers; what it holds of a micro-batch is the work done on it."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.buffers: dict[int, str] = {}
        self.loaded = 0
        self.done: Counter[str] = Counter()

    def sent(self, order: Any) -> str:
        wanted = "forward" if type(order) is schedule.SendActivation else "backward"
        number, work = self.buffers[order.buffer_id].split()
        assert work == wanted
        return number

    def do(self, order: Any, inbox: dict[type, list[str]]) -> None:
        kind = type(order)
        self.done[order.name] += 1
        if not isinstance(order, schedule.BufferOpInstruction):
            return
        at = order.buffer_id
        assert 0 <= at < self.plan.num_pipe_buffers()
        held = self.buffers.get(at, "")
        if kind is schedule.RecvActivation:
            assert not held or held.endswith(self.last_work)
            self.buffers[at] = f"{inbox[schedule.SendActivation].pop(0)} in"
        elif kind is schedule.LoadMicroBatch:
            if self.plan.is_first_stage:
                assert not held or held.endswith(self.last_work)
                self.buffers[at] = f"{self.loaded} in"
            assert self.buffers[at] == f"{self.loaded} in"
            self.loaded += 1
        elif kind is schedule.RecvGrad:
            assert held == f"{inbox[schedule.SendGrad].pop(0)} forward"
        elif kind is schedule.ForwardPass:
            assert held.endswith("in")
            self.buffers[at] = held.replace("in", "forward")
        elif kind is schedule.BackwardPass:
            assert held.endswith("forward")
            self.buffers[at] = held.replace("forward", "backward")

    @property
    def last_work(self) -> str:
        """After which a buffer is free."""
        return "backward" if isinstance(self.plan, schedule.TrainSchedule) else "forward"


def played(kind: Any, micro_batches: int, stages: int) -> list[Stage]:
    plans = [kind(micro_batches, stages, stage) for stage in range(stages)]
    played = [Stage(plan) for plan in plans]
    for step in zip(*plans, strict=True):
        inboxes: list[dict[type, list[str]]] = [
            {schedule.SendActivation: [], schedule.SendGrad: []} for _ in plans
        ]
        for place, (stage, orders) in enumerate(zip(played, step)):
            for order in orders:
                for sends, to in ((schedule.SendActivation, 1), (schedule.SendGrad, -1)):
                    if type(order) is sends:
                        inboxes[place + to][sends].append(stage.sent(order))
        for stage, orders, inbox in zip(played, step, inboxes):
            for order in orders:
                stage.do(order, inbox)
            assert not any(inbox.values())  # all that was sent was received in the same step
    return played


@in_one_item(SHAPES)
def test_training_by_its_schedule(shape: tuple[int, int]) -> None:
    micro_batches, stages = shape
    for place, stage in enumerate(played(schedule.TrainSchedule, micro_batches, stages)):
        assert stage.done["ForwardPass"] == stage.done["BackwardPass"] == micro_batches
        assert stage.done["OptimizerStep"] == stage.done["ReduceGrads"] == 1
        assert stage.done["ReduceTiedGrads"] == 1
        assert stage.done["SendActivation"] == micro_batches * (place < stages - 1)
        assert stage.done["SendGrad"] == micro_batches * (place > 0)
        plan = stage.plan
        assert len(list(plan)) == 2 * (micro_batches + stages - 1)
        assert (plan.is_first_stage, plan.is_last_stage) == (place == 0, place == stages - 1)
        assert (plan.stage, plan.num_stages) == (place, stages)
        assert plan.num_micro_batches == micro_batches


@in_one_item(SHAPES)
def test_forwards_by_their_schedule(shape: tuple[int, int]) -> None:
    micro_batches, stages = shape
    for stage in played(schedule.InferenceSchedule, micro_batches, stages):
        assert stage.done["ForwardPass"] == micro_batches
        assert not stage.done["BackwardPass"] and not stage.done["OptimizerStep"]
        assert len(list(stage.plan)) == micro_batches + stages - 1
    assert repr(schedule.SendGrad(1)) == "SendGrad(buffer_id=1)"
    assert schedule.PipeInstruction(place=3).place == 3
    assert schedule.PipeSchedule.num_pipe_buffers(schedule.TrainSchedule(2, 1, 0)) == 2

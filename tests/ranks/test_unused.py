"""Parameters that no rank has used in a step: weight and state stay as they are, as where plain
PyTorch finds no gradient; ``optimizer.state_dict()`` kept in memory and loaded again, where
segments were cut otherwise then. Blocks that ranks use in other orders, and others in later steps.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.offload.update import StagedCopies
from hf_zero.ops import dispatch
from hf_zero.optim import Adafactor
from hf_zero.zero.gather.merged_orders import merged
from hf_zero.zero.layout import wrap
from hf_zero.zero.state_entries import EngineState
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.checked_triton import checked_triton
from tests.helpers.engines import (
    OnEngine,
    config_of,
    engine_opener,
    full_weights,
    start,
    train_on_threads,
)
from tests.helpers.models import Block, features, floats, seeded
from tests.helpers.offloads import DEVICE, offload
from tests.helpers.optimizers import OF_GROUPS
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks
from tests.helpers.training import At, Job, Plan, trainable
from tests.ranks.cases import values_of

HEADS = 4
MAKES = {**OF_GROUPS, "adafactor": lambda groups: Adafactor(groups, lr=1e-2, relative_step=False)}


class Heads(nn.Module):
    """A block that is always used, and heads of which a call uses those it names."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(7, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(16, 5) for _ in range(HEADS))
        self.late = nn.ModuleList(Block(16) for _ in range(2))  # one of them from the third step on

    def forward(self, x, heads, late):
        for block in self.blocks:
            x = block(x) if x.shape[-1] == 16 else block(self.enter(x))
        if late:
            x = self.late[0](x)
        return sum((self.heads[head](x) for head in heads), torch.zeros(5))


@dataclass
class HeadsJob(Job):
    """Each step has another head of all ranks, and one of the last rank's last micro-batch."""

    kind: str = "adamw"
    ranks: int = 2
    accumulation: int = 1

    def __post_init__(self):
        self.name = f"heads {self.kind}"

    def build(self):
        return seeded(Heads)

    def optimizer(self, model):
        """Two groups, so that units have several segments."""
        thick = [p for p in trainable(model) if p.ndim > 1]
        return MAKES[self.kind](
            [{"params": thick}, {"params": [p for p in trainable(model) if p.ndim < 2], "lr": 2e-3}]
        )

    def loss(self, net, at):
        heads = [at.step % HEADS]
        if at.rank == self.ranks - 1 and at.micro == self.accumulation - 1:
            heads.append((at.step + 1) % HEADS)
        x = features(at.step, at.micro, at.rank).to(net.dtype)
        return net(x, tuple(heads), at.step >= 2).float().pow(2).mean()


def check(kind, plan, stage, **more):
    job = HeadsJob(kind, plan.ranks, plan.accumulation)
    oracle.accept(train_on_threads(job, plan, engine_opener(stage, **more)), job, plan, stage)


REPLICAS = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}


@in_turn(
    "kind, plan, stage, more",
    [
        ("adamw", Plan(3, 5, 3, clip=0.5), 1, {}),
        ("adamw", Plan(4, 5), 3, REPLICAS),
        ("adamw", Plan(2, 5, precision="fp16", clip=1.0), 2, {}),
        *((kind, Plan(2, 5, clip=1.0), 3, {}) for kind in ("sgd", "lamb")),
    ],
)
def test_an_unused_parameter_is_left_as_it_is(kind, plan, stage, more):
    check(kind, plan, stage, **more)


class Ways(nn.Module):
    """Blocks in the order that a call names."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, x, order):
        for number in order:
            x = x + torch.tanh(self.blocks[number](x))
        return x


# the blocks of each step, of all ranks but the last one, and of the last one
SAME = range(8)
ORDERS = {
    "another order on one rank": [(SAME, SAME), (SAME, SAME[::-1]), (SAME, (5, 1, 7, 0))],
    "blocks that no rank has used before": [((0, 3), (2, 7)), (SAME, (1, 2, 4)), ((6,), SAME)],
    "a block of two calls": [(SAME, SAME), (SAME, (0, 7, 1, 2, 0)), ((7, 1, 7), (0, 5, 0))],
    "any blocks, some of them again": None,
}


@dataclass
class WaysJob(Job):
    name: str
    ranks: int = 2

    def build(self):
        return seeded(Ways)

    def loss(self, net, at):
        orders, draw = ORDERS[self.name], random.Random(hash((24, at.step, at.micro, at.rank)))
        order = [draw.randrange(12) for _ in range(draw.randint(1, 15))]
        if orders is not None:
            order = orders[at.step % 3][at.rank == self.ranks - 1]
        return net(floats(at.step, at.micro, at.rank, 3, 16), order).pow(2).mean()


NODES = {"stage3_prefetch_bucket_size": 300, "zero_hpz_partition_size": 2}


@pytest.mark.parametrize(
    "ways",
    [*({"stage3_prefetch_bucket_size": ahead} for ahead in (0, 300, 50_000)), NODES],
    ids=str,
)
@pytest.mark.parametrize("name", [*ORDERS])
def test_ranks_take_other_ways_through_the_model(name, ways, monkeypatch):
    """More reductions than may be in flight: a rank waits for one before its backward is over."""
    monkeypatch.setattr(wrap, "GRANULARITY", 0)
    monkeypatch.setattr(wrap, "PERSISTENCE", 0)
    ranks = 2 if ORDERS[name] and ways is not NODES else 4
    job, plan, zero = WaysJob(name, ranks), Plan(ranks, 6), {"stage": 3, "reduce_bucket_size": 0}
    zero |= ways
    opener = engine_opener(3, zero_optimization=zero)
    oracle.accept(train_on_threads(job, plan, opener, timeout=60), job, plan, 3)


def test_orders_of_ranks_are_merged_where_the_model_has_them():
    orders = [[8, 5, 2], [8, 3], [7, 5, 3], [9, 8, 7, 6, 5, 4, 3, 2]]
    assert merged(orders, lambda item: -item) == [9, 8, 7, 6, 5, 4, 3, 2]
    assert merged([[1, 3, 1], [2, 3]], lambda item: item) == [1, 2, 3, 1]
    assert merged([[3, 1], [2]], lambda item: item) == [2, 3, 1]


def test_in_one_launch(monkeypatch):
    """The kernels that update all segments, in the checked interpreter."""
    monkeypatch.setattr(dispatch, "wanted", lambda name, kernels, device: dispatch.runs_on(device))
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    with checked_triton(poison=False):
        check("lion", Plan(2, 5, precision="bf16"), 2)


OFFLOADED = [
    ("optimizer on cpu", "adamw", 2, {"update_in_backward": True}),
    ("optimizer in files", "lion", 1, {}),
    ("half on cpu", "adamw", 3, {}),
    ("all in files", "adagrad", 3, {}),
]


@in_turn("way, kind, stage, more", OFFLOADED)
def test_offloaded(way, kind, stage, more, tmp_path):
    """Pieces are small, so that some hold used and unused parameters."""
    section = offload(way, stage, tmp_path, **more, **{"buffer_size": 512})
    check(kind, Plan(2, 5), stage, zero_optimization=section)


def test_memory_for_copies_to_a_device_gets_all_values(tmp_path, monkeypatch):
    """It holds others before, unlike a shard in host memory."""

    def output_for(self, flat, start, stop):
        return torch.full((stop - start,), 7.0, dtype=flat.dtype)

    def finish_output(self, flat, start, stop, values):
        flat.store_shard(values, start, waited=True)

    monkeypatch.setattr(StagedCopies, "output_for", output_for)
    monkeypatch.setattr(StagedCopies, "finish_output", finish_output)
    section = offload("optimizer on cpu", 2, tmp_path, buffer_size=512)
    check("adamw", Plan(2, 5), 2, zero_optimization=section)


class Skipping(nn.Module):
    """Blocks, each a unit, of which a call leaves out one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x: torch.Tensor, skipped: int | None) -> torch.Tensor:
        for place, block in enumerate(self.blocks):
            x = x if place == skipped else block(x)
        return x.square().mean()


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights, biases = (
        [p for p in model.parameters() if (p.ndim > 1) is of] for of in (True, False)
    )
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], 1e-2)


WAYS = [
    (("optimizer on cpu", DEVICE), False),
    (("half on cpu", "optimizer in files"), False),
    ((DEVICE, DEVICE), True),
]


@in_turn("ways, launched", WAYS)
@in_turn("skipped", [(0, None), (None, 1, 1, None)])
def test_a_whole_unit_that_steps_leave_out_is_saved_with_its_steps(
    ways, launched, skipped, tmp_path, monkeypatch
):
    """Also if one launch updates all segments, by its reference."""
    monkeypatch.setattr(dispatch, "wanted", lambda name, *_: launched and name == "optimizer")
    stage = 3 if launched else 2
    plain, folder = seeded(Skipping), str(tmp_path / "saved")
    optimizer = two_groups(plain)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for place in skipped:
        plain(x, place).backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(rank, model, part):
        config = config_of(stage, zero_optimization=offload(ways[part], stage, tmp_path))
        engine = start(model, two_groups(model), config)
        if part:
            engine.load_checkpoint(folder)
        for place in skipped[-1:] if part else skipped[:-1]:
            engine.backward(engine(x, place))
            engine.step()
        if not part:
            engine.save_checkpoint(folder)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    for part in range(2):
        (weights, _) = on_ranks(2, run, part, build=lambda: seeded(Skipping))
    oracle.compare_tensors("weights", weights, plain.state_dict(), floor=oracle.ADAM_ROUNDING)


RANKS = 2


def plain_run(job):
    """One process with whole parameters: its optimizer, a step, its weights, its end."""
    model = job.build()
    model.dtype, optimizer = torch.float32, job.optimizer(model)

    def step(number):
        for rank in range(RANKS):
            (job.loss(model, At(number, 0, rank)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step, lambda: values_of(model), lambda: None


def run_on_rank(job, model, section, rank):
    config = config_of(section["stage"], Plan(RANKS), zero_optimization=section)
    engine = start(model, job.optimizer(model), config)
    net = OnEngine(engine, Plan(RANKS))

    def step(number):
        engine.backward(job.loss(net, At(number, 0, rank)))
        engine.step()

    return engine.optimizer, step, net.weights, net.close


def course(opened):
    """Weights after a run that loads coarser snapshots, and one that begins with a finer one."""
    optimizer, make_step, weights, close = opened(0)
    kept, found = {-1: copy.deepcopy(optimizer.state_dict())}, []
    for step in range(6):
        make_step(step)
        kept[step] = copy.deepcopy(optimizer.state_dict())
        if step in (1, 4):
            optimizer.load_state_dict(copy.deepcopy(kept[-1 if step == 1 else 2]))
    found.append(weights())
    close()
    optimizer, make_step, weights, close = opened(1)
    optimizer.load_state_dict(copy.deepcopy(kept[3]))
    for step in range(2):
        make_step(step)
    found.append(weights())
    close()
    return found


def goes_back(kind, *sections):
    """``sections`` are those of the first run and of the second."""
    job = HeadsJob(kind, RANKS)
    want = course(lambda which: plain_run(job))
    models = [[job.build() for _ in range(2)] for _ in range(RANKS)]

    def on_rank(rank):
        return course(lambda which: run_on_rank(job, models[rank][which], sections[which], rank))

    for got in run_ranks(RANKS, on_rank):
        for which, (mine, plain) in enumerate(zip(got, want, strict=True)):
            oracle.compare_tensors(f"run {which}", mine, plain, floor=oracle.ADAM_ROUNDING)


CPU, FILES = "optimizer on cpu", "optimizer in files"
WHOLE = "stage3_param_persistence_threshold"
SOME, ALL = 40, 10**6  # elements up to which parameters stay whole at stage 3


@in_turn(
    "kind, stages, ways, whole",
    [
        # a rank has the same elements at stages 1 to 3
        ("unfused", (3, 1), (DEVICE, DEVICE), (0, 0)),
        # ranks exchange what they keep; parameters that had made other steps keep their counts
        ("adamw", (3, 3), (DEVICE, DEVICE), (SOME, 0)),
        ("sgd", (1, 3), (DEVICE, DEVICE), (0, SOME)),
        ("lamb", (3, 3), (DEVICE, DEVICE), (0, ALL)),
        ("adafactor", (3, 3), (DEVICE, DEVICE), (SOME, 0)),  # with the factors of whole tensors
        ("nadam", (2, 2), (CPU, CPU), (0, 0)),
        ("adagrad", (3, 3), ("half on cpu", "all in files"), (0, 0)),
        ("adamw", (3, 3), (FILES, CPU), (0, ALL)),
    ],
)
def test_a_snapshot_is_loaded_whatever_was_cut_since(kind, stages, ways, whole, tmp_path):
    """Pieces are small, so that segments are cut at their ends, too."""
    sections = [
        offload(way, stage, tmp_path, buffer_size=512) | {WHOLE: threshold}
        for stage, way, threshold in zip(stages, ways, whole)
    ]
    goes_back(kind, *sections)


def test_saves_and_reports_have_the_count_of_each_parameter(tmp_path):
    """Also of those that have elements on one rank alone, whose others have made other steps."""
    job, plain = HeadsJob("adamw", RANKS), seeded(Heads)
    plain.dtype, optimizer = torch.float32, job.optimizer(plain)
    for number in range(3):
        for rank in range(RANKS):
            (job.loss(plain, At(number, 0, rank)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = {
        name: {"step": float(optimizer.state[p]["step"])} if p in optimizer.state else None
        for name, p in plain.named_parameters()
    }
    assert {1.0, 3.0} < {of["step"] for of in steps.values() if of} and None in steps.values()
    loaded = {name: {"step": 5.0} for name in steps} | {
        "heads.0.bias": None,
        "enter.weight": {"step": 2.0},
    }

    def run(rank, model):
        engine = start(model, job.optimizer(model), config_of(2, Plan(RANKS)))
        net = OnEngine(engine, Plan(RANKS))
        for number in range(3):
            engine.backward(job.loss(net, At(number, 0, rank)))
            engine.step()
        engine.save_checkpoint(tmp_path, "saved")
        names, reports = {name: name for name in steps}, list[dict[str, Any]]()
        reports.append(EngineState(engine).scalars(names))
        engine.bound.state.scalars.load(loaded)
        reports.append(EngineState(engine).scalars(names))
        engine.destroy()
        return reports

    assert on_ranks(RANKS, run, build=lambda: seeded(Heads)) == [[steps, loaded]] * RANKS
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    saved = {
        name: group.get("apart", {}).get(name, group["scalars"]) or None
        for group in manifest["optimizer"]["groups"]
        for name in group["parameters"]
    }
    assert saved == steps


def test_elements_of_another_rank_and_other_groups_are_refused():
    job = HeadsJob("adamw", RANKS)
    dicts: list[dict[str, Any]] = [{}] * RANKS

    def on_rank(rank, model):
        optimizer, step, _, close = run_on_rank(job, model, {"stage": 2}, rank)
        step(0)
        dicts[rank] = copy.deepcopy(optimizer.state_dict())
        step(1)
        with pytest.raises(UnsupportedOptimizerError, match="saved by another rank"):
            optimizer.load_state_dict(copy.deepcopy(dicts[1 - rank]))
        swapped = copy.deepcopy(dicts[rank])
        swapped["segments"]["parts"].reverse()
        swapped["param_groups"].reverse()
        last = len(swapped["segments"]["parts"]) - 1
        swapped["state"] = {last - number: entry for number, entry in swapped["state"].items()}
        with pytest.raises(UnsupportedOptimizerError, match="groups it was saved with"):
            optimizer.load_state_dict(swapped)
        plain = {"state": {}, "param_groups": [{"params": [*range(9)]}] * 2}
        with pytest.raises(UnsupportedOptimizerError, match=r"\[9, 9\] parameters a group cannot"):
            optimizer.load_state_dict(plain)
        close()

    on_ranks(RANKS, on_rank, build=job.build)


def test_other_parameters_stay_whole_of_another_number_of_ranks():
    """A rank's dict alone: elements are missing, or their state is of whole tensors."""
    job = HeadsJob("adamw", RANKS)
    dicts: list[dict[str, Any]] = [{}] * RANKS

    def saved(rank, model):
        optimizer, step, _, close = run_on_rank(job, model, {"stage": 3, WHOLE: 0}, rank)
        step(0)
        dicts[rank] = copy.deepcopy(optimizer.state_dict())
        close()

    def loaded(rank, model, given, message):
        optimizer, _, _, close = run_on_rank(job, model, {"stage": 3, WHOLE: ALL}, rank)
        with pytest.raises(UnsupportedOptimizerError, match=message):
            optimizer.load_state_dict(copy.deepcopy(given or dicts[rank]))
        close()

    on_ranks(RANKS, saved, build=job.build)
    said = "saved on another number of ranks"
    on_ranks(RANKS, loaded, dicts[0], said, build=job.build)
    for entry in dicts[1]["state"].values():
        entry["rows"] = torch.ones(2)
    on_ranks(RANKS, loaded, None, "'rows' is of whole tensors", build=job.build)


# the heads that each step uses, and whether it uses the late block
USES = [((0, 1, 2), True), ((0,), True), ((2,), False), ((3,), False), ((0, 3), True)]
ZEROS = [
    (1, 0, {}),
    (2, 1, {}),
    (2, 2, {}),
    (2, 3, {}),
    (2, 3, {"offload_optimizer": {"device": "cpu"}}),
    (2, 3, {"update_in_backward": True}),
]


def step_over_zeros(model, optimizer, backward, step, drops, reload=None):
    """Train: a backward is dropped if the script ``drops`` any, and a gradient between the second
    backward and its step. Gradients are set to zeros after steps, one of them to None, those of the
    fourth step to None. Parameters are frozen in the third step, another one unfrozen. ``reload``,
    if given, saves and loads after the other steps.
    """
    for number, (heads, late) in enumerate(USES):
        backward(number, heads, late)
        if drops and number == 0:
            model.zero_grad(set_to_none=False)
            backward(number, heads[:2], late)
        if drops and number == 1:
            model.blocks[0].up.weight.grad = None
            model.blocks[0].up.weight.requires_grad_(False)
        step()
        optimizer.zero_grad(set_to_none=number == 3)
        if number == 1:
            model.heads[1].weight.grad = None
            model.blocks[0].up.bias.requires_grad_(False)
            model.heads[3].bias.requires_grad_(True)
        elif reload is not None:  # the load of step 1 would drop the state of what is frozen then
            reload()


@in_turn("world, stage, zero", ZEROS)
def test_gradients_that_are_set_to_zeros_count_as_used(world, stage, zero, tmp_path):
    def loss(net, step, rank, heads, late):
        return net(features(step, 0, rank), heads, late).pow(2).mean()

    def build():
        model = seeded(Heads)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        model.heads[3].bias.requires_grad_(False)
        return model, optimizer

    plain, optimizer = build()

    def backward(step, heads, late):
        for rank in range(world):
            (loss(plain, step, rank, heads, late) / world).backward()

    drops = "update_in_backward" not in zero
    step_over_zeros(plain, optimizer, backward, optimizer.step, drops)

    def train_on(rank):
        config = config_of(stage)
        config["zero_optimization"] |= zero
        engine = start(*build(), config)

        def backward(step, heads, late):
            engine.backward(loss(engine, step, rank, heads, late))

        def reload():
            engine.save_checkpoint(tmp_path / str(engine.global_steps))
            engine.load_checkpoint(tmp_path / str(engine.global_steps))

        loads = reload if drops else None
        step_over_zeros(engine.module, engine.optimizer, backward, engine.step, drops, loads)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    for weights in run_ranks(world, train_on):
        compare_tensors("weights", weights, values_of(plain))

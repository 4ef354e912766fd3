"""Parameters that no rank has used in a step: weight and state stay as they are, as where plain
PyTorch finds no gradient.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hf_zero.ops import dispatch
from hf_zero.zero.reduce.norm import Usage
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.checked_triton import checked_triton
from tests.helpers.engines import (
    STAGES,
    OnEngine,
    config_of,
    engine_opener,
    start,
    train_on_threads,
)
from tests.helpers.models import Block, features, seeded
from tests.helpers.offloads import offload
from tests.helpers.optimizers import OF_GROUPS
from tests.helpers.ranks import run_ranks
from tests.helpers.training import At, Job, Plan, merge, train, trainable

HEADS = 4


class Heads(nn.Module):
    """A block that is always used, and heads of which a call uses those it names; [rows, 7] ->
    [rows, 5].
    """

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
    """In each step another pair of heads: one that all ranks use in all micro-batches, one that
    the last rank uses in the last.
    """

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
        return OF_GROUPS[self.kind](
            [{"params": thick}, {"params": [p for p in trainable(model) if p.ndim < 2], "lr": 2e-3}]
        )

    def loss(self, net, at):
        heads = [at.step % HEADS]
        if at.rank == self.ranks - 1 and at.micro == self.accumulation - 1:
            heads.append((at.step + 1) % HEADS)
        x = features(at.step, at.micro, at.rank).to(net.dtype)
        return net(x, tuple(heads), at.step >= 2).float().pow(2).mean()


def check(kind, plan, opener, stage):
    job = HeadsJob(kind, plan.ranks, plan.accumulation)
    oracle.accept(train_on_threads(job, plan, opener), job, plan, stage)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks, accumulation", [(1, 1), (2, 3), (3, 1)])
def test_an_unused_parameter_is_left_as_it_is(stage, ranks, accumulation):
    plan = Plan(ranks, 5, accumulation, clip=0.5 if ranks == 3 else 0.0)
    check("adamw", plan, engine_opener(stage), stage)


@pytest.mark.parametrize(
    "kind, stage",
    fast(itertools.product(OF_GROUPS, STAGES), lambda kind, stage: stage == 3 and kind != "adamw"),
)
def test_by_every_optimizer(kind, stage):
    check(kind, Plan(2, 5, clip=1.0), engine_opener(stage), stage)


@pytest.mark.parametrize("precision, stage", [("bf16", 1), ("bf16", 3), ("fp16", 0), ("fp16", 2)])
def test_in_16_bits(precision, stage):
    check("adamw", Plan(2, 5, precision=precision, clip=1.0), engine_opener(stage), stage)


def test_across_replicas():
    more = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    check("adamw", Plan(4, 5), engine_opener(3, **more), 3)


@pytest.mark.parametrize(
    "kind, precision, stage",
    [
        ("adamw", "bf16", 3),
        ("lion", "bf16", 2),
        pytest.param("adamw", "fp32", 3, marks=pytest.mark.long),
        pytest.param("adamw", "bf16", 1, marks=pytest.mark.long),
    ],
)
def test_in_one_launch(kind, precision, stage, monkeypatch):
    """The kernels that update all segments, in the checked interpreter."""
    monkeypatch.setattr(dispatch, "wanted", lambda name, kernels, device: dispatch.runs_on(device))
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    with checked_triton(poison=False):
        check(kind, Plan(2, 5, precision=precision), engine_opener(stage), stage)


OFFLOADED = [
    ("optimizer on cpu", "adamw", 1, {}),
    ("optimizer on cpu", "adamw", 2, {"update_in_backward": True}),
    ("optimizer on cpu", "adamw", 3, {"update_in_backward": True}),
    ("optimizer on cpu", "rmsprop", 3, {}),
    ("optimizer on cpu", "sgd", 3, {}),
    ("optimizer in files", "lion", 2, {}),
    ("half on cpu", "adamw", 3, {}),
    ("all in files", "adagrad", 3, {}),
]


@pytest.mark.parametrize("way, kind, stage, more", OFFLOADED, ids=lambda value: str(value))
def test_offloaded(way, kind, stage, more, tmp_path):
    """Pieces are small, so that some hold used and unused parameters."""
    section = offload(way, stage, tmp_path, **more, **{"buffer_size": 512})
    check(kind, Plan(2, 5), engine_opener(stage, zero_optimization=section), stage)


def test_moments_in_8_bits(tmp_path):
    """Blocks of 8-bit moments are shared by used and unused parameters: weights stay as they
    are, moments within their rounding.
    """
    job = HeadsJob("adamw", 1)
    section = offload("optimizer on cpu", 2, tmp_path, moments="int8", buffer_size=512)

    def run(rank, model):
        engine = start(
            model, job.optimizer(model), config_of(2, Plan(1), zero_optimization=section)
        )
        net = OnEngine(engine, Plan(1))

        def step(number):
            net.backward(job.loss(net, At(number, 0, 0)))
            engine.step()
            return {
                flat.key: {
                    name: t.clone()
                    for name, t in engine.bound.tensors(flat.optimizer_shard).items()
                }
                for flat in engine.flats
            }

        step(0)
        before, after = step(1), step(2)  # with heads 2 and 3, and not 0 and 1
        for flat in engine.flats:
            for slot in flat.layout.slots:
                was, now = (
                    {n: t[slot.offset : slot.end] for n, t in states[flat.key].items()}
                    for states in (before, after)
                )
                unused = slot.name.startswith(("heads.0", "heads.1", "late.1"))
                assert torch.equal(now["master"], was["master"]) == unused, slot.name
                if unused:
                    assert (now["exp_avg"] - was["exp_avg"]).abs().max() <= after[flat.key][
                        "exp_avg"
                    ].abs().max() / 10
        engine.destroy()

    model = job.build()
    run_ranks(1, lambda rank: run(rank, model))


def test_a_rank_that_has_used_everything_reads_nothing(monkeypatch):
    """On a GPU that would wait for the device in every step."""
    job = HeadsJob()
    monkeypatch.setattr(Usage, "_read", None)
    monkeypatch.setattr(
        job,
        "loss",
        lambda net, at: net(features(at.step, 0, at.rank), tuple(range(HEADS)), True).pow(2).mean(),
    )

    def run(rank, model):
        for block in list(model.late)[1:]:
            block.requires_grad_(False)
        session = OnEngine(start(model, job.optimizer(model), config_of(3)), Plan(2))
        trace = train(session, job, Plan(2), rank)
        session.close()
        return trace

    models = [job.build() for _ in range(2)]
    merge(run_ranks(2, lambda rank: run(rank, models[rank])))


@pytest.mark.parametrize("kind, stages, ranks, ways", [
    ("adamw", (3, 1), (2, 2), (None, None)),
    ("adamw", (2, 3), (2, 3), (None, "optimizer on cpu")),
    ("nadam", (1, 3), (3, 1), (None, None)),
    ("sgd", (3, 2), (1, 2), ("optimizer on cpu", None)),
])  # fmt: skip
def test_step_counts_that_differ_are_saved_and_loaded(kind, stages, ranks, ways, tmp_path):
    """The window is that of six micro-batches however many ranks there are."""
    job = HeadsJob(kind, 1, 6)
    want = oracle.run(job, Plan(1, 6, 6))

    def opened(model, which):
        more = (
            {}
            if ways[which] is None
            else {
                "zero_optimization": offload(ways[which], stages[which], tmp_path, buffer_size=512)
            }
        )
        return start(
            model,
            job.optimizer(model),
            config_of(stages[which], Plan(ranks[which], accumulation=6 // ranks[which]), **more),
        )

    def steps(engine, rank, which, numbers):
        net, each = OnEngine(engine, Plan()), 6 // ranks[which]
        for step in numbers:
            for micro in range(each):
                net.backward(job.loss(net, At(step, rank * each + micro, 0)))
                engine.step()
        return net.weights()

    def first(rank, model):
        engine = opened(model, 0)
        steps(engine, rank, 0, range(4))
        engine.save_checkpoint(str(tmp_path / "run"))
        engine.destroy()

    def second(rank, model):
        engine = opened(model, 1)
        engine.load_checkpoint(str(tmp_path / "run"))
        weights = steps(engine, rank, 1, range(4, 6))
        engine.destroy()
        return weights

    for which, each in enumerate((first, second)):
        models = [job.build() for _ in range(ranks[which])]
        got = run_ranks(
            ranks[which],
            functools.partial(lambda each, models, rank: each(rank, models[rank]), each, models),
        )
    oracle.compare_tensors("weights", got[0], want.weights, floor=oracle.ADAM_ROUNDING)

"""Communication: number, order and bytes of the collectives of a step are those of the stage
table. Host synchronizations of a step: none where no number was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.device import kinds, streams
from tests.helpers.accelerators import PlayedStream, play_streams
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.models import ARCHITECTURES, Architecture, Stack, seeded, tokens
from tests.helpers.stacks import on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, sgd

RANKS, STEPS = 2, 3
PARAMETERS = 22  # of a Stack with three blocks
UNITS = 4  # its blocks, and the root, which holds the entrance and the head
OF_NUMBERS = ("gradient norm", "used parameters")


def last_step(stage, plan):
    """The log of the last step, [(operation, key, bytes)], and the size of each unit's flats."""

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, plan))
        for number in range(STEPS):
            engine.mesh.stats.keep_log = number == STEPS - 1
            engine.mesh.stats.log.clear()
            run_steps(engine, rank, [number], plan.accumulation)
        padded = {flat.key: flat.layout.padded for flat in engine.flats}
        return list(engine.mesh.stats.log), padded

    answers = on_ranks(RANKS, run)
    assert all(answer == answers[0] for answer in answers), "ranks issued different collectives"
    return answers[0]


def counted(log):
    return Counter(operation for operation, key, _ in log if key not in OF_NUMBERS)


@in_turn(
    "stage, accumulation, precision",
    [(0, 1, "bf16"), (1, 3, "fp16"), (2, 3, "fp32"), (3, 3, "bf16")],
)
def test_numbers_and_bytes(stage, accumulation, precision):
    plan = Plan(accumulation=accumulation, precision=precision)
    log, padded = last_step(stage, plan)
    size = plan.dtype.itemsize
    whole = sum(padded.values()) * size
    # The root and the last block stay gathered from forward to backward.
    gathers = {0: 0, 1: UNITS, 2: UNITS, 3: accumulation * (2 * UNITS - 2)}[stage]
    reductions = UNITS * (accumulation if stage >= 2 else 1)
    reduction = "all_reduce" if stage == 0 else "reduce_scatter"
    assert counted(log) == Counter({"all_gather": gathers, reduction: reductions}) + Counter()
    # One small sum a step: the norm where it is sharded, and with it, a digit each, which
    # parameters have a gradient. five ranks can be told apart in 22 digits of a number that is
    # exact up to 2^53; two numbers compare the settings of the ranks
    words = (-(-PARAMETERS // 22) + 2) * 8
    sums = [(key, nbytes) for _, key, nbytes in log if key in OF_NUMBERS]
    assert sums == [("used parameters", words) if stage == 0 else ("gradient norm", 8 + words)]

    moved = Counter()
    for operation, key, nbytes in log:
        moved[operation] += nbytes * (key != "used parameters")
    assert moved[reduction] == whole * (accumulation if stage >= 2 else 1)
    if stage in (1, 2):
        assert moved["all_gather"] == whole
    if stage == 3:
        stays = [
            n * size for key, n in padded.items() if key.startswith(("|", "(root)", "blocks.2"))
        ]
        assert moved["all_gather"] == accumulation * (2 * whole - sum(stays))


def test_a_recorded_step_at_stage_3():
    """Gathers run ahead, few units are whole at once, and ranks agree on nothing."""
    depth, seen = 8, []

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        stats, gathers, asked = engine.mesh.stats, engine.mesh.consensus.gathers, []
        settle = gathers.agree
        gathers.agree = lambda *args, **kwargs: (asked.append(args), settle(*args, **kwargs))[1]
        stats.keep_log = True

        def compute(key):
            stats.log.append(("compute", key, 0))
            seen.append(sum(flat.full.untyped_storage().size() > 0 for flat in engine.flats))

        for index, block in enumerate(model.blocks):
            block.norm.register_forward_pre_hook(lambda *_, key=f"blocks.{index}": compute(key))
        agreed = []
        for number in range(4):
            stats.log.clear()
            run_steps(engine, rank, [number])
            agreed.append(len(asked))
        assert agreed[0] > 0 and agreed[1] == agreed[3], f"agreements after each step: {agreed}"
        return [each[:2] for each in stats.log]

    log, other = on_ranks(2, run, build=lambda: seeded(lambda: Stack(depth)))
    assert log == other, "ranks issued different collectives"
    assert max(seen) <= 4, f"flats that were whole at once: {seen}"
    blocks = [f"blocks.{i}" for i in range(depth)]
    gathered = [key for operation, key in log if operation == "all_gather"]
    assert gathered == ["(root)", *blocks, *blocks[-2::-1]]
    reduced = [key.split("|")[0] for operation, key in log if operation == "reduce_scatter"]
    assert reduced[:depth] == blocks[::-1] and len(reduced) == depth + 1
    operations = [operation for operation, _ in log]
    assert "all_gather" in operations[operations.index("reduce_scatter") :]
    for index in (0, 1):
        ahead = log.index(("all_gather", f"blocks.{index + 1}"))
        assert ahead < log.index(("compute", f"blocks.{index}"))


def test_evaluation_gathers_each_unit_once():
    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        engine.eval()
        for number in range(3):
            engine.mesh.stats.counts.clear()
            with torch.no_grad():
                squared(engine, At(number, 0, rank))
        return dict(engine.mesh.stats.counts)

    assert on_ranks(2, run) == [{"all_gather": 4}] * 2


class Net(nn.Module):
    """Its second layer runs on ``side``, if there is one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.side: Any = None

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            with streams.on_stream(self.side if index == 1 else None):
                x = layer(x).tanh()
        return x.sum()


@in_turn("stage, accumulation", [(1, 2), (2, 1)])
def test_gradients_are_taken_in_after_the_stream_that_accumulated_them(
    stage, accumulation, monkeypatch
):
    net = Net()
    engine = start(net, sgd(net), config_of(stage, Plan(accumulation=accumulation)))
    played = play_streams(monkeypatch)
    net.side = PlayedStream(played.log, "side")
    monkeypatch.setattr(kinds, "is_synchronous", lambda device: False)
    for unit in engine.units:
        unit.streams.device = engine.device
    loss = engine(torch.randn(2, 64))
    played.log.clear()
    # autograd's thread is this one, and its current stream the one of the caller
    engine.backward(loss)
    assert played.log.count(("compute", "waits for", "side")) >= 1
    monkeypatch.undo()
    engine.destroy()


SCALAR = "_local_scalar_dense"
CPU = {"device": "cpu"}
OPTIMIZER: dict[str, Any] = {"offload_optimizer": CPU}
ALL: dict[str, Any] = {"offload_optimizer": CPU, "offload_param": CPU}
MEASURES = {
    "metrics": {"enabled": True},
    "comms_logger": {"enabled": True},
    "wall_clock_breakdown": True,
}


def with_mask(step, micro, rank):
    """Given a mask, models of transformers read back whether it masks anything, by their file."""
    ids = tokens(step, micro, rank)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def syncs_of(rank, model, config):
    """The third step of two micro-batches, when orders have been recorded and states made."""
    engine = start(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    for step in range(3):
        with HostSyncs() as syncs:
            if isinstance(model, Stack):
                run_steps(engine, rank, [step], 2)
                continue
            for micro in range(2):
                engine.backward(engine(**with_mask(step, micro, rank)).loss)
                engine.step()
    engine.destroy()
    return syncs


ONE, TWO = {f"optimizer_step.py: {SCALAR}": 1}, {f"optimizer_step.py: {SCALAR}": 2}


BERT = Architecture("bert", ARCHITECTURES["bert"].make, with_mask).build


@in_turn(
    "build, stage, precision, clip, offload, more, expected",
    [  # one: whether the step overflowed, or the divisor for the host's update
        (BERT, 3, "fp16", 1.0, {}, {}, ONE),
        (stack, 3, "bf16", 1.0, ALL, {}, ONE),
        (stack, 1, "fp16", 1.0, OPTIMIZER, {}, TWO),
        (stack, 2, "fp32", 1.0, {}, {}, {}),
        (stack, 1, "fp32", 0.0, {}, {}, {}),  # nor is a norm read
        # on a host figures are read as the step ends, at once
        (stack, 3, "fp32", 0.0, {}, MEASURES, {"figures.py: tolist": 1}),
    ],
)
def test_the_engine_reads_nothing_back(build, stage, precision, clip, offload, more, expected):
    config = config_of(stage, Plan(accumulation=2, clip=clip, precision=precision), **more)
    config["zero_optimization"].update(offload)
    theirs = {f"masking_utils.py: {SCALAR}": 2} if build is BERT else {}
    for syncs in on_ranks(2, syncs_of, config, build=build):
        engine = syncs.of("hf_zero")
        if offload:  # step counters of states that are in host memory
            engine.pop(f"offloaded_state.py: {SCALAR}", None)
        assert engine == Counter(expected)
        assert syncs.of("transformers") == theirs
        assert {owner for owner, _, _ in syncs.found} <= {"hf_zero", "transformers"}


X = torch.arange(6.0)
WAITS: dict[str, Callable[[], Any]] = {
    "_local_scalar_dense": lambda: X.sum().item(),
    "nonzero": lambda: X.nonzero(),
    "index": lambda: X[X > 2],
    "index_put_": lambda: X.clone().__setitem__(X > 9, torch.ones(0)),
    "tolist": lambda: X.tolist(),
    "repeat_interleave": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
}


@in_turn("name", WAITS)
def test_what_waits_is_counted(name):
    with HostSyncs() as syncs:
        WAITS[name]()
    assert syncs.found == {("tests", "test_collectives.py", name): 1}

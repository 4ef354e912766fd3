"""Small blocks that share a unit: what travels, and that nothing else changes."""

import gc
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.zero.layout import wrap
from hf_zero.zero.layout.parameter import WatchedParameter
from hf_zero.zero.layout.wrap import find_units
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import (
    STAGES,
    OnEngine,
    config_of,
    engine_opener,
    full_weights,
    start,
    train_on_threads,
)
from tests.helpers.models import Stack, features, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw
from tests.helpers.ways import WAYS

BLOCK = sum(p.numel() for p in Stack(1).blocks[0].parameters())


def joined(stage, blocks, **more):
    return {
        "zero_optimization": {"stage": stage, "stage3_module_granularity_threshold": blocks * BLOCK}
    } | more


def test_consecutive_blocks_are_joined_up_to_the_threshold():
    def units(granularity):
        return [spec.paths for spec in find_units(model, granularity)[0]]

    model = Stack(5)
    alone = [("",), *((f"blocks.{i}",) for i in range(5))]
    assert units(0) == units(2 * BLOCK - 1) == alone
    assert units(2 * BLOCK) == [
        ("",),
        ("blocks.0", "blocks.1"),
        ("blocks.2", "blocks.3"),
        ("blocks.4",),
    ]
    assert units(100 * BLOCK) == [("",), tuple(f"blocks.{i}" for i in range(5))]
    names = [name for spec in find_units(model, 2 * BLOCK)[0] for name, _ in spec.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert find_units(model, 2 * BLOCK)[0][1].name == "blocks.0..blocks.1"


def test_blocks_of_two_containers_are_not_joined():
    model = nn.Module()
    model.encoder, model.decoder = Stack(2), Stack(2)
    assert [spec.paths for spec in find_units(model, 100 * BLOCK)[0]] == [
        ("",), ("encoder.blocks.0", "encoder.blocks.1"), ("decoder.blocks.0", "decoder.blocks.1"),
    ]  # fmt: skip


def travelled(stage, threshold, depth=9):
    """The operations of the fourth step on each of two ranks, but the sum of the norm."""

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, **joined(stage, threshold)))
        for number in range(4):
            engine.mesh.stats.log.clear()
            engine.mesh.stats.keep_log = True
            run_steps(engine, rank, [number])
        return [
            operation
            for operation, key, _ in engine.mesh.stats.log
            if key not in ("gradient norm", "used parameters")
        ]

    return on_ranks(2, run, build=lambda: seeded(lambda: Stack(depth)))


@pytest.mark.parametrize("stage", STAGES)
def test_they_travel_together(stage, monkeypatch):
    monkeypatch.setattr(wrap, "PACKED_UNITS", 0)
    for log in travelled(stage, 3):  # a root and three units
        reductions = "all_reduce" if stage == 0 else "reduce_scatter"
        assert log.count(reductions) == 4
        assert log.count("all_gather") == {0: 0, 1: 4, 2: 4, 3: 6}[stage]


@pytest.mark.parametrize("stage", STAGES)
def test_small_units_share_a_message(stage):
    """A message takes as many elements as four units of that size."""
    outside = sum(p.numel() for p in Stack(0).parameters())
    assert outside < 2 * BLOCK
    reductions = "all_reduce" if stage == 0 else "reduce_scatter"
    for log in travelled(stage, 1):  # 9 units of one block each, then the root
        assert log.count(reductions) == 3
        assert log.count("all_gather") == {0: 0, 1: 3, 2: 3, 3: 18}[stage]
    for log in travelled(stage, 3):  # of three, and the root
        assert log.count(reductions) == 1


def values_after(rank, stages):
    """Weights after two steps of two micro-batches, alone and with messages of several units, by
    stage.
    """
    found = {}
    for stage, packed in itertools.product(stages, (0, 4)):
        model, plan = seeded(lambda: Stack(5)), Plan(2, 2, clip=1.0)
        engine = start(model, adamw(model), config_of(stage, plan, **joined(stage, 1)))
        engine.sharded_model.packed_elements = packed * BLOCK
        engine.backward_pass.reducer._reductions._pack.limit = packed * BLOCK
        for number, micro in itertools.product(range(2), range(2)):
            engine.backward(squared(engine, At(number, micro, rank)))
            engine.step()
        found[stage, packed] = {name: value.clone() for name, value in full_weights(engine).items()}
        engine.destroy()
    return found


def same_bits(answers, stages):
    for found, stage in itertools.product(answers, stages):
        for name, value in found[stage, 0].items():
            assert torch.equal(value, found[stage, 4][name]), f"{name} at stage {stage}"


def test_a_message_of_several_units_changes_no_bit():
    same_bits(run_ranks(2, values_after, STAGES), STAGES)


FEW = set(list(WAYS)[::5])
CELLS = list(itertools.product(WAYS, STAGES))


@pytest.mark.parametrize("way, stage", fast(CELLS, lambda way, stage: stage == 3 and way in FEW))
def test_every_way_of_calling_a_model(way, stage):
    """The ways of tests/ranks/test_matrix.py, with all blocks in one unit or two."""
    job, plan = WAYS[way], Plan(2, 2)
    more = {"zero_optimization": {"stage": stage, "stage3_module_granularity_threshold": 5000}}
    oracle.compare(
        train_on_threads(job, plan, engine_opener(stage, **more)), oracle.kept(job, plan)
    )


def test_a_weight_of_another_block_of_the_unit_that_is_at_work_is_watched():
    """An operation recorded on a weight while its own block is not running keeps the unit for the
    backward.
    """

    class Reads(Stack):
        def body(self, x):
            x = super().body(x)
            assert isinstance(self.blocks[4].up.weight, WatchedParameter)
            return x + self.blocks[0].down.weight.sum() + self.blocks[4].up.weight.sum()

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3, **joined(3, 2)))
        run_steps(engine, rank, range(3))
        return full_weights(engine)

    build = lambda: seeded(lambda: Reads(6))  # noqa: E731
    got = on_ranks(2, run, build=build)[0]
    model = seeded(lambda: Stack(6))
    model.body = lambda x: (
        Stack.body(model, x) + model.blocks[0].down.weight.sum() + model.blocks[4].up.weight.sum()
    )
    optimizer = adamw(model)
    for number in range(3):
        (sum(squared(model, At(number, 0, rank)) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    oracle.compare_tensors(
        "weights", got, dict(model.named_parameters()), floor=oracle.ADAM_ROUNDING
    )


def test_a_checkpoint_goes_into_units_of_other_blocks(tmp_path):
    def run(rank, model, blocks, load):
        engine = start(model, adamw(model), config_of(3, **joined(3, blocks)))
        net = OnEngine(engine, Plan())
        if load:
            engine.load_checkpoint(str(tmp_path))
        for number in range(2):
            net.backward(squared(engine, At(number, 0, rank)))
            engine.step()
        if not load:
            engine.save_checkpoint(str(tmp_path))
            net.backward(squared(engine, At(0, 0, rank)))
            engine.step()
            net.backward(squared(engine, At(1, 0, rank)))
            engine.step()
        weights = full_weights(engine)
        engine.destroy()
        return weights

    build = lambda: seeded(lambda: Stack(5))  # noqa: E731
    want = on_ranks(2, run, 2, False, build=build)[0]
    got = on_ranks(2, run, 3, True, build=build)[0]
    oracle.compare_tensors("weights", got, want)


@pytest.mark.parametrize(
    ("stage", "together", "most"),
    [(0, 0, 76), (2, 0, 76), (3, 0, 141), (0, 20, 7), (2, 20, 7), (3, 20, 21)],
)
def test_the_python_that_a_block_costs_in_a_step(stage, together, most):
    """Calls of the engine's functions, as many in every run; torch's own and the model's are not
    counted. ``together`` blocks share a unit.
    """
    package = str(Path(hf_zero.__file__).parent)

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, **joined(stage, together)))
        seen = 0

        def count(frame, event, arg):
            nonlocal seen
            seen += event == "call" and frame.f_code.co_filename.startswith(package)

        for number in range(4):
            if number == 3:
                gc.disable()  # or what earlier engines have to call as they go would be counted
                sys.setprofile(count)
            try:
                run_steps(engine, rank, [number])
            finally:
                sys.setprofile(None)
                gc.enable()
        engine.destroy()
        return seen

    counts = [
        on_ranks(1, run, build=lambda blocks=blocks: seeded(lambda: Stack(blocks)))[0]
        for blocks in (4, 12)
    ]
    each = (counts[1] - counts[0]) / 8
    assert 3 < each <= most, f"{each:.1f} calls a block"


class Forks(Stack):
    """Also returns what is between its blocks; the blocks behind ``cut`` may get it detached."""

    cut = None

    def forward(self, x):
        x = self.enter(x)
        hidden = []
        for number, block in enumerate(self.blocks):
            x = block(x.detach() if number == self.cut else x)
            hidden.append(x)
        return hidden


def backwards_of(step, hidden, backward):
    """Backwards that begin or end between blocks of one unit; by step, on all of a forward's."""
    losses = [each.pow(2).mean() for each in hidden]
    if step == 0:
        backward(losses[1])
    elif step == 1:
        backward(losses[2], retain_graph=True)
        backward(losses[4])
    elif step == 2:
        backward(losses[0] + losses[3])
    elif step == 3:
        (seen,) = torch.autograd.grad(losses[4], [hidden[2]], retain_graph=True)
        assert seen.abs().sum() > 0
        backward(losses[4])
    else:
        backward(losses[4])  # of blocks whose input was cut off


@pytest.mark.parametrize("stage", STAGES)
def test_backwards_that_begin_or_end_between_blocks_of_a_unit(stage):
    def steps(net, model, step_of):
        for number in range(6):
            model.cut = 2 if number == 4 else None
            yield number, net(features(number, 0, step_of))

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, **joined(stage, 5)))
        for number, hidden in steps(engine, model, rank):
            assert len(engine.units[1].forwards.pending) == (1 if model.cut is None else 2)
            backwards_of(number, hidden, engine.backward)
            engine.step()
        return full_weights(engine)

    build = lambda: seeded(lambda: Forks(5))  # noqa: E731
    got = on_ranks(2, run, build=build)[0]
    model = build()
    optimizer = adamw(model)
    runs = [steps(model, model, rank) for rank in range(2)]
    for pairs in zip(*runs):
        for number, hidden in pairs:
            backwards_of(number, hidden, lambda loss, **more: (loss / 2).backward(**more))
        optimizer.step()
        optimizer.zero_grad()
    want = dict(model.named_parameters())
    oracle.compare_tensors("weights", got, want, floor=oracle.ADAM_ROUNDING)

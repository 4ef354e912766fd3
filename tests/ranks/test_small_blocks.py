"""Layout of units: small blocks that share one, padding between parameters, and small parameters
that stay whole at stage 3; what travels, and that no number changes.
"""

import copy
import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError, ReleasedParameterError
from hf_zero.zero.layout import wrap
from hf_zero.zero.layout.parameter import LiveParameter, ReleasedParameter, ZeroParamStatus
from hf_zero.zero.layout.wrap import find_units
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import OnEngine, config_of, full_weights, start, train_on_threads
from tests.helpers.models import Stack, features, seeded
from tests.helpers.offloads import offload
from tests.helpers.stacks import by_hand, on_ranks, run_steps
from tests.helpers.training import Plan, StackJob, adamw
from tests.ranks.cases import expect, values_of

BLOCK = sum(p.numel() for p in Stack(1).blocks[0].parameters())


def joined(stage, blocks):
    threshold = {"stage3_module_granularity_threshold": blocks * BLOCK}
    return {"zero_optimization": {"stage": stage, **threshold}}


def of_depth(depth, kind=Stack):
    return lambda: seeded(lambda: kind(depth))


def test_consecutive_blocks_are_joined_up_to_the_threshold():
    def units(granularity):
        return [spec.paths for spec in find_units(model, granularity)[0]]

    model = Stack(5)
    blocks = [f"blocks.{i}" for i in range(5)]
    alone = [("",), *((each,) for each in blocks)]
    assert units(0) == units(2 * BLOCK - 1) == alone
    assert units(2 * BLOCK) == [("",), tuple(blocks[:2]), tuple(blocks[2:4]), tuple(blocks[4:])]
    assert units(100 * BLOCK) == [("",), tuple(blocks)]
    names = [name for spec in find_units(model, 2 * BLOCK)[0] for name, _ in spec.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert find_units(model, 2 * BLOCK)[0][1].name == "blocks.0..blocks.1"
    # of two containers they are not joined
    model = nn.Module()
    model.encoder, model.decoder = Stack(2), Stack(2)
    containers = [(f"{part}.blocks.0", f"{part}.blocks.1") for part in ("encoder", "decoder")]
    assert units(100 * BLOCK) == [("",), *containers]


@in_turn("stage, precision", [(0, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")])
def test_matrices_that_stay_whole_begin_at_128_bytes(stage, precision):
    """Of the memory that units share, whatever sizes come before."""

    def run(rank, model):
        zero = {"stage": stage, "stage3_module_granularity_threshold": 0}
        zero["stage3_param_persistence_threshold"] = 10**6
        config = config_of(stage, Plan(precision=precision), zero_optimization=zero)
        engine = start(model, adamw(model), config)
        run_steps(engine, rank, range(1))
        found = 0
        for flat in engine.flats:
            assert not flat.sharded
            for view in flat.views.values():
                assert view.dim() < 2 or view.storage_offset() * view.itemsize % 128 == 0
            found += flat.full.storage_offset() > 0
        assert found

    on_ranks(2, run, build=lambda: seeded(lambda: Stack(3, 9)))


def traveled(stage, blocks, depth=9):
    """How many (gathers, reductions) the fourth step has on each of two ranks."""

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, **joined(stage, blocks)))
        engine.mesh.stats.keep_log = True
        for number in range(4):
            engine.mesh.stats.log.clear()
            run_steps(engine, rank, [number])
        numbers = ("gradient norm", "used parameters")
        sent = [operation for operation, key, _ in engine.mesh.stats.log if key not in numbers]
        reduction = "all_reduce" if stage == 0 else "reduce_scatter"
        return sent.count("all_gather"), sent.count(reduction)

    first, second = on_ranks(2, run, build=of_depth(depth))
    assert first == second
    return first


@in_turn("stage", [1, 3])
def test_they_travel_together_and_small_units_share_a_message(stage):
    """A message takes as many elements as PACKED_UNITS units of that size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrap, "PACKED_UNITS", 0)
        # a root and three units
        assert traveled(stage, 3) == ({0: 0, 1: 4, 2: 4, 3: 6}[stage], 4)
    assert sum(p.numel() for p in Stack(0).parameters()) < 2 * BLOCK
    # nine units of one block each, then the root; three units, and the root
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrap, "PACKED_UNITS", 4)
        assert traveled(stage, 1) == ({0: 0, 1: 3, 2: 3, 3: 18}[stage], 3)
        assert traveled(stage, 3)[1] == 1
    assert traveled(stage, 1)[1] == 1


@in_turn("stage, together, most", [(2, 0, 76), (3, 0, 141), (2, 20, 7), (3, 20, 21)])
def test_the_python_that_a_block_costs_in_a_step(stage, together, most):
    """Calls of the engine's functions; ``together`` blocks share a unit."""
    package = str(Path(hf_zero.__file__).parent)

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, **joined(stage, together)))
        seen = 0

        def count(frame, event, arg):
            nonlocal seen
            seen += event == "call" and frame.f_code.co_filename.startswith(package)

        run_steps(engine, rank, range(3))
        gc.disable()  # or what earlier engines have to call as they go would be counted
        sys.setprofile(count)
        try:
            run_steps(engine, rank, [3])
        finally:
            sys.setprofile(None)
            gc.enable()
        engine.destroy()
        return seen

    few, many = (on_ranks(1, run, build=of_depth(blocks))[0] for blocks in (4, 12))
    each = (many - few) / 8
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


@in_turn("stage", (1, 3))
def test_backwards_that_begin_or_end_between_blocks_of_a_unit(stage):
    def steps(net, model, rank):
        for number in range(6):
            model.cut = 2 if number == 4 else None
            yield number, net(features(number, 0, rank))

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage, **joined(stage, 5)))
        for number, hidden in steps(engine, model, rank):
            assert len(engine.units[1].calls.pending) == (1 if model.cut is None else 2)
            backwards_of(number, hidden, engine.backward)
            engine.step()
        return full_weights(engine)

    model = of_depth(5, Forks)()
    optimizer = adamw(model)
    for pairs in zip(*[steps(model, model, rank) for rank in range(2)]):
        for number, hidden in pairs:
            backwards_of(number, hidden, lambda loss, **more: (loss / 2).backward(**more))
        optimizer.step()
        optimizer.zero_grad()
    expect(values_of(model), run, build=of_depth(5, Forks), floor=oracle.ADAM_ROUNDING)


# of SMALL are biases, norms and the scale
SMALL, ALL = 64, 1_000_000


class Scaled(Stack):
    """A stack with a learned temperature, as CLIP has one: in the root, of no dimension."""

    def __init__(self, depth=3):
        super().__init__(depth)
        self.logit_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return super().forward(x) * self.logit_scale.exp()


class ScaledJob(StackJob):
    name = "a stack with a temperature"
    model = Scaled


def scaled():
    return seeded(Scaled)


def zero_of(threshold, way="none", folder=Path()):
    section = {"stage": 3} if way == "none" else offload(way, 3, folder)
    return section | {"stage3_param_persistence_threshold": threshold}


def opened(model, threshold, way="none", folder=Path(), precision="fp32", **zero):
    section = zero_of(threshold, way, folder) | zero
    config = config_of(3, Plan(precision=precision), zero_optimization=section)
    return start(model, adamw(model), config)


def persistent(model, threshold):
    return {name: p for name, p in model.named_parameters() if p.numel() <= threshold}


class Reading(OnEngine):
    """Reads the persistent parameters after each step, without gathering anything."""

    def __init__(self, engine, plan, threshold):
        super().__init__(engine, plan)
        self.threshold = threshold

    def step(self):
        super().step()
        whole = persistent(self.module, self.threshold)
        values = {name: p.detach().float().clone() for name, p in whole.items()}
        if whole:  # half a step of bf16 is a third of what three steps move it
            master = hf_zero.safe_get_full_fp32_param(self.module.logit_scale)
            self.memory.setdefault("scales", []).append(master.item())
        for name, p in whole.items():
            master = hf_zero.safe_get_full_fp32_param(p)
            assert torch.equal(values[name], master.to(p.dtype).float()), name


@in_turn(
    "threshold, ranks, accumulation, precision, way",
    [
        (SMALL, 3, 2, "bf16", "optimizer on cpu"),
        (SMALL, 2, 1, "fp16", "all in files"),
        (ALL, 3, 2, "fp32", "none"),
        (ALL, 1, 2, "fp32", "all on cpu"),
    ],
)
def test_against_the_oracle(threshold, ranks, accumulation, precision, way, tmp_path):
    plan = Plan(ranks, 3, accumulation, precision, clip=0.5)
    seen: list[Reading] = []

    def opener(model, optimizer, plan):
        config = config_of(3, plan, zero_optimization=zero_of(threshold, way, tmp_path))
        seen.append(Reading(start(model, optimizer, config), plan, threshold))
        return seen[-1]

    job = ScaledJob()
    oracle.accept(train_on_threads(job, plan, opener), job, plan, 3)
    scales: list[float] = []
    windows = [[(1.0 / accumulation, micro) for micro in range(accumulation)]] * 3
    read = lambda _, model, __: scales.append(model.logit_scale.item())  # noqa: E731
    by_hand(adamw, windows, ranks, 0.5, read, scaled)
    for session in seen:
        found = session.memory["scales"][accumulation - 1 :: accumulation]
        rel = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}[precision]
        assert found == pytest.approx(scales, rel=rel)


def test_what_is_read_and_asked_between_steps():
    def run(rank, model):
        engine = opened(model, SMALL)
        run_steps(engine, rank, [0])
        scale, weight = model.logit_scale, model.head.weight
        assert isinstance(scale, LiveParameter) and scale.ds_status is ZeroParamStatus.AVAILABLE
        assert (scale.ds_numel, scale.ds_shape, model.head.bias.ds_numel) == (1, torch.Size(), 5)
        assert scale.ds_persist and model.head.bias.ds_persist
        sharded = [p for p in model.parameters() if not p.ds_persist]
        assert sharded and all(p.ds_status.name == "NOT_AVAILABLE" for p in sharded)
        assert scale.item() == float(hf_zero.safe_get_full_fp32_param(scale))
        assert scale.item() != pytest.approx(0.3, abs=1e-6)
        assert type(weight) is ReleasedParameter
        with pytest.raises(ReleasedParameterError, match=r"head\.weight"):
            weight.sum()
        with hf_zero.GatheredParameters([scale], modifier_rank=1):
            scale.data.fill_(0.25 * (1 + rank))
        assert scale.item() == float(hf_zero.safe_get_full_fp32_param(scale)) == 0.5
        state = engine.module.state_dict()
        assert state["logit_scale"].data_ptr() != scale.data_ptr()
        assert copy.deepcopy(model.head.bias).equal(model.head.bias)
        with (
            pytest.raises(PartitionError, match="given a tensor of shape"),
            hf_zero.GatheredParameters([weight]),
        ):
            model.head.bias.data = torch.zeros(7)
        kept = {name: p.detach().clone() for name, p in persistent(model, SMALL).items()}
        engine.destroy()
        for name, value in kept.items():
            p = model.get_parameter(name)
            assert type(p) is nn.Parameter and torch.equal(p, value)
        return [value.item() for value in (state["logit_scale"], kept["logit_scale"])]

    first, second = on_ranks(2, run, build=scaled)
    assert first == second == [0.5, 0.5]

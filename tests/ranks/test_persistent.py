"""Small parameters that stay whole between steps at stage 3: current and readable after each step,
with no gathers of their own, whatever the rest of the configuration is.
"""

from __future__ import annotations

import copy
import itertools
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.deepspeed.zero_config import DEFAULTS
from hf_zero.errors import PartitionError, ReleasedParameterError
from hf_zero.offload.update import Updater
from hf_zero.planning import needs
from hf_zero.zero.layout import wrap
from hf_zero.zero.layout.parameter import LiveParameter, ReleasedParameter, ZeroParamStatus
from hf_zero.zero.layout.wrap import persistent_names
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import (
    OnEngine,
    config_of,
    engine_opener,
    full_weights,
    start,
    train_on_threads,
)
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import offload
from tests.helpers.plans import planned
from tests.helpers.stacks import by_hand, on_ranks, run_steps
from tests.helpers.training import Plan, StackJob, adamw
from tests.helpers.ways import WAYS

SMALL = 64  # biases, norms and the scale; matrices are larger
ALL = 1_000_000
NONE = 0


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


def zero_of(threshold, way, folder):
    section = {"stage": 3} if way == "none" else offload(way, 3, folder)
    return section | {"stage3_param_persistence_threshold": threshold}


def persistent(model, threshold):
    return {name: p for name, p in model.named_parameters() if p.numel() <= threshold}


class Reading(OnEngine):
    """Reads the persistent parameters after each step, without gathering anything."""

    threshold = SMALL

    def step(self):
        super().step()
        whole = persistent(self.module, self.threshold)
        values = {name: p.detach().float().clone() for name, p in whole.items()}
        scale = self.module.logit_scale.item() if whole else None
        for name, p in whole.items():
            master = hf_zero.safe_get_full_fp32_param(p)
            assert torch.equal(values[name], master.to(p.dtype).float()), name
        self.memory.setdefault("scales", []).append(scale)


WAYS_TO_OFFLOAD = ("none", "optimizer on cpu", "all on cpu", "all in files")
PRODUCT = list(
    itertools.product(
        (NONE, SMALL, ALL), (1, 2, 3), (1, 2), ("fp32", "bf16", "fp16"), WAYS_TO_OFFLOAD
    )
)


def chosen(threshold, ranks, steps, precision, way):
    turn = WAYS_TO_OFFLOAD.index(way)
    return (
        threshold != NONE
        and ranks == 1 + (turn + (threshold == ALL) + len(precision)) % 3
        and steps == 1 + (turn + (precision == "bf16")) % 2
        and (
            way == "all on cpu"
            if precision == "fp16"
            else (precision == "bf16") == (threshold == SMALL)
        )
    )


@pytest.mark.parametrize("threshold, ranks, accumulation, precision, way", fast(PRODUCT, chosen))
def test_against_the_oracle(threshold, ranks, accumulation, precision, way, tmp_path):
    plan = Plan(ranks, 4, accumulation, precision, clip=0.5)
    seen: list[Reading] = []

    def opener(model, optimizer, plan):
        config = config_of(3, plan, zero_optimization=zero_of(threshold, way, tmp_path))
        session = Reading(start(model, optimizer, config), plan)
        session.threshold = threshold
        seen.append(session)
        return session

    job = ScaledJob()
    got = train_on_threads(job, plan, opener)
    oracle.accept(got, job, plan, 3)
    scales = []
    windows = [[(1.0 / accumulation, micro) for micro in range(accumulation)] for _ in range(4)]
    by_hand(
        adamw, windows, ranks, 0.5, lambda _, m, __: scales.append(m.logit_scale.item()), scaled
    )
    for session in seen:
        if threshold != NONE:
            read = session.memory["scales"][accumulation - 1 :: accumulation]
            rel = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-3}[precision]
            assert read == pytest.approx(scales, rel=rel)


@pytest.mark.parametrize("way", ["none", "parameters on cpu", "all on cpu"])
def test_the_threshold_changes_no_bit_of_a_weight(way, tmp_path):
    """Except by the kernels: the state of persistent ones is updated on the device, whatever is
    offloaded.
    """

    def run(rank, model, threshold):
        folder = tmp_path / str(threshold)
        folder.mkdir(exist_ok=True)
        config = config_of(
            3, Plan(precision="bf16"), zero_optimization=zero_of(threshold, way, folder)
        )
        engine = start(model, adamw(model), config)
        for number in range(3):
            run_steps(engine, rank, [number])
            with hf_zero.GatheredParameters([model.logit_scale], modifier_rank=1):
                model.logit_scale.data.fill_(0.25 * (number + 1 + 7 * (rank == 0)))
        weights = full_weights(engine)
        engine.destroy()
        return weights

    want = on_ranks(2, run, NONE, build=scaled)[0]
    for threshold in (SMALL, ALL):
        got = on_ranks(2, run, threshold, build=scaled)[0]
        if way == "all on cpu":
            oracle.compare_tensors("weights", got, want, 1e-6)
        else:
            assert [name for name in want if not torch.equal(want[name], got[name])] == []


FEW = set(list(WAYS)[::8])


@pytest.mark.parametrize("way", fast(list(WAYS), lambda way: way in FEW))
def test_every_way_of_calling_a_model(way):
    """The ways of tests/ranks/test_matrix.py, with small parameters of each block whole, the rest
    sharded.
    """
    job, plan = WAYS[way], Plan(2, 2)
    more = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": SMALL}}
    oracle.compare(train_on_threads(job, plan, engine_opener(3, **more)), oracle.kept(job, plan))


# ---- what a script may do with them ----


def test_what_is_read_and_asked_between_steps():
    def run(rank, model):
        config = config_of(3, zero_optimization=zero_of(SMALL, "none", Path()))
        engine = start(model, adamw(model), config)
        run_steps(engine, rank, [0])
        scale, weight = model.logit_scale, model.head.weight
        assert isinstance(scale, LiveParameter) and scale.ds_status is ZeroParamStatus.AVAILABLE
        assert (scale.ds_numel, scale.ds_shape, model.head.bias.ds_numel) == (1, torch.Size(), 5)
        assert scale.ds_persist and model.head.bias.ds_persist
        sharded = [p for p in model.parameters() if not p.ds_persist]
        assert sharded and all(p.ds_status.name == "NOT_AVAILABLE" for p in sharded)
        assert scale.item() == float(hf_zero.safe_get_full_fp32_param(scale))
        assert type(weight) is ReleasedParameter
        with pytest.raises(ReleasedParameterError, match=r"head\.weight"):
            weight.sum()
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
    assert first == second and first[0] == first[1] != pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("precision, way", [("fp32", "none"), ("bf16", "all on cpu")])
def test_writes_between_steps_count_as_in_a_plain_loop(precision, way, tmp_path):
    def write(step, model):
        with torch.no_grad():
            model.logit_scale.clamp_(-0.25, 0.25)
            model.blocks[step].norm.bias.data += 0.5
            model.head.bias.data = torch.full_like(model.head.bias, 0.125)

    def run(rank, model):
        plan = Plan(precision=precision)
        engine = start(
            model, adamw(model), config_of(3, plan, zero_optimization=zero_of(SMALL, way, tmp_path))
        )
        for step in range(3):
            run_steps(engine, rank, [step])
            write(step, model)
        return full_weights(engine)

    windows = [[(1.0, 0)]] * 3
    want, _ = by_hand(adamw, windows, 2, 0.0, lambda step, m, _: write(step, m), scaled)
    for got in on_ranks(2, run, build=scaled):
        exact = precision == "fp32"
        oracle.compare_tensors("weights", got, want, 1e-5 if exact else 2e-2, 1e-4)


# ---- messages ----


def travelled(threshold, **more):
    """The operations of the fourth step on each of two ranks, with their names. Four units of 1000
    elements, which no block here has, share a message.
    """

    def run(rank, model):
        zero = zero_of(threshold, "none", Path()) | {"stage3_module_granularity_threshold": 1000}
        engine = start(model, adamw(model), config_of(3, zero_optimization=zero | more))
        for number in range(4):
            engine.mesh.stats.log.clear()
            engine.mesh.stats.keep_log = True
            run_steps(engine, rank, [number])
        return [(what, key) for what, key, _ in engine.mesh.stats.log]

    return on_ranks(2, run, build=scaled)


@pytest.mark.parametrize("threshold", [NONE, SMALL])
def test_they_cost_no_gather_but_one_message_a_step(threshold):
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert min(sum(p.numel() for p in block.parameters()) for block in Scaled().blocks) > 4000
    for log in travelled(threshold):
        gathers = [key for what, key in log if what == "all_gather"]
        passes = [key for key in gathers if not key.startswith("updated")]
        assert passes == ["(root)", *blocks, *blocks[1::-1]]
        assert len(gathers) - len(passes) == (threshold == SMALL)


def test_nor_one_reduction_a_unit():
    """Small gradients wait for each other; large ones are reduced before them."""
    for log in travelled(SMALL):
        sent = [key for what, key in log if what == "reduce_scatter"]
        assert [key for key in sent if not key.endswith("|whole")] == [
            f"blocks.{n}|trainable|float32" for n in (2, 1, 0)
        ]
        assert sent[3:] == ["blocks.2|trainable|float32|whole..|trainable|float32|whole"]


def test_what_is_updated_in_the_backward_does_not_wait_for_them(monkeypatch):
    sent: list[int] = []  # messages, when the update of the last block begins
    early = Updater.start_early

    def start_early(self, update, unit):
        if unit.label == "blocks.2":
            log = unit.flats[0].engine().mesh.stats.log
            sent.append(sum(what == "reduce_scatter" for what, _, _ in log))
        early(self, update, unit)

    monkeypatch.setattr(Updater, "start_early", start_early)
    away = {"offload_optimizer": {"device": "cpu", "update_in_backward": True}}
    first, second = travelled(SMALL, **away)
    assert first == second
    # those of the blocks, of four in all
    assert sent[-2:] == [3, 3]


def test_a_root_of_small_parameters_alone_is_never_gathered():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.norm = nn.LayerNorm(32)

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(nn.functional.pad(x, (0, 32 - x.shape[-1]))))
            return self.norm(x)

    def run(rank, model):
        config = config_of(3, zero_optimization=zero_of(SMALL, "none", Path()))
        engine = start(model, adamw(model), config)
        run_steps(engine, rank, range(3))
        assert not engine.units[0].sharded and model.norm.weight.isfinite().all()
        return {key for what, key, _ in engine.mesh.stats.log if what == "all_gather"}

    for keys in on_ranks(2, run, build=lambda: seeded(Small)):
        assert "(root)" not in keys


def values_after(rank):
    found = {}
    for threshold in (NONE, SMALL, ALL):
        model = seeded(Scaled)
        config = config_of(3, zero_optimization=zero_of(threshold, "none", Path()))
        engine = start(model, adamw(model), config)
        run_steps(engine, rank, range(2))
        found[threshold] = {name: each.clone() for name, each in full_weights(engine).items()}
        if threshold != NONE:
            found[threshold]["logit_scale"] = model.logit_scale.detach().clone()
        engine.destroy()
    return found


# ---- which they are ----


def test_which_parameters_stay_whole():
    model = Scaled(1)
    everything = {name: p.numel() for name, p in model.named_parameters()}
    assert persistent_names(model) == frozenset()  # the tests' own default
    assert persistent_names(model, 0) == frozenset()
    assert persistent_names(model, 32) == {n for n, size in everything.items() if size <= 32}
    assert persistent_names(model, ALL) == set(everything)
    # in the order of the model, what is too large for what is left is passed over
    assert list(everything)[:3] == ["logit_scale", "enter.weight", "enter.bias"]
    assert persistent_names(model, ALL, 40) == {"logit_scale", "enter.bias", "head.bias"}


def test_the_default_is_deepspeeds():
    default = runpy.run_path(wrap.__file__)["PERSISTENCE"]  # tests have another one
    assert default == DEFAULTS["stage3_param_persistence_threshold"] == 100_000


def test_parameters_that_are_packed_stay_whole_together():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
            self._hf_zero_packed = (
                ("q.weight", "k.weight", "v.weight"),
                ("q.bias", "k.bias", "v.bias"),
            )

    assert persistent_names(Attention(), 32) == {"q.bias", "k.bias", "v.bias"}
    assert persistent_names(Attention(), 64, 20) == {"q.bias", "k.bias", "v.bias"}
    assert len(persistent_names(Attention(), 64)) == 6


def test_a_model_that_is_held_keeps_its_small_parameters_sharded():
    from hf_zero.loading.shard_only import hold

    def run(rank, model):
        config = config_of(3, zero_optimization=zero_of(SMALL, "none", Path()))
        hold(model, ZeroConfig.from_dict(config))
        assert all(type(p) is ReleasedParameter for p in model.parameters())
        start(model, adamw(model), config)
        assert type(model.head.weight) is ReleasedParameter
        return model.logit_scale.item()

    assert on_ranks(2, run, build=scaled) == [pytest.approx(0.3)] * 2


# ---- checkpoints ----


@pytest.mark.parametrize(
    "before, after, stage",
    [(SMALL, ALL, 3), (ALL, NONE, 3), (NONE, SMALL, 3), (SMALL, None, 1), (None, SMALL, 1)],
)
def test_a_checkpoint_goes_across_thresholds(before, after, stage, tmp_path):
    """``None`` and a stage: saved, or loaded, at that stage."""

    def zero(threshold):
        return {"stage": stage} if threshold is None else zero_of(threshold, "none", Path())

    def run(rank, model, threshold, steps, load, save):
        for p in model.blocks[0].parameters():
            p.requires_grad_(False)  # frozen ones stay whole, too
        engine = start(model, adamw(model), config_of(3, zero_optimization=zero(threshold)))
        if load:
            engine.load_checkpoint(str(tmp_path))
            if threshold:
                assert model.logit_scale.item() == float(
                    hf_zero.safe_get_full_fp32_param(model.logit_scale)
                )
        run_steps(engine, rank, steps)
        if save:
            engine.save_checkpoint(str(tmp_path))
        return full_weights(engine)

    on_ranks(2, run, before, (0, 1), False, True, build=scaled)
    got = on_ranks(2, run, after, (2, 3), True, False, build=scaled)[0]
    want = on_ranks(2, run, NONE, (0, 1, 2, 3), False, False, build=scaled)[0]
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


# ---- memory ----


@pytest.mark.parametrize("threshold", [SMALL, ALL])
@pytest.mark.parametrize("way", ["none", "all on cpu", "half on cpu"])
def test_tiers_hold_what_was_estimated(threshold, way, tmp_path):
    config = config_of(
        3, Plan(precision="bf16"), zero_optimization=zero_of(threshold, way, tmp_path)
    )

    def run(rank, model):
        engine = start(model, adamw(model), config)
        run_steps(engine, rank, [0])
        if engine.updater.units:
            engine.updater.finish()
        return engine.bytes_by_tier()

    build = lambda: seeded(lambda: Stack(6, 48))  # noqa: E731
    model, wanted = build(), ZeroConfig.from_dict(config).resolve(2)
    said = needs(planned(model, wanted, 2))
    apart = ("gathered units", "gradients under way")
    device = sum(part.nbytes for part in said.device if part.what not in apart)
    ram = sum(part.nbytes for part in said.ram)
    for found in on_ranks(2, run, build=build):
        assert found["device"] == pytest.approx(device, rel=0.02)
        assert found["ram"] == pytest.approx(ram, rel=0.1, abs=1)


def test_the_estimate_counts_them():
    model = Stack(6, 48)
    small = sum(p.numel() for p in persistent(model, SMALL).values())

    def row(threshold):
        config = {"zero_optimization": zero_of(threshold, "none", Path())}
        return hf_zero.estimate(model, 4, config=config, optimizer="SGD").at(3)

    none, some, everything = row(NONE), row(SMALL), row(ALL)
    # fp32: each rank holds what three others held of them
    assert some.parameters - none.parameters == pytest.approx(small * 4 * 3 / 4, rel=0.15)
    assert some.largest_unit < none.largest_unit and everything.largest_unit == 0
    assert everything.parameters == pytest.approx(
        4 * sum(p.numel() for p in model.parameters()), rel=0.01
    )
    assert row(ALL).gradients == row(NONE).gradients

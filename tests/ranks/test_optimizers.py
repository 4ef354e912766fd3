"""Optimizers on ranks, each at every stage, in every place and resumed anywhere, against a plain
loop; by name from the configuration; objects of the user, with live groups and state.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import HfZeroError, UnsupportedOptimizerError
from hf_zero.optim import Adafactor, Lamb, Muon
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.offloads import PLACES, WAYS, offload, stages_of
from tests.helpers.optimizers import (
    ADAM_OF_MUON,
    ELEMENTWISE,
    MAIN,
    MUON,
    WHOLE,
    MuonAndAdamW,
    Row,
    parted,
    same_directions,
)
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, trainable

RANKS = 2
STEPS = 4
WINDOWS = [[(1.0, 0)]] * STEPS
# parameters stay where they are
HOMES = [(way, stage) for way in WAYS for stage in stages_of(way) if "parameters" not in way]


def plainly(row, ranks, clip=0.0, windows=WINDOWS):
    """Weights of a plain run, and what is read of its optimizer."""
    kept: list[Any] = []

    def make(model):
        kept.append(row.by_hand(model))
        return kept[0]

    weights, _ = by_hand(make, windows, ranks, clip)
    return weights, row.read(kept[0])


def check(row, ranks, config, micros=1, clip=0.0):
    def run(rank, model):
        optimizer = row.ours(model)
        engine = start(model, optimizer, config)
        run_steps(engine, rank, range(STEPS), micros)
        found = full_weights(engine), row.read(optimizer)
        engine.destroy()
        return found

    window = [(1.0 / micros, micro) for micro in range(micros)]
    want, numbers = plainly(row, ranks, clip, [window] * STEPS)
    for weights, found in on_ranks(ranks, run):
        row.compare(weights, want, ranks < 3 and micros == 1)
        assert found == pytest.approx(numbers, rel=1e-4)


CELLS = itertools.product(WHOLE, STAGES, (1, 2, 3, 4))


@pytest.mark.parametrize(
    "name, stage, ranks",
    fast(
        CELLS,
        lambda name, stage, ranks: (
            (ranks, stage) == (2, 3)
            or (name in MAIN and (ranks == 2 or (stage, ranks) == (3, 3)))
            or (name, stage, ranks) in (("adafactor", 3, 1), ("adafactor", 3, 4))
        ),
    ),
)
def test_the_weights_are_those_of_a_plain_run(name, stage, ranks):
    check(WHOLE[name], ranks, config_of(stage, Plan(ranks=ranks)))


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["adafactor, given rate", "lamb", "muon"])
def test_accumulated_and_clipped(name, stage):
    config = config_of(stage, Plan(accumulation=2), gradient_clipping=0.1)
    check(WHOLE[name], RANKS, config, 2, 0.1)


# Adafactor at stage 3, each of the others at one stage below
SOON = {
    "adafactor": [home for home in HOMES if home[1] == 3],
    "lamb": [("optimizer in files", 0), ("all on cpu", 3)],
    "lars": [("half on cpu", 1)],
    "muon": [("optimizer on cpu", 2), ("all in files", 3)],
}


@pytest.mark.parametrize(
    "name, home",
    fast(itertools.product(MAIN, HOMES), lambda name, home: home in SOON[name]),
)
def test_offloaded(name, home, tmp_path):
    """Sub-groups end in the middle of rows; directions of matrices travel."""
    way, stage = home
    section = offload(way, stage, tmp_path, buffer_size=500)
    check(WHOLE[name], RANKS, config_of(stage, zero_optimization=section))


@pytest.mark.parametrize(
    "name, way",
    fast(
        itertools.product(ELEMENTWISE, PLACES),
        lambda name, way: way == PLACES[list(ELEMENTWISE).index(name) % 2],
    ),
)
def test_elementwise_offloaded(name, way, tmp_path):
    """Optimizers that a host kernel updates, and optimizers that step themselves."""

    def compare(got, want, alike):
        oracle.compare_tensors("weights", got, want, floor=oracle.ADAM_ROUNDING)

    row = Row(lambda model: ELEMENTWISE[name](trainable(model)), compare=compare)
    config = config_of(2, gradient_clipping=1.0, zero_optimization=offload(way, 2, tmp_path))
    check(row, RANKS, config, clip=1.0)


def copied(state):
    if isinstance(state, torch.Tensor):
        return state.clone()
    return {key: copied(each) for key, each in state.items()} if isinstance(state, dict) else state


def alike(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["adafactor", "lamb", "muon"])
@on_each_rank(RANKS)
def test_an_overflow_leaves_all_state_as_it_was(rank, model, name, stage):
    optimizer = WHOLE[name].ours(model)
    section = {"enabled": True, "initial_scale_power": 4}
    engine = start(model.half(), optimizer, config_of(stage, fp16=section))
    run_steps(engine, rank, range(1))
    before = [copied(dict(state)) for state in optimizer.state.values()]
    weights = full_weights(engine)
    loss = squared(engine, At(1, 0, rank), torch.float16)
    engine.backward(loss * (float("inf") if rank else 1.0))
    engine.step()
    assert engine.skipped_steps == 1 and before
    assert all(map(alike, before, map(dict, optimizer.state.values())))
    assert alike(weights, full_weights(engine))


ELSEWHERE = [
    ((2, 1, "none"), (3, 3, "none")),
    ((3, 3, "none"), (1, 2, "optimizer on cpu")),
    ((2, 2, "optimizer in files"), (2, 0, "none")),
]


@pytest.mark.parametrize(
    "name, moved",
    fast(
        itertools.product(("adafactor", "lamb", "muon"), range(3)),
        lambda name, moved: name == "adafactor" or moved == (name == "lamb"),
    ),
)
def test_a_checkpoint_goes_on_elsewhere(name, moved, tmp_path):
    """On other ranks, at another stage, in another place: as the run that was not interrupted, up
    to how sums are rounded. The files are verified.
    """
    row = WHOLE[name]

    def run(place, resumes):
        ranks, stage, way = place
        section = offload(way, stage, tmp_path, buffer_size=500)
        more = {} if way == "none" else {"zero_optimization": section}

        def on_rank(rank, model):
            engine = start(model, row.ours(model), config_of(stage, Plan(ranks=ranks), **more))
            if resumes:
                engine.load_checkpoint(tmp_path / "saved")
            for step in range(2, 4) if resumes else range(2):
                # the same rows, however many ranks there are
                for at in range(rank, 6, ranks):
                    engine.set_gradient_accumulation_boundary(at + ranks >= 6)
                    engine.backward(squared(engine, At(step, 0, at)) * (ranks / 6))
                    engine.step()
            if not resumes:
                engine.save_checkpoint(tmp_path / "saved")
            return full_weights(engine)

        return on_ranks(ranks, on_rank)[0]

    saved, loaded = ELSEWHERE[moved]
    run(saved, False)
    assert not hf_zero.verify_checkpoint(tmp_path / "saved").problems
    row.compare(run(loaded, True), plainly(row, 6)[0], False)


def test_a_state_dict_of_shards_goes_on(tmp_path):
    """Loaded into an optimizer whose segments are cut elsewhere."""
    row = WHOLE["adafactor"]

    def run(rank, model):
        optimizer = row.ours(model)
        engine = start(model, optimizer, config_of(1))
        run_steps(engine, rank, range(2))
        engine.save_checkpoint(tmp_path, tag="weights")
        packed = optimizer.state_dict()
        engine.destroy(gather=True)
        section = offload("optimizer on cpu", 1, tmp_path, buffer_size=500)
        optimizer = row.ours(model)
        engine = start(model, optimizer, config_of(1, zero_optimization=section))
        engine.load_checkpoint(tmp_path, tag="weights", load_optimizer_states=False)
        optimizer.load_state_dict(packed)
        run_steps(engine, rank, range(2, STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, plainly(row, RANKS)[0])


def lion(parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
    """Lion (arXiv 2302.06675) as one would write it down."""

    class Written(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    update = torch.sign(betas[0] * moment + (1 - betas[0]) * p.grad)
                    p.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)
                    moment.mul_(betas[1]).add_(p.grad, alpha=1 - betas[1])

    return Written(parameters, {})


def muon_whose_adam_decays(model):
    both = MuonAndAdamW(model)
    both.each[1].param_groups[0]["weight_decay"] = 0.1
    return both


def of(kind):
    """Of all parameters in one group."""
    return lambda model, **params: kind(trainable(model), **params)


MUONS = {"momentum": 0.9, "weight_decay": 0.1, "muon_lr": 0.02, "adam_lr": 0.01}
LAMBS = {"lr": 0.02, "weight_decay": 0.1, "max_coeff": 0.3, "min_coeff": 0.01}
RATED = {"lr": 0.02, "relative_step": False, "scale_parameter": False}
# (type and parameters of the section, the plain optimizer of a model)
BY_NAME = {
    "AdamW": (
        {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1},
        of(torch.optim.AdamW),
    ),
    "Adam": ({"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0}, of(torch.optim.Adam)),
    "SGD": (
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        of(torch.optim.SGD),
    ),
    "Adagrad": ({"lr": 0.01, "eps": 1e-6}, of(torch.optim.Adagrad)),
    "RMSprop": ({"lr": 1e-3, "eps": 1e-4}, of(torch.optim.RMSprop)),
    "NAdam": ({"lr": 1e-3, "eps": 1e-6}, of(torch.optim.NAdam)),
    "Lion": ({"lr": 1e-4, "weight_decay": 0.1}, of(lion)),
    "lamb": (LAMBS, of(Lamb)),
    "FusedLamb": (LAMBS, of(Lamb)),
    "Adafactor": (RATED, of(transformers.Adafactor)),
    "Muon": (MUONS, lambda model, **_: muon_whose_adam_decays(model)),
}


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", BY_NAME)
def test_by_name_from_the_config(name, stage):
    """Muon: linear layers by Muon, the rest by AdamW."""
    params, plain = BY_NAME[name]
    want, _ = by_hand(lambda model: plain(model, **params), WINDOWS, RANKS)

    def run(rank, model):
        engine = start(model, None, config_of(stage, optimizer={"type": name, "params": params}))
        assert "lr" not in params or engine.get_lr() == [params["lr"]]
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        if name == "Muon":
            same_directions(weights, want)
        else:
            oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@pytest.mark.parametrize("kind", [transformers.Adafactor, torch.optim.Adafactor])
def test_an_object_of_another_library(kind):
    def make(model):
        matrices, others = parted(model)
        return kind([{"params": matrices}, {"params": others}])

    want, _ = by_hand(make, WINDOWS, RANKS)

    def run(rank, model):
        optimizer = make(model)
        engine = start(model, optimizer, config_of(2))
        run_steps(engine, rank, range(STEPS))
        weights = full_weights(engine)
        engine.destroy()
        assert type(optimizer) is kind
        return weights

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("scheduled", [False, True])
def test_torchs_own_muon_is_taken(scheduled):
    """It stays of its class, and is of no other one again at the end."""

    def make(model):
        matrices, others = parted(model)
        for parameter in others:
            parameter.requires_grad_(False)
        return torch.optim.Muon(matrices, **MUON)

    def decay(step, model, optimizer):
        if scheduled:
            optimizer.param_groups[0]["lr"] = MUON["lr"] * 0.5 ** (step + 1)

    want, _ = by_hand(make, WINDOWS, RANKS, after_step=decay)

    def run(rank, model):
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        engine = start(model, optimizer, config_of(3))
        assert isinstance(optimizer, Muon) and isinstance(optimizer, torch.optim.Muon)
        after = (lambda step: schedule.step()) if scheduled else (lambda step: None)
        run_steps(engine, rank, range(STEPS), after=after)
        weights = full_weights(engine)
        engine.destroy()
        assert type(optimizer) is torch.optim.Muon
        return weights

    for weights in on_ranks(RANKS, run):
        same_directions(weights, want)


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}}])
@on_each_rank(RANKS)
def test_of_muon_each_parameter_keeps_its_own_moments_alone(rank, model, zero):
    """Four bytes of a matrix, eight of what AdamW updates; masters beside them where offloaded."""
    section = {"stage": 2, **zero}
    engine = start(model, WHOLE["muon"].ours(model), config_of(2, zero_optimization=section))
    run_steps(engine, rank, range(1))
    engine.updater.finish()
    matrices = sum(flat.layout.chunk for flat in engine.flats if "momentum" in flat.key)
    others = sum(flat.layout.chunk for flat in engine.flats) - matrices
    assert 0 < others < matrices and ADAM_OF_MUON
    masters = 4 * (matrices + others) if zero else 0
    assert engine.state_bytes()["optimizer"] == masters + 4 * matrices + 8 * others


@pytest.mark.parametrize("name, stage", [("adafactor", 1), ("lamb", 3)])
@on_each_rank(RANKS)
def test_sums_of_whole_tensors_are_few_messages_and_nothing_is_gathered(rank, model, name, stage):
    """Adafactor: rows, columns and a number for each matrix, then one number. LAMB: two numbers
    of 64 bits for each tensor, and a row for ranks that own nothing of a group.
    """
    engine = start(model, WHOLE[name].ours(model), config_of(stage))
    shapes = [tuple(p.ds_shape if stage == 3 else p.shape) for p in model.parameters()]
    run_steps(engine, rank, range(1))
    stats = engine.mesh.stats
    stats.keep_log = True
    stats.log.clear()
    run_steps(engine, rank, range(1, 2))
    sent = [nbytes for _, key, nbytes in stats.log if "sums over whole tensors" in key]
    numbers = sum(sum(shape) for shape in shapes) + len(shapes)
    assert (
        sent
        == {"adafactor": [8 * numbers, 8 * len(shapes)], "lamb": [(len(shapes) + 1) * 2 * 8]}[name]
    )


@on_each_rank(RANKS)
def test_a_checkpoint_of_torchs_adafactor_is_refused(rank, model, tmp_path):
    engine = start(model, torch.optim.Adafactor(trainable(model)), config_of(1))
    run_steps(engine, rank, range(1))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = start(model, Adafactor(trainable(model)), config_of(1))
    with pytest.raises(HfZeroError, match=r"has col_var, row_var, variance of whole parameters"):
        engine.load_checkpoint(tmp_path)


def test_factors_that_a_manifest_promises_are_looked_for(tmp_path):
    def run(rank, model):
        engine = start(model, WHOLE["adafactor"].ours(model), config_of(2))
        run_steps(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, tag="saved")

    on_ranks(RANKS, run)
    path = tmp_path / "saved" / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    factors = content["optimizer"]["factors"]
    name = next(iter(factors))
    for change, message in (
        ({"file": 9}, rf"whole parameter '{name}' is promised in file 9; there are 2 files"),
        ({"shapes": {"exp_avg_sq_row": [1000]}}, rf"factor::{name}::exp_avg_sq_row.*expected 1000"),
        ({"shapes": {"other": [4]}}, rf"factor::{name}::other' is absent"),
    ):
        told = {**factors, name: {**factors[name], **change}}
        path.write_text(
            json.dumps({**content, "optimizer": {**content["optimizer"], "factors": told}})
        )
        problems = hf_zero.verify_checkpoint(path.parent).problems
        assert any(re.search(message, each) for each in problems)


# ---- objects of the user ----


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
def test_model_parameters_as_groups(stage):
    """Groups handed to initialize beside an optimizer from the config."""

    def groups(model):
        return [
            {"params": list(model.head.parameters()), "lr": 0.1},
            {"params": [p for b in (model.enter, model.blocks) for p in b.parameters()]},
        ]

    want, _ = by_hand(lambda model: torch.optim.SGD(groups(model), lr=0.01), WINDOWS, RANKS)

    def run(rank, model):
        config = config_of(stage, optimizer={"type": "SGD", "params": {"lr": 0.01}})
        engine = start(model, None, config, model_parameters=groups(model))
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.1, 0.01]
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


def live_groups(rank, model, stage):
    """The object stays, and its groups are read in each step."""
    mine = adamw(model)
    groups = list(mine.param_groups)
    engine, optimizer, loader, scheduler = hf_zero.initialize(
        model=model, optimizer=mine, config=config_of(stage)
    )
    assert optimizer is mine and engine.optimizer is mine
    assert len(mine.param_groups) == len(groups)
    assert all(now is before for now, before in zip(mine.param_groups, groups))
    assert loader is None and scheduler is None
    run_steps(engine, rank, range(STEPS), after=lambda step: halve(step, None, mine))
    assert engine.get_lr() == [pytest.approx(1e-3 / 16)]
    return full_weights(engine)


def plain_loop(rank, model, stage):
    """``loss.backward()``, ``optimizer.step()`` and ``optimizer.zero_grad()`` are the engine's."""
    optimizer = adamw(model)
    engine = start(model, optimizer, config_of(stage))
    for step in range(STEPS):
        squared(engine, At(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(engine)


def with_state(rank, model, stage):
    """The optimizer has made two plain steps with the data of both ranks."""
    optimizer = adamw(model)
    for step in range(2):
        for other in range(RANKS):
            (squared(model, At(step, 0, other)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = start(model, optimizer, config_of(stage))
    run_steps(engine, rank, range(2, STEPS))
    return full_weights(engine)


def halve(step, model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("run", [live_groups, plain_loop, with_state], ids=lambda run: run.__name__)
def test_the_users_object(run, stage):
    after = {"after_step": halve} if run is live_groups else {}
    want, _ = by_hand(adamw, WINDOWS, RANKS, **after)
    for weights in on_ranks(RANKS, run, stage):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


class Mine(torch.optim.SGD):
    """An element-wise class of the user's own, with a step that is not torch's."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_class_that_is_not_known_is_refused_by_name_and_accepted_when_vouched_for():
    want, _ = by_hand(lambda model: torch.optim.SGD(trainable(model), lr=0.05), WINDOWS, RANKS)

    def run(rank, model):
        with pytest.raises(UnsupportedOptimizerError, match="Mine") as caught:
            start(model, Mine(trainable(model), lr=0.05), config_of(3))
        assert "elementwise_optimizers" in str(caught.value)
        with pytest.raises(UnsupportedOptimizerError, match="LBFGS"):
            start(model, torch.optim.LBFGS(trainable(model)), config_of(3))
        vouched = config_of(3, elementwise_optimizers=["Mine"])
        engine = start(model, Mine(trainable(model), lr=0.05), vouched)
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
def test_no_optimizer_at_all_evaluates(stage):
    def run(rank, model):
        engine = start(model, None, config_of(stage))
        assert engine.optimizer is None
        engine.eval()
        with torch.no_grad():
            return float(squared(engine, At(0, 0, 0)))

    want = float(squared(stack(), At(0, 0, 0)))
    assert on_ranks(RANKS, run) == pytest.approx([want] * RANKS, rel=1e-6)

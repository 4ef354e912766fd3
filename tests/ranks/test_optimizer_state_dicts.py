"""State dicts of the optimizer under an engine: by parameter, as those of plain torch, which load
in either place; those of release 0.2, by segment, load too.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.optim import Adafactor
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.offloads import offload
from tests.helpers.stacks import by_hand, on_ranks, run_steps, stack


def matrices_of(groups):
    """``groups`` of their matrices alone; all else is frozen."""
    for group in groups:
        for parameter in group["params"]:
            parameter.requires_grad_(parameter.requires_grad and parameter.ndim == 2)
    return [{"params": [p for p in group["params"] if p.ndim == 2]} for group in groups]


RANKS, BEFORE, STEPS = 2, 2, 4
WINDOWS = [[(1.0, 0)]] * STEPS
KINDS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups, lr=1e-3, relative_step=False),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-3),
    "torch's adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-3),
    "transformers' adafactor": lambda groups: transformers.Adafactor(
        groups, lr=1e-3, relative_step=False
    ),
    "torch's muon": lambda groups: torch.optim.Muon(matrices_of(groups), lr=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
}


def partly_frozen():
    model = stack()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number != 1)
    return model


def optimizer_of(kind, model):
    first, *others = model.parameters()
    return KINDS[kind]([{"params": others[::-1]}, {"params": [first]}])


def plainly(kind, ranks):
    """Weights and the state dict in the middle of a plain run, and at its end."""
    taken = {}

    def take(step, model, optimizer):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        taken[step] = weights, copy.deepcopy(optimizer.state_dict())

    make = lambda model: optimizer_of(kind, model)  # noqa: E731
    by_hand(make, WINDOWS, ranks, after_step=take, build=partly_frozen)
    return taken[BEFORE - 1], taken[STEPS - 1]


def engine_of(kind, stage, way, folder, model):
    section = offload(way, stage, folder) | {"stage3_param_persistence_threshold": 0}
    return start(model, optimizer_of(kind, model), config_of(stage, zero_optimization=section))


PLACES = [
    ("adamw", 0, "device", RANKS),
    ("sgd", 1, "device", RANKS),
    ("adamw", 2, "optimizer on cpu", 1),
    ("nadam", 3, "optimizer in files", RANKS),
    ("adafactor", 3, "device", RANKS),
    ("torch's adafactor", 2, "device", RANKS),
    ("transformers' adafactor", 3, "device", RANKS),
    ("torch's muon", 1, "device", RANKS),
    ("adagrad", 3, "device", RANKS),
]


@in_turn("kind, stage, way, ranks", PLACES)
def test_a_state_dict_of_plain_torch_is_loaded(kind, stage, way, ranks, tmp_path):
    """Each rank takes its parts of it."""
    (weights, packed), (want, _) = plainly(kind, ranks)

    def run(rank, model):
        model.load_state_dict(weights)
        engine = engine_of(kind, stage, way, tmp_path, model)
        engine.optimizer.load_state_dict(copy.deepcopy(packed))
        run_steps(engine, rank, range(BEFORE, STEPS))
        return full_weights(engine)

    for found in on_ranks(ranks, run, build=partly_frozen):
        oracle.compare_tensors("weights", found, want, floor=oracle.ADAM_ROUNDING)


WHOLE = [row for row in PLACES if row[1] == 0 or row[3] == 1]


@in_turn("kind, stage, way, ranks", [*WHOLE, ("torch's adafactor", 0, "device", RANKS)])
def test_a_state_dict_over_whole_parameters_is_as_in_plain_torch(kind, stage, way, ranks, tmp_path):
    """It has the frozen parameters of the groups, in the order of the script; and a plain loop
    continues with it.
    """
    (_, want), _ = plainly(kind, ranks)

    def run(rank, model):
        engine = engine_of(kind, stage, way, tmp_path, model)
        run_steps(engine, rank, range(BEFORE))
        packed = engine.optimizer.state_dict()
        assert [g["params"] for g in packed["param_groups"]] == [
            g["params"] for g in want["param_groups"]
        ]
        assert packed["state"].keys() == want["state"].keys()
        for entry, states in want["state"].items():
            oracle.compare_tensors(str(entry), packed["state"][entry], states)
            shapes = {name: value.shape for name, value in packed["state"][entry].items()}
            assert shapes == {name: value.shape for name, value in states.items()}
        alone = optimizer_of(kind, partly_frozen())
        alone.load_state_dict(packed)
        assert alone.state_dict()["state"].keys() == want["state"].keys()

    on_ranks(ranks, run, build=partly_frozen)


@in_turn("stage, plain", [(0, True), (0, False), (2, False), (3, True)])
def test_state_of_parameters_that_are_frozen_now_is_dropped(stage, plain, tmp_path, caplog):
    """With a warning; the others go on."""
    (weights, packed), _ = plainly("adamw", RANKS)
    frozen = next(name for name, _ in partly_frozen().named_parameters())

    def freeze(step, model, optimizer):
        model.get_parameter(frozen).requires_grad_(step + 1 < BEFORE)

    make = lambda model: optimizer_of("adamw", model)  # noqa: E731
    want, _ = by_hand(make, WINDOWS, RANKS, after_step=freeze, build=partly_frozen)

    def run(rank, model):
        given = copy.deepcopy(packed)
        if not plain:
            engine = engine_of("adamw", stage, "device", tmp_path, model)
            run_steps(engine, rank, range(BEFORE))
            given = copy.deepcopy(engine.optimizer.state_dict())
            engine.destroy()
            model = partly_frozen()
        model.load_state_dict(weights)
        model.get_parameter(frozen).requires_grad_(False)
        engine = engine_of("adamw", stage, "device", tmp_path, model)
        engine.optimizer.load_state_dict(given)
        run_steps(engine, rank, range(BEFORE, STEPS))
        return full_weights(engine)

    caplog.clear()
    for found in on_ranks(RANKS, run, build=partly_frozen):
        oracle.compare_tensors("weights", found, want, floor=oracle.ADAM_ROUNDING)
    assert f"has state of {frozen}, frozen here: it is dropped" in caplog.text


def of_release_0_2(engine):
    """The state dict of ``engine`` as release 0.2 has written it: by segment."""
    optimizer, table = engine.optimizer, engine.bound._table
    groups, shown = optimizer.param_groups, optimizer.state
    members = [group["params"] for group in groups]
    optimizer.state = engine.bound._table.entries.states
    for index, group in enumerate(groups):
        group["params"] = [s.tensor for s in table.segments if s.group == index]
    packed = copy.deepcopy(type(optimizer).state_dict(optimizer))
    optimizer.state = shown
    for group, params in zip(groups, members):
        group["params"] = params
    description = optimizer.state_dict()["segments"]
    places = [
        [
            [part.flat.key, part.flat.owned[0] + part.start, part.flat.owned[0] + part.stop]
            for part in segment.parts
        ]
        for segment in sorted(table.segments, key=lambda segment: segment.group)
    ]
    kept = {"places": places, "parted": [], "layout": description["layout"]}
    entries = [index for group in packed["param_groups"] for index in group["params"]]
    state = {
        n: packed["state"][index] for n, index in enumerate(entries) if index in packed["state"]
    }
    for states in state.values():  # torch's Adafactor had factors without their dimension of one
        of_factors = {"row_var": -1, "col_var": -2}.items()
        states |= {name: states[name].squeeze(dim) for name, dim in of_factors if name in states}
    return {**packed, "state": state, "segments": kept}


OF_0_2 = [("adamw", 2, 0), ("sgd", 3, 10**6), ("adafactor", 3, 0), ("torch's adafactor", 2, 0)]


@in_turn("kind, stage, whole", OF_0_2)
def test_a_state_dict_of_release_0_2_is_loaded(kind, stage, whole, tmp_path):
    """Also with other parameters whole."""
    (weights, _), (want, _) = plainly(kind, RANKS)

    def run(rank, model):
        engine = engine_of(kind, stage, "device", tmp_path, model)
        run_steps(engine, rank, range(BEFORE))
        packed = of_release_0_2(engine)
        assert "parts" not in packed["segments"]
        engine.destroy()
        model = partly_frozen()
        model.load_state_dict(weights)
        section = {"stage": stage, "stage3_param_persistence_threshold": whole}
        engine = start(
            model, optimizer_of(kind, model), config_of(stage, zero_optimization=section)
        )
        engine.optimizer.load_state_dict(packed)
        run_steps(engine, rank, range(BEFORE, STEPS))
        return full_weights(engine)

    for found in on_ranks(RANKS, run, build=partly_frozen):
        oracle.compare_tensors("weights", found, want, floor=oracle.ADAM_ROUNDING)


def test_ranks_without_a_part_of_a_group_count_its_steps():
    """After a load, too: a checkpoint may read the count from any rank."""

    def run(rank, model):
        *others, last = model.parameters()
        optimizer = KINDS["adamw"]([{"params": others}, {"params": [last]}])
        engine = start(model, optimizer, config_of(2))
        run_steps(engine, rank, range(BEFORE))
        packed = copy.deepcopy(engine.optimizer.state_dict())
        engine.optimizer.state.clear()
        engine.optimizer.load_state_dict(packed)
        parts = packed["segments"]["parts"]
        return parts[-1][1] < parts[-1][2], [
            each["step"] for each in engine.bound.state.scalars.of_groups()
        ]

    found = on_ranks(RANKS, run, build=partly_frozen)
    assert {own for own, _ in found} == {True, False}
    assert [steps for _, steps in found] == [[BEFORE] * 2] * RANKS


REFUSED = {
    "an array": (lambda state: torch.zeros_like(state["exp_avg"]), "mine", "has state mine, and"),
    "a number": (lambda state: 1.0, "mine", "has state mine, and .* keeps exp_avg, exp_avg_sq, s"),
    "a shape": (lambda state: torch.ones(3), "exp_avg", r"'exp_avg' of shape \(3,\) for enter"),
    "no number": (lambda state: torch.ones(3), "step", r"'step' of shape \(3,\) .* or one number"),
}


@in_turn("stage, what", [(0, "an array"), (2, "a number"), (2, "a shape"), (3, "no number")])
def test_a_refused_dict_changes_nothing(stage, what):
    value, name, message = REFUSED[what]

    def run(rank, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = start(model, optimizer, config_of(stage))
        run_steps(engine, rank, range(BEFORE))
        given = copy.deepcopy(optimizer.state_dict())
        given["param_groups"][0]["lr"] = 0.5
        for state in given["state"].values():
            state["exp_avg"].zero_()
        given["state"][0][name] = value(given["state"][0])
        with pytest.raises(UnsupportedOptimizerError, match=message):
            optimizer.load_state_dict(given)
        assert optimizer.param_groups[0]["lr"] == 1e-3
        means = [hf_zero.safe_get_full_optimizer_state(p, "exp_avg") for p in model.parameters()]
        assert all(mean.any() for mean in means)
        run_steps(engine, rank, range(BEFORE, STEPS))
        return full_weights(engine)

    want, _ = by_hand(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), WINDOWS, RANKS)
    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)

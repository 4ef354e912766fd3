"""``torch.distributed.checkpoint.state_dict`` on engines, against the state dicts of a plain
process: optimizers, options, groups, and state dicts that do not fit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from hf_zero.checkpoint.tensor_part import TensorPart
from hf_zero.errors import CheckpointError
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.parts import whole
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps
from tests.helpers.training import adamw

RANKS, SAVED_AFTER, STEPS = 2, 2, 4


def small():
    return seeded(lambda: Stack(1))


def split(kind, first, second):
    """An optimizer with a group of matrices and one of vectors."""

    def make(model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        return kind([{"params": matrices, **first}, {"params": vectors, **second}])

    return make


DECAYS: Any = {"lr": 2e-3, "eps": 1e-6, "weight_decay": 0.1}, {"lr": 1e-3, "eps": 1e-6}
OPTIMIZERS: dict[str, Any] = {
    "two groups": split(torch.optim.AdamW, *DECAYS),
    "AMSGrad in one": split(torch.optim.AdamW, DECAYS[0], {**DECAYS[1], "amsgrad": True}),
    "momentum in one": split(torch.optim.SGD, {"lr": 0.01}, {"lr": 0.01, "momentum": 0.9}),
    "no state": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "numbers that begin at 1": lambda model: torch.optim.NAdam(model.parameters(), eps=1e-6),
    "states that begin at 1": lambda model: torch.optim.Adagrad(
        model.parameters(), initial_accumulator_value=1.0
    ),
}
WHOLE = {"full_state_dict": True}
OF_RANK0 = {**WHOLE, "cpu_offload": True, "broadcast_from_rank0": True}


def plain(kind):
    """The optimizer's state dict of a plain process after SAVED_AFTER steps; weights at the end."""
    kept: list[Any] = []

    def after(step, model, optimizer):
        if step == SAVED_AFTER - 1:
            state = get_optimizer_state_dict(model, optimizer)["state"]
            kept.append({n: {k: v.clone() for k, v in s.items()} for n, s in state.items()})

    windows = [[(1.0, 0)]] * STEPS
    ended, _ = by_hand(OPTIMIZERS[kind], windows, RANKS, after_step=after, build=small)
    return kept[0], ended


def resumed(rank, kind, stage, steps, given, options=None):
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    engine = start(model, OPTIMIZERS[kind](model), config_of(stage))
    set_optimizer_state_dict(model, engine.optimizer, given[1], options=options)
    set_model_state_dict(model, given[0], options=options)
    run_steps(engine, rank, range(steps, STEPS))
    return full_weights(engine)


@in_turn(
    "kind, stage, after, given",
    [
        *((kind, (0, 3)[turn % 2], SAVED_AFTER, {}) for turn, kind in enumerate(OPTIMIZERS)),
        ("momentum in one", 3, 0, {}),
        ("two groups", 3, SAVED_AFTER, {"flatten_optimizer_state_dict": True}),
        ("two groups", 0, SAVED_AFTER, WHOLE),
        ("two groups", 3, SAVED_AFTER, OF_RANK0),
    ],
)
def test_states_are_those_of_torch_and_training_goes_on(kind, stage, after, given):
    want, ended = plain(kind)
    options = StateDictOptions(**given)

    def run(rank, model):
        engine = start(model, OPTIMIZERS[kind](model), config_of(stage))
        run_steps(engine, rank, range(after))
        state = get_state_dict(model, engine.optimizer, options=options)
        if options.broadcast_from_rank0 and rank:
            assert not state[1]
            state = {}, {}
        else:
            first = next(iter(state[0].values()))
            assert isinstance(first, TensorPart) is not options.full_state_dict
        return state[1].get("state"), resumed(rank, kind, stage, after, state, options)

    found = on_ranks(RANKS, run, build=small)
    compare_tensors("weights", found[0][1], ended)
    for name, states in want.items() if after and not given else ():
        every = [each[0][name] for each in found]
        assert every[0].keys() == states.keys(), name
        joined = {
            key: whole([each[key] for each in every]) if value.dim() else every[0][key]
            for key, value in states.items()
        }
        compare_tensors(name, joined, states)


@in_turn("stage, parts", [(0, "weights"), (3, "both"), (3, "states")])
@on_each_rank(RANKS)
def test_other_ranks_give_nothing(rank, stage, parts):
    """``set_state_dict`` with what rank 0 has, and empty state dicts on the other."""
    options = StateDictOptions(**OF_RANK0)

    def opened(steps):
        model = small()
        engine = start(model, adamw(model), config_of(stage))
        run_steps(engine, rank, range(steps))
        state = get_state_dict(model, engine.optimizer, options=options)
        return model, engine.optimizer, state

    _, _, (weights, states) = opened(SAVED_AFTER)
    model, optimizer, before = opened(0)
    given = {
        "model_state_dict": weights if rank == 0 and parts != "states" else {},
        "optim_state_dict": states if rank == 0 and parts != "weights" else {},
    }
    set_state_dict(model, optimizer, **given, options=options)
    found = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        compare_tensors("weights", found[0], before[0] if parts == "states" else weights)
        want = before[1] if parts == "weights" else states
        for name, state in want["state"].items():
            compare_tensors(name, found[1]["state"][name], state)


@in_turn("stage", [0, 3])
@on_each_rank(RANKS, small)
def test_groups_are_found_by_their_parameters(rank, model, stage):
    engine = start(model, split(torch.optim.AdamW, *DECAYS)(model), config_of(stage))
    options = StateDictOptions(**WHOLE)
    given = get_optimizer_state_dict(model, engine.optimizer, options=options)
    given["param_groups"].reverse()
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    set_optimizer_state_dict(model, engine.optimizer, given)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [2e-3, 1e-3]
    given["param_groups"] = [{**group, "lr": 1.0} for group in given["param_groups"]]
    given["param_groups"][0]["params"] += given["param_groups"][1]["params"][:1]
    given["param_groups"][1]["params"][:1] = []
    with pytest.raises(CheckpointError, match=r"are in groups 0, 1 .* whose settings differ"):
        set_optimizer_state_dict(model, engine.optimizer, given)
    given["param_groups"] = []
    with pytest.raises(CheckpointError, match="no group with"):
        set_optimizer_state_dict(model, engine.optimizer, given)


WRONG: list[Any] = [
    (lambda s: s.update({"head.weight": torch.zeros(32, 5)}), r"head\.weight.*shape \(32, 5\)"),
    (lambda s: s.update({"head.weight": torch.zeros(160)}), r"head\.weight.*shape \(160,\)"),
    (lambda s: s.update({"head.bias": torch.ones(1)}), r"head\.bias.*shape \(1,\)"),
    (lambda s: s.update({"head.bias": None}), r"head\.bias: None"),
    (lambda s: s.update({"head.bias": torch.ones(5, device="meta")}), "without data"),
    (lambda s: s.update({"count": torch.ones(2)}), r"count.*buffer of shape \(1,\)"),
    (lambda s: s.pop("head.bias"), r"lacks head\.bias and has nothing"),
    (lambda s: s.update({"other": torch.ones(1)}), "lacks nothing and has other"),
]
# whether they are taken, and the step counts of head.bias then, where strict is False
WRONG_STATE: list[Any] = [
    (lambda s: s["state"].pop("head.bias"), r"lacks head\.bias\.exp_avg", 2),
    (lambda s: s["state"]["head.bias"].pop("exp_avg"), r"lacks head\.bias\.exp_avg and", 1),
    (lambda s: s["state"]["head.bias"].pop("step"), r"lacks head\.bias\.step", 2),
    (lambda s: s["state"]["head.bias"].update(other=torch.ones(5)), r"has head\.bias\.other", 1),
    (lambda s: s["state"]["head.bias"].update(exp_avg=torch.ones(1)), r"bias\.exp_avg: .*\(1,", 0),
    (lambda s: s.pop("param_groups"), "lacks param_groups", 0),
]


def counting():
    model = small()
    model.register_buffer("count", torch.zeros(1))
    return model


@in_turn("stage", [0, 3])
@on_each_rank(RANKS, counting)
def test_weights_that_do_not_fit_are_refused_before_a_write(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    want = full_weights(engine)
    for change, message in WRONG:
        given = {name: value * 2 for name, value in want.items()} | {"count": torch.ones(1)}
        change(given)
        with pytest.raises(CheckpointError, match=message):
            set_model_state_dict(model, given)
        compare_tensors(message, full_weights(engine), want, 0.0, 0.0)
    run_steps(engine, rank, [0])


@on_each_rank(RANKS)
def test_states_that_do_not_fit_are_refused(rank):
    for change, message, count in WRONG_STATE:
        model = small()
        engine = start(model, adamw(model), config_of(3))
        run_steps(engine, rank, [0])
        options = StateDictOptions(**WHOLE)
        given = get_optimizer_state_dict(model, engine.optimizer, options=options)
        change(given)
        with pytest.raises(CheckpointError, match=message):
            set_optimizer_state_dict(model, engine.optimizer, given)
        if count:
            run_steps(engine, rank, [1])
            lax = StateDictOptions(strict=False)
            set_optimizer_state_dict(model, engine.optimizer, given, options=lax)
            states = get_optimizer_state_dict(model, engine.optimizer)["state"]
            assert states["head.weight"]["step"] == 1 and states["head.bias"]["step"] == count
        run_steps(engine, rank, [2])


@in_turn("stage", [0, 3])
@on_each_rank(RANKS, small)
def test_parts_of_models(rank, model, stage):
    want = {n: p.detach().clone() for n, p in model.blocks[0].named_parameters()}
    engine = start(model, adamw(model), config_of(stage))
    compare_tensors("part", get_model_state_dict(model.blocks[0]), want, 0.0, 0.0)
    around = nn.ModuleDict({"inner": model, "extra": nn.Linear(2, 2)})
    names = {name for name, _ in around.named_parameters()}
    assert get_model_state_dict(around).keys() == names
    with pytest.raises(CheckpointError, match=r"pass engine\.module"):
        get_optimizer_state_dict(model.blocks[0], engine.optimizer)
    with pytest.raises(CheckpointError, match=r"pass engine\.optimizer"):
        get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), 0.1))


class Noted(nn.Module):
    """Tied weights, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.note = "new"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


@in_turn("stage", [0, 3])
@on_each_rank(RANKS, lambda: seeded(Noted))
def test_tied_names_and_extra_state(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    assert get_model_state_dict(model).keys() == Noted().state_dict().keys()
    given = {**full_weights(engine), "_extra_state": "saved"}
    given["second.weight"] = given.pop("first.weight") * 2  # under one of its names
    set_model_state_dict(model, given)
    assert model.note == "saved"
    assert torch.equal(full_weights(engine)["first.weight"], given["second.weight"])

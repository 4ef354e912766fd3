"""Adafactor in one process: transformers' update, and torch's; its rectangles; what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.config import OptimizerConfig
from hf_zero.errors import ConfigError
from hf_zero.optim import Adafactor, build_optimizer
from hf_zero.optim.adafactor import rectangles
from hf_zero.optim.elementwise import adopt, give_back

SHAPES = ((4, 3), (5,), (), (3, 2, 4), (1, 6))
SETTINGS: list[dict[str, Any]] = [
    {},
    {"warmup_init": True, "clip_threshold": 0.3},
    {"beta1": 0.9, "weight_decay": 0.1},
    {"lr": 0.03, "relative_step": False, "scale_parameter": False},
    {"lr": 0.03, "relative_step": False, "eps": (1e-3, 0.5), "decay_rate": -0.5},
]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def stepped_alike(ours: Any, mine: Any, theirs: Any, want: Any, first: int = 0) -> None:
    for step in range(first, first + 5):
        torch.manual_seed(step)
        for p, w in zip(mine, want):
            p.grad = torch.randn_like(p) * (0.0 if step == 2 and p.ndim == 2 else 1.0)
            w.grad = p.grad.clone()
        ours.step()
        theirs.step()
        for p, w in zip(mine, want):
            torch.testing.assert_close(p, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_is_transformers_update(settings):
    mine, want = parameters(), parameters()
    ours = Adafactor(mine, **settings)
    stepped_alike(ours, mine, transformers.Adafactor(want, **settings), want)
    names = {"step", "factors"} | ({"exp_avg"} if "beta1" in settings else set())
    assert set(ours.state[mine[0]]) == names
    shapes = {name: tuple(each.shape) for name, each in ours.state[mine[3]]["factors"].items()}
    assert shapes == {"exp_avg_sq_row": (3, 2), "exp_avg_sq_col": (3, 4)}


ADOPTED = [
    (transformers.Adafactor, SETTINGS[0]),
    (transformers.Adafactor, SETTINGS[2]),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adafactor, {"lr": 0.5, "weight_decay": 0.1, "d": 1.5, "maximize": True}),
    (torch.optim.Adafactor, {"eps": (1e-2, 0.3), "beta2_decay": -0.5}),
]


@pytest.mark.parametrize(("kind", "settings"), ADOPTED)
def test_an_object_of_another_library_goes_on_as_it_was(kind, settings):
    """Also with the state of steps before."""
    mine, want = parameters(), parameters()
    ours, theirs = kind(mine, **settings), kind(want, **settings)
    stepped_alike(ours, mine, theirs, want)
    schedule = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1.0) if "lr" in settings else 0
    adopt(ours)
    assert isinstance(ours, kind) and type(ours) is not kind
    stepped_alike(ours, mine, theirs, want, 5)
    assert ours.state[mine[0]]["factors"] and schedule is not None
    give_back(ours)
    assert type(ours) is kind


def test_parameters_of_several_dtypes():
    mine, want = parameters(), parameters()
    for each in (mine, want):
        each[0].data, each[3].data = each[0].data.double(), each[3].data.double()
    stepped_alike(Adafactor(mine), mine, transformers.Adafactor(want), want)


def test_a_state_dict_goes_on():
    mine, want = parameters(), parameters()
    ours, theirs = Adafactor(mine), transformers.Adafactor(want)
    stepped_alike(ours, mine, theirs, want)
    packed = copy.deepcopy(ours.state_dict())
    fresh = Adafactor(mine)
    fresh.load_state_dict(packed)
    stepped_alike(fresh, mine, theirs, want, 5)


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4).flatmap(
        lambda shape: st.tuples(st.just(tuple(shape)), st.integers(0, 700), st.integers(0, 700))
    )
)
def test_rectangles_are_the_elements_in_order(of):
    shape, one, other = of
    values = torch.arange(torch.Size(shape).numel())
    start, stop = sorted(min(each, values.numel()) for each in (one, other))
    matrices = values.view(-1, *shape[-2:])
    at = start
    for each in rectangles(start, stop, shape):
        found = each.of(values[start:stop])
        want = matrices[each.matrix, each.row : each.row + each.rows]
        assert torch.equal(found, want[:, each.column : each.column + each.columns])
        assert each.offset == at - start
        at += found.numel()
    assert at == stop


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.1}, "lr is 0.1 and relative_step is true"),
        ({"relative_step": False}, "lr is None"),
        ({"lr": 0.1, "relative_step": False, "warmup_init": True}, "warmup_init is True"),
        ({"lr": -1.0, "relative_step": False}, "lr is -1.0"),
        ({"clip_threshold": 0.0}, "clip_threshold 0.0"),
        ({"decay_rate": 0.8}, "decay_rate 0.8"),
        ({"weight_decay": -1.0}, "weight_decay -1.0"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
    ],
)
def test_what_is_out_of_range_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        Adafactor(parameters(), **settings)


def test_keys_of_the_configuration():
    params: dict[str, Any] = {"lr": 0.1, "relative_step": False, "beta1": None, "eps": [0.1, 0.2]}
    made = build_optimizer(OptimizerConfig(type="adafactor", params=params), parameters())
    assert isinstance(made, Adafactor)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["eps"]) == (0.1, (0.1, 0.2))
    for key, value in (("beta1", "0.9"), ("lr", True), ("warmup_init", 1), ("betas", [0.9, 0.99])):
        with pytest.raises(ConfigError, match=key):
            build_optimizer(OptimizerConfig(type="Adafactor", params={key: value}), parameters())

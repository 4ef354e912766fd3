"""Lion against a plain loop over Python numbers."""

from __future__ import annotations

import pytest
import torch

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.optim import Lion


def slow(
    values: list[float],
    gradients: list[list[float]],
    lr: float,
    betas: tuple[float, float],
    decay: float,
) -> list[float]:
    """The update of the paper, number by number in double precision."""
    moments = [0.0] * len(values)
    for step in gradients:
        for i, g in enumerate(step):
            c = betas[0] * moments[i] + (1 - betas[0]) * g
            sign = (c > 0) - (c < 0)
            values[i] -= lr * (sign + decay * values[i])
            moments[i] = betas[1] * moments[i] + (1 - betas[1]) * g
    return values


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(("decay", "maximize"), [(0.0, False), (0.3, False), (0.3, True)])
def test_lion_follows_the_paper(foreach, decay, maximize):
    start = [torch.randn(3, 2), torch.randn(5), torch.randn(()), torch.randn(0)]
    parameters = [torch.nn.Parameter(t.clone()) for t in start]
    optimizer = Lion(
        parameters,
        lr=0.01,
        betas=(0.7, 0.9),
        weight_decay=decay,
        foreach=foreach,
        maximize=maximize,
    )
    gradients = [[torch.randn_like(t) for t in start] for _ in range(6)]
    gradients[3][1].zero_()
    for step in gradients:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = gradient.clone()
        optimizer.step()
    for index, parameter in enumerate(parameters):
        flat = [
            ((-1 if maximize else 1) * step[index]).reshape(-1).double().tolist()
            for step in gradients
        ]
        want = slow(start[index].reshape(-1).double().tolist(), flat, 0.01, (0.7, 0.9), decay)
        torch.testing.assert_close(
            parameter.data.reshape(-1),
            torch.tensor(want, dtype=torch.float32),
            rtol=1e-5,
            atol=1e-6,
        )
        assert set(optimizer.state[parameter]) == {"exp_avg"}


def test_both_paths_agree_bit_for_bit_and_leave_gradients_alone():
    start, gradient = torch.randn(257), torch.randn(257)
    results = []
    for foreach in (True, False):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = Lion([parameter], lr=0.1, weight_decay=0.1, foreach=foreach)
        for _ in range(3):
            parameter.grad = gradient.clone()
            optimizer.step()
            assert torch.equal(parameter.grad, gradient)
        results.append((parameter.data, optimizer.state[parameter]["exp_avg"]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_parameters_without_gradient_and_mixed_dtypes():
    parameters = [
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        torch.nn.Parameter(torch.ones(2)),
    ]
    optimizer = Lion(parameters, lr=0.5)
    parameters[0].grad = torch.ones(2)
    parameters[1].grad = -torch.ones(2, dtype=torch.float64)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert [p.data.tolist() for p in parameters] == [[0.5, 0.5], [1.5, 1.5], [1.0, 1.0]]
    assert parameters[2] not in optimizer.state


def test_state_dict_round_trip():
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = Lion([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    other = Lion([torch.nn.Parameter(torch.zeros(3))], lr=3.0)
    saved = optimizer.state_dict()
    for key in ("maximize", "foreach"):  # as an older version would have saved it
        del saved["param_groups"][0][key]
    other.load_state_dict(saved)
    group = other.param_groups[0]
    assert (group["lr"], group["maximize"], group["foreach"]) == (1e-4, False, None)
    assert torch.equal(
        other.state[group["params"][0]]["exp_avg"], optimizer.state[parameter]["exp_avg"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Lion: lr is -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_bad_hyperparameters_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Lion([torch.nn.Parameter(torch.zeros(1))], **options)


def test_sparse_gradients_are_refused():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.zeros(3).to_sparse()
    with pytest.raises(UnsupportedOptimizerError, match=r"shape \(3,\) is sparse; make it dense"):
        Lion([parameter]).step()

"""Optimizers that may run on shards, and what the others are told: the exact list; Lion against a
plain loop over Python numbers; messages about momenta in one bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.optim import Lion, OneBitAdam, ZeroOneAdam
from hf_zero.optim.elementwise import ELEMENTWISE, check, elementwise_base
from hf_zero.optim.one_bit import as_sent, one_bit_of


def over(cls, **options):
    return cls([torch.nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.parametrize("cls", ELEMENTWISE)
def test_listed_classes_pass(cls):
    check(over(cls))
    assert elementwise_base(cls) is cls


def test_every_class_of_torch_optim_is_either_listed_or_refused():
    classes = {
        c
        for c in vars(torch.optim).values()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    refused = {
        cls.__name__ for cls in classes - {torch.optim.Optimizer} if elementwise_base(cls) is None
    }
    assert refused == {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def test_a_subclass_with_the_same_update_passes():
    class Defaults(torch.optim.AdamW):
        def __init__(self, params):
            super().__init__(params, lr=0.5)

    check(over(Defaults))
    assert elementwise_base(Defaults) is torch.optim.AdamW


@pytest.mark.parametrize("method", ["step", "_init_group"])
def test_a_subclass_with_its_own_update_is_refused(method):
    Normed = type("Normed", (torch.optim.SGD,), {method: lambda self, *args: None})
    with pytest.raises(
        UnsupportedOptimizerError,
        match=r"Normed .* replaces the update of torch.optim.SGD "
        r'.*"elementwise_optimizers": \["Normed"\]',
    ):
        check(over(Normed))
    check(over(Normed), ("Normed",))


@pytest.mark.parametrize(("name", "why"), [("LBFGS", "dot products"), ("SparseAdam", "sparse")])
def test_whole_tensor_optimizers_are_refused_with_the_reason(name, why):
    with pytest.raises(
        UnsupportedOptimizerError,
        match=rf'optimizer {name} .*{why}.*"elementwise_optimizers": \["{name}"\]',
    ):
        check(over(getattr(torch.optim, name)))


def test_whole_matrix_optimizers_of_torch_pass_unless_their_update_is_another():
    matrix = [torch.nn.Parameter(torch.ones(2, 2))]
    check(torch.optim.Muon(matrix))
    check(torch.optim.Adafactor(matrix))
    check(transformers.Adafactor(matrix))
    Normed = type("Normed", (torch.optim.Muon,), {"step": lambda self, *args: None})
    with pytest.raises(UnsupportedOptimizerError, match="Normed cannot run"):
        check(Normed(matrix))


class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})


class SOAP(Own):
    pass


def test_unknown_classes_are_refused_unless_vouched_for():
    with pytest.raises(UnsupportedOptimizerError, match="hf-zero does not know whether"):
        check(over(Own), ("Other",))
    check(over(Own), ("Other", "Own"))
    check(over(Own), (f"{__name__}.Own",))
    with pytest.raises(UnsupportedOptimizerError, match=r"SOAP.*preconditions"):
        check(over(SOAP), ("Own",))


def test_something_that_is_no_optimizer_is_refused():
    class Wrapper:
        optimizer = over(Lion)

    with pytest.raises(
        UnsupportedOptimizerError,
        match=r"Wrapper is not a torch.optim.Optimizer; pass the optimizer itself",
    ):
        check(Wrapper(), ("Wrapper",))


def slow(values, gradients, lr, betas, decay):
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


ONE: dict[str, Any] = {"compressed_communication": {"bits": 1, "freeze_step": 5}}


def parameters():
    return [torch.nn.Parameter(torch.zeros(4, 4))]


def config(stage=1, zero=None, **more):
    return ZeroConfig.from_dict({"zero_optimization": {"stage": stage, **(zero or {})}, **more})


def test_any_adam_sends_its_momentum_where_the_section_asks_for_it():
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        found = one_bit_of(config(**ONE), cls(parameters(), lr=0.1))
        assert found is not None and found.block == 2048
        assert [found.is_dense(step) for step in (1, 5, 6)] == [True, True, False]
    assert one_bit_of(config(), torch.optim.AdamW(parameters())) is None
    assert one_bit_of(config(**ONE), None) is None


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_runs_at_stage_1(stage):
    given = config(stage)
    made = as_sent(given, one_bit_of(given, OneBitAdam(parameters(), freeze_step=3)))
    assert (made.stage, made.compressed_communication.bits) == (1, 1)
    assert "1 bit" in made.sources["compressed_communication.bits"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(3), "OneBitAdam in 1 bit does not go with zero_optimization.stage: 3: .* stage 1"),
        (config(compressed_communication={"bits": 4}), "one of the two; remove the key"),
        (config(zero={"zero_quantized_gradients": True}), "travel twice; remove the key"),
        (
            config(zero={"offload_optimizer": {"device": "cpu"}}),
            "device: cpu: the update",
        ),
        (config(replicate_size=2), "replicate_size: 2: messages go over one axis"),
        (config(zero={"mics_shard_size": 1}).resolve(2), "replicate_size: 2: messages go over one"),
        (config(data_types={"grad_accum_dtype": "bf16"}), "grad_accum_dtype: bf16: the grad"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        one_bit_of(given, OneBitAdam(parameters(), freeze_step=3))


def test_groups_that_do_not_go_with_it_are_named():
    groups = [{"params": parameters()}, {"params": parameters(), "betas": (0.5, 0.9)}]
    for optimizer, message in (
        (torch.optim.AdamW(parameters(), amsgrad=True), "amsgrad: a group sets it"),
        (torch.optim.AdamW(parameters(), maximize=True), "maximize: a group sets it"),
        (torch.optim.AdamW(groups), "betas: groups differ"),
        (torch.optim.AdamW(parameters(), betas=(0.0, 0.9)), r"give a first one in \(0, 1\)"),
        (torch.optim.Adam(parameters(), weight_decay=0.1), "weight_decay of Adam, .*: take AdamW"),
        (torch.optim.SGD(parameters(), lr=0.1), "the optimizer is SGD; take one of them, or .*: 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            one_bit_of(config(**ONE), optimizer)
    with pytest.raises(ConfigError, match=r"1 without compressed_communication\.freeze_step"):
        one_bit_of(
            config(compressed_communication={"bits": 1}), torch.optim.AdamW(parameters(), lr=0.1)
        )


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (OneBitAdam, {"freeze_step": 0}, "OneBitAdam: freeze_step is 0; give a number of steps"),
        (ZeroOneAdam, {"var_freeze_step": 2.5}, "var_freeze_step is 2.5"),
        (ZeroOneAdam, {"var_update_scaler": True}, "var_update_scaler is True"),
        (ZeroOneAdam, {"local_step_clipper": 0}, "local_step_clipper is 0"),
        (OneBitAdam, {"betas": (0.0, 0.9)}, "needs a first one in"),
        (OneBitAdam, {"lr": -1.0}, "Invalid learning rate"),
    ],
    ids=str,
)
def test_settings_outside_their_range(cls, settings, message):
    with pytest.raises(ValueError, match=message):
        cls(parameters(), **settings)


def test_what_has_no_effect_is_said(caplog):
    caplog.set_level("INFO", "hf_zero")
    groups = [{"params": parameters(), "exp_avg_mask": torch.ones(4, 4)}]
    ZeroOneAdam(groups, cuda_aware=False, comm_backend_name="nccl")
    said = caplog.text
    for key in ("cuda_aware", "comm_backend_name", "exp_avg_mask"):
        assert key in said, key


def test_a_freeze_step_that_nothing_reads_is_refused():
    freeze = {"freeze_step": 4}
    for given, optimizer, message in (
        (freeze, OneBitAdam(parameters()), "write freeze_step in the parameters of OneBitAdam"),
        (freeze, torch.optim.AdamW(parameters()), "write bits: 1, or remove it"),
        (
            {**freeze, "bits": 4},
            torch.optim.AdamW(parameters()),
            "is for bits: 1 with Adam or AdamW",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            one_bit_of(config(compressed_communication=given), optimizer)

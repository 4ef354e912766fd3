"""The host optimizers as torch.optim classes: updates, state, what a state dict survives. Adam
without bias correction: the formula written out, by torch's loops, the host kernels and the flat
ones, and offloaded.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.deepspeed import optimizers
from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops.moment_blocks import Blocks
from hf_zero.optim import CPUSGD, Adam, CPUAdagrad, CPUAdam, CPULion, Lion, own_step
from hf_zero.optim.elementwise import check, elementwise_base
from hf_zero.optim.initial_state import initial_state
from tests.helpers import oracle
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps

Make = Callable[[Any], torch.optim.Optimizer]
EASY: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
FAST: dict[str, Any] = {**EASY, "betas": (0.3, 0.5), "eps": 1e-6}
LARGEST: dict[str, Any] = {"lr": 1e-2, "amsgrad": True, "maximize": True}
NESTEROV: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
PAIRS: list[tuple[Make, Make]] = [
    (partial(CPUAdam, **EASY), partial(torch.optim.AdamW, **EASY)),
    (partial(CPUAdam, **FAST), partial(torch.optim.AdamW, **FAST)),
    (partial(CPUAdam, adamw_mode=False, **EASY), partial(torch.optim.Adam, **EASY)),
    (partial(CPUAdam, **LARGEST), partial(torch.optim.Adam, **LARGEST)),
    (partial(CPULion, **EASY), partial(Lion, **EASY)),
    (
        lambda p: CPUAdagrad(p, lr_decay=0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adagrad(p, 1e-2, 0.1, 0.0, 0.5),
    ),
    (lambda p: CPUSGD(p, 0.1, 0.9, 0.2, 0.1), lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.2, 0.1)),
    (partial(CPUSGD, **NESTEROV), partial(torch.optim.SGD, **NESTEROV)),
    (lambda p: CPUSGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
]


def parameters():
    generator = torch.Generator().manual_seed(0)
    across = torch.randn(5, 7, generator=generator).t()  # not contiguous
    return [
        nn.Parameter(across),
        nn.Parameter(torch.randn(3, 4, 5, generator=generator)),
        nn.Parameter(torch.ones(1)),
    ]


def train(optimizer, params, steps):
    for step in steps:
        for index, param in enumerate(params):
            if index == 2:
                continue  # one parameter never has a gradient
            param.grad = torch.sin(param.detach() * 3 + step + index)
        optimizer.step()


@in_one_item(PAIRS)
def test_updates_and_state_are_those_of_torch(pair):
    first, second = parameters(), parameters()
    one, other = pair[0](first), pair[1](second)
    train(one, first, range(4))
    train(other, second, range(4))
    for a, b in zip(first, second):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
        if b.grad is None:
            assert torch.equal(a, b) and a not in one.state
            continue
        extra = {"step"} if isinstance(one, CPULion) else set()
        kept = {name: value for name, value in other.state.get(b, {}).items() if value is not None}
        assert set(one.state.get(a, {})) - extra == set(kept)
        for name, value in kept.items():
            torch.testing.assert_close(one.state[a][name], value, rtol=2e-6, atol=2e-7)


@in_one_item([(CPUAdam, "fp32"), (CPUAdam, "int8"), (CPULion, "bf16"), (CPULion, "int8")])
def test_a_resumed_run_or_a_copy_goes_on_bit_for_bit(case):
    cls, settings = case[0], {"lr": 1e-2, "moments": case[1]}
    straight, cut = parameters(), parameters()
    train(cls(straight, **settings), straight, range(6))
    before = cls(cut, **settings)
    train(before, cut, range(3))
    saved = pickle.loads(pickle.dumps(before.state_dict()))
    for index in (0, 1):
        shapes = {tuple(value.shape) for value in saved["state"][index].values() if value.dim()}
        assert shapes == {tuple(cut[index].shape)}
    other = copy.deepcopy(before)
    train(other, other.param_groups[0]["params"], range(3, 6))
    assert all(map(torch.equal, other.param_groups[0]["params"], straight))
    after = cls(cut, **settings)
    after.load_state_dict(saved)
    train(after, cut, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(straight, cut))


def test_a_state_dict_goes_between_settings_and_into_torchs_class():
    params = parameters()
    narrow = CPUAdam(params, lr=1e-2, moments="int8", adamw_mode=False)
    train(narrow, params, range(3))
    assert isinstance(narrow.state[params[0]]["exp_avg"], Blocks)
    saved = narrow.state_dict()
    theirs = torch.optim.Adam(params, lr=1e-2)
    theirs.load_state_dict(copy.deepcopy(saved))
    assert theirs.state[params[0]]["exp_avg"].dtype == torch.float32
    train(theirs, params, range(1))
    for moments, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        wide = CPUAdam(params, moments=moments)
        wide.load_state_dict(copy.deepcopy(saved))
        assert wide.param_groups[0]["moments"] == moments
        assert wide.state[params[0]]["exp_avg"].dtype == kind
        train(wide, params, range(1))
    back = CPUAdam(params, moments="int8")
    back.load_state_dict(saved)
    ours, kept = back.state[params[0]]["exp_avg_sq"], narrow.state[params[0]]["exp_avg_sq"]
    assert torch.equal(ours.codes, kept.codes) and torch.equal(ours.scales, kept.scales)


def test_a_schedule_and_a_tensor_as_learning_rate_are_followed():
    """And a closure is called with gradients on."""
    params = [nn.Parameter(torch.ones(2))]
    optimizer = CPUSGD(params, lr=torch.tensor(1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    for _ in range(2):
        params[0].grad = torch.ones(2)
        optimizer.step()
        schedule.step()
    assert params[0].detach().tolist() == pytest.approx([-0.1, -0.1])
    param = nn.Parameter(torch.ones(2))
    optimizer = CPUAdam([param])

    def closure():
        loss = param.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 2.0 and bool((param < 1).all())


@in_one_item(enumerate(PAIRS))
def test_parameters_in_16_bits_have_masters_of_their_own(case):
    """Also across a state dict, not contiguous, and where the script writes to one."""
    number, (ours, plain) = case
    dtype = (torch.bfloat16, torch.float16)[number % 2]
    start = torch.randn(3, 5).to(dtype)
    half = nn.Parameter(start.clone().t())
    whole = nn.Parameter(start.float().t().contiguous())
    first, torchs = ours([half]), plain([whole])
    for step in range(8):
        half.grad = torch.sin(torch.arange(15.0) + step).view(5, 3).to(dtype)
        whole.grad = half.grad.float()
        if step == 3:
            saved = copy.deepcopy(first.state_dict())
            first = ours([half])
            first.load_state_dict(saved)
        if step == 5:
            with torch.no_grad():
                half[0, 0] = whole[0, 0] = 2.0
        first.step()
        torchs.step()
        master = first.state[half]["master"]
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, whole.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(half.detach(), master.to(dtype))


def test_adagrad_takes_sparse_gradients():
    ours, plain = (nn.Parameter(torch.linspace(-1, 1, 12).view(6, 2)) for _ in range(2))
    optimizers = CPUAdagrad([ours], lr=0.1), torch.optim.Adagrad([plain], lr=0.1)
    draw = torch.Generator().manual_seed(0)
    for _ in range(4):
        rows = torch.randint(6, (1, 4), generator=draw)  # some of them twice
        values = torch.randn(4, 2, generator=draw)
        for parameter, optimizer in zip((ours, plain), optimizers):
            parameter.grad = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=True)
            optimizer.step()
        torch.testing.assert_close(ours, plain)


def test_adagrad_without_eps_takes_no_sparse_gradients():
    """The dense kernel would divide 0 by 0 in rows without a gradient."""
    rows = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = CPUAdagrad(rows.parameters(), eps=0.0)
    rows(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(UnsupportedOptimizerError, match="CPUAdagrad"):
        optimizer.step()


LOADED = [
    (CPUAdam, torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    (CPUAdagrad, torch.optim.Adagrad, {}),
    (CPUSGD, torch.optim.SGD, {"momentum": 0.9}),
]


@pytest.mark.parametrize("ours, theirs, settings", LOADED)
def test_state_of_weights_in_channels_last_is_loaded(ours, theirs, settings):
    models = [torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    images = torch.randn(2, 3, 8, 8)
    plain = theirs(models[0].parameters(), lr=0.1, **settings)
    models[0](images).square().mean().backward()
    plain.step()
    models[1].load_state_dict(models[0].state_dict())
    optimizer = ours(models[1].parameters(), lr=0.1, **settings)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    for model, each in zip(models, (plain, optimizer)):
        each.zero_grad()
        model(images).square().mean().backward()
        each.step()
    torch.testing.assert_close(models[1].weight, models[0].weight)


def test_state_is_known_before_a_step():
    """One number per element under an engine; of capturable ones before there is a device."""
    for cls in (CPUAdam, CPULion, CPUAdagrad, CPUSGD):
        check(cls([nn.Parameter(torch.ones(1))]))
        assert elementwise_base(type("Renamed", (cls,), {})) is cls
        assert elementwise_base(type("Other", (cls,), {"update": lambda self: None})) is None
    narrow, blocks = (CPUAdam([nn.Parameter(torch.ones(1))], moments=m) for m in ("bf16", "int8"))
    fresh = initial_state(narrow, narrow.param_groups[0], torch.zeros(1))
    assert fresh["exp_avg"].dtype == torch.bfloat16
    with pytest.raises(UnsupportedOptimizerError, match=r"CPUAdam keeps state 'exp_avg' .* Blocks"):
        initial_state(blocks, blocks.param_groups[0], torch.zeros(1))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], capturable=True)
    moments = {name: torch.zeros(1) for name in ("exp_avg", "exp_avg_sq")}
    fresh = initial_state(optimizer, optimizer.param_groups[0], torch.zeros(1))
    assert fresh == moments | {"step": torch.zeros(())}
    assert optimizer.param_groups[0]["capturable"]


@pytest.mark.parametrize("refuses", [False, True])
def test_adagrad_is_fused_where_it_accepts_its_own_kernel(monkeypatch, refuses):
    """Up to torch 2.12 it refuses the one for CUDA, which is there."""

    def refuse(*_, **__):
        raise RuntimeError("fused=True requires all the params to be of supported devices")

    if refuses:
        name = "_device_dtype_check_for_fused"
        monkeypatch.setattr(sys.modules["torch.optim.adagrad"], name, refuse)
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(3))])
    group = optimizer.param_groups[0]
    own_step._is_fused.cache_clear()
    own_step.choose_fused(torch.optim.Adagrad, group, group["params"])
    own_step._is_fused.cache_clear()
    assert group["fused"] is (None if refuses else True)


LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-6, 0.1
SETTINGS = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "bias_correction": False}
PARAMS = SETTINGS | {"betas": list(BETAS)}  # as in a file


class ByHand(torch.optim.Optimizer):
    """The formula, a line per line."""

    def __init__(self, params, decoupled=True):
        super().__init__(params, {"decoupled": decoupled})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[param], param.grad
                if group["decoupled"]:
                    param.mul_(1 - LR * DECAY)
                else:
                    grad = grad + DECAY * param
                state["m"] = BETAS[0] * state.get("m", 0.0) + (1 - BETAS[0]) * grad
                state["v"] = BETAS[1] * state.get("v", 0.0) + (1 - BETAS[1]) * grad * grad
                param.sub_(LR * state["m"] / (state["v"].sqrt() + EPS))


WAYS: list[Any] = [{"fused": True}, {"foreach": True}, {"foreach": False}, "cpu"]


@in_one_item([(way, decoupled) for way in WAYS for decoupled in (True, False)])
def test_moments_count_as_they_are(case):
    way, decoupled = case
    start = torch.randn(37, generator=torch.Generator().manual_seed(0))
    ours, plain = (nn.Parameter(start.clone()) for _ in range(2))
    if way == "cpu":
        optimizer: Any = CPUAdam([ours], **SETTINGS, adamw_mode=decoupled)
    else:
        optimizer = Adam([ours], **SETTINGS, decoupled_weight_decay=decoupled, **way)
    by = ByHand([plain], decoupled)
    for step in range(4):
        ours.grad, plain.grad = torch.sin(start * 3 + step), torch.sin(start * 3 + step)
        optimizer.step()
        by.step()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    assert optimizer.state[ours]["step"] == 4


def test_offloaded_from_a_checkpoint_that_was_not_and_back(tmp_path):
    def run(rank, model, steps, kind, device):
        zero = {"stage": 2, "offload_optimizer": {"device": device}}
        section = {"type": kind, "params": PARAMS}
        engine = start(model, None, config_of(2, zero_optimization=zero, optimizer=section))
        if steps[0]:
            engine.load_checkpoint(tmp_path)
        run_steps(engine, rank, steps)
        engine.save_checkpoint(tmp_path)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    on_ranks(2, run, range(2), "AdamW", "none")
    on_ranks(2, run, range(2, 3), "AdamW", "cpu")
    found = on_ranks(2, run, range(3, 4), "AdamW", "none")[0]
    want, _ = by_hand(lambda model: ByHand(model.parameters()), [[(1.0, 0)]] * 4, 2)
    oracle.compare_tensors("weights", found, want, floor=oracle.ADAM_ROUNDING)


@on_each_rank(1)
def test_groups_in_one_bit_agree_on_the_correction(rank, model):
    named = enumerate(model.parameters())
    groups = [{"params": [each], "bias_correction": bool(n)} for n, each in named]
    one_bit = {"bits": 1, "freeze_step": 2}
    with pytest.raises(ConfigError, match="bias_correction: groups differ"):
        start(model, optimizers.FusedAdam(groups), config_of(1, compressed_communication=one_bit))


def test_a_loaded_state_is_on_the_device_of_its_parameter():
    """Whatever device the state dict was read to."""
    kept = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    kept.grad = torch.ones_like(kept)
    before = CPUAdam([kept])
    before.step()
    elsewhere = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device="meta"))
    after = CPUAdam([elsewhere])
    after.load_state_dict(before.state_dict())
    loaded = [after.state[elsewhere][name] for name in ("exp_avg", "exp_avg_sq", "master")]
    assert all(value.is_meta and value.dtype == torch.float32 for value in loaded)

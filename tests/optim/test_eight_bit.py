"""Moments in 8 bits beside bitsandbytes and torchao: their codes, and their objects under an
engine. Numbers of bitsandbytes are kept here; with the libraries installed, they are compared
themselves.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.ops import dynamic_map
from hf_zero.ops.moment_blocks import Blocks
from hf_zero.optim import AdamW8bit, Lion8bit, SGD8bit
from hf_zero.optim.adoption import adopt, give_back
from hf_zero.optim.elementwise import check
from tests.helpers.buffers import reference
from tests.helpers.cells import in_one_item

# of bitsandbytes 0.50.2 after two steps from zero: the first codes and the sum of all, by state.
# Its CPU kernel quantizes through a table of 65,536 equal steps, which misses the nearest code of
# a second moment three times in a hundred; given float64 it finds that, as on a GPU.
GOLDEN = {
    "adamw": {
        "exp_avg": ([127, 134, 138, 140, 117, 105, 94, 87, 168, 166, 159, 90], 631606),
        "exp_avg_sq": ([0, 0, 1, 1, 1, 8, 16, 31, 32, 30, 16, 24], 275657),
    },
    "lion": {"exp_avg": ([127, 134, 138, 140, 117, 105, 94, 87, 168, 166, 159, 90], 634234)},
    "sgd": {"momentum_buffer": ([127, 134, 138, 140, 117, 105, 94, 87, 168, 166, 159, 90], 631606)},
}
OURS = {
    "adamw": lambda params: AdamW8bit(params, lr=1e-2),
    "lion": lambda params: Lion8bit(params, lr=1e-2),
    "sgd": lambda params: SGD8bit(params, lr=1e-2, momentum=0.9),
}
LARGE = 5000


def spread(numel, seed):
    """Numbers of many magnitudes, the same on every machine."""
    index = torch.arange(numel)
    sign = ((index * 7919 + seed * 31) % 1009 - 504).float() / 504
    size = ((index * 104729 + seed) % 997).float() / 997
    return sign * size * size * size


def stepped(make, steps=2, numel=LARGE):
    parameter = nn.Parameter(spread(numel, 1))
    optimizer = make([parameter])
    for seed in range(2, 2 + steps):
        parameter.grad = spread(numel, seed)
        optimizer.step()
    return parameter, optimizer


@in_one_item(GOLDEN)
def test_codes_are_those_of_bitsandbytes(kind):
    for native in (True, False):
        if native:
            parameter, optimizer = stepped(OURS[kind])
        else:
            with reference():
                parameter, optimizer = stepped(OURS[kind])
        for name, (first, total) in GOLDEN[kind].items():
            blocks = optimizer.state[parameter][name]
            assert blocks.codes[:12].tolist() == first and int(blocks.codes.long().sum()) == total


def test_small_and_excluded_parameters_keep_fp32():
    sizes = {"small": 4095, "large": 4096, "excluded": 9000}
    parameters = {name: nn.Parameter(spread(numel, 1)) for name, numel in sizes.items()}
    parameters["excluded"].optim_bits = 32
    plain = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in parameters.values()])
    optimizer = AdamW8bit(parameters.values())
    for each in (plain, optimizer):
        for p in each.param_groups[0]["params"]:
            p.grad = spread(p.numel(), 2)
        each.step()
    kept = {
        name: isinstance(optimizer.state[p]["exp_avg"], Blocks) for name, p in parameters.items()
    }
    assert kept == {"small": False, "large": True, "excluded": False}
    for ours, theirs in zip(parameters.values(), plain.param_groups[0]["params"]):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)  # the first step is exact
    groups = [{"params": [parameters["large"]], "optim_bits": 32}]
    parameters["large"].grad = spread(4096, 2)
    optimizer = Lion8bit(groups)
    optimizer.step()
    assert torch.is_tensor(optimizer.state[parameters["large"]]["exp_avg"])


class Manager:
    """The parts of bitsandbytes' GlobalOptimManager that an object reads."""

    def __init__(self):
        self.pid2config, self.module_weight_config_triple = {}, []


def stand_in(module, name, options, groups):
    """An optimizer with the attributes of ``module.name``, which need not be installed."""

    def __init__(self, params):
        torch.optim.Optimizer.__init__(self, params, dict(groups))
        self.mng = Manager()
        self.args = SimpleNamespace(**options)
        vars(self).update(options)

    cls = type(name, (torch.optim.Optimizer,), {"__init__": __init__, "__module__": module})
    cls.__qualname__ = name
    return cls


ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
OPTIONS = {"optim_bits": 8, "min_8bit_size": 4096, "max_unorm": 0.0, "skip_zeros": False}
TORCHAO = {"block_size": 256, "bf16_stochastic_round": False}
FOREIGN = {
    "adamw": ("bitsandbytes.optim.adamw", "AdamW8bit", OPTIONS, ADAM),
    "lion": ("bitsandbytes.optim.lion", "Lion", OPTIONS, {**ADAM, "weight_decay": 0.0}),
    "sgd": (
        "bitsandbytes.optim.sgd",
        "SGD8bit",
        OPTIONS,
        {"lr": 1e-2, "betas": (0.9, 0.0), "eps": 0.0, "weight_decay": 0.0},
    ),
}
FOREIGN["lion"][3]["betas"] = (0.9, 0.99)


@in_one_item(FOREIGN)
def test_objects_are_taken_over_and_given_back(kind):
    cls = stand_in(*FOREIGN[kind])
    parameter = nn.Parameter(spread(LARGE, 1))
    optimizer = cls([parameter])
    assert check(optimizer) == ""
    adopt(optimizer)
    assert isinstance(optimizer, cls) and type(optimizer) is not cls
    for seed in (2, 3):
        parameter.grad = spread(LARGE, seed)
        optimizer.step()
    for name, (first, total) in GOLDEN[kind].items():
        blocks = optimizer.state[parameter][name]
        assert blocks.codes[:12].tolist() == first and int(blocks.codes.long().sum()) == total
    optimizer.state.clear()
    give_back(optimizer)
    assert type(optimizer) is cls


@in_one_item({**FOREIGN, "torchao": None})
def test_groups_that_are_added_or_loaded_get_the_settings_of_the_class(kind):
    torchao = "torchao.optim.adam", "Adam8bit", TORCHAO, {**ADAM, "amsgrad": False}
    cls = stand_in(*(FOREIGN.get(kind) or torchao))
    first, second = (nn.Parameter(spread(5120, 1)) for _ in range(2))
    saved = cls([{"params": [first]}, {"params": [second]}]).state_dict()
    optimizer = cls([first])
    adopt(optimizer)
    optimizer.add_param_group({"params": [second]})
    for begin in (lambda: None, lambda: optimizer.load_state_dict(saved)):
        begin()
        for p in (first, second):
            p.grad = spread(5120, 2)
        optimizer.step()
        assert torch.equal(first, second)
        assert optimizer.param_groups[0].keys() == optimizer.param_groups[1].keys()
    assert all(
        isinstance(value, Blocks)
        for p in (first, second)
        for name, value in optimizer.state[p].items()
        if name != "step"
    )


def test_overrides_of_the_manager_keep_a_parameter_in_fp32():
    embedding, large = nn.Embedding(100, 64), nn.Parameter(spread(LARGE, 1))
    optimizer = stand_in(*FOREIGN["adamw"])([embedding.weight, large])
    optimizer.mng.module_weight_config_triple.append((embedding, "weight", {"optim_bits": 32}))
    adopt(optimizer)
    for p in (embedding.weight, large):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.is_tensor(optimizer.state[embedding.weight]["exp_avg"])
    assert isinstance(optimizer.state[large]["exp_avg"], Blocks)
    module, _, options, groups = FOREIGN["adamw"]
    in_fp32 = stand_in(module, "AdamW", {**options, "optim_bits": 32}, groups)
    parameters = nn.Parameter(spread(LARGE, 1)), nn.Parameter(spread(LARGE, 1))
    optimizer = in_fp32(parameters)
    optimizer.mng.pid2config[id(parameters[0])] = {"optim_bits": 8}
    adopt(optimizer)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = [type(optimizer.state[p]["exp_avg"]) for p in parameters]
    assert kept == [Blocks, torch.Tensor], "an override of 8 bits in an optimizer of 32"
    optimizer = stand_in(*FOREIGN["adamw"])([large])
    optimizer.mng.pid2config[id(large)] = {"lr": 1.0}
    with pytest.raises(UnsupportedOptimizerError, match=r"override of lr.*group of its own"):
        adopt(optimizer)


REFUSED = {
    "max_unorm": ("bitsandbytes.optim.adam", "Adam8bit", {**OPTIONS, "max_unorm": 1.0}, ADAM),
    "skip_zeros": ("bitsandbytes.optim.adam", "Adam", {**OPTIONS, "skip_zeros": True}, ADAM),
    "percentile_clipping = 5": (
        "bitsandbytes.optim.adamw",
        "AdamW",
        {**OPTIONS, "percentile_clipping": 5},
        ADAM,
    ),
    "block_wise": ("bitsandbytes.optim.adamw", "AdamW", {**OPTIONS, "block_wise": False}, ADAM),
    "block_size = 128": (
        "torchao.optim.adam",
        "AdamW8bit",
        {**TORCHAO, "block_size": 128},
        {**ADAM, "amsgrad": False},
    ),
    "amsgrad": ("torchao.optim.adam", "Adam8bit", TORCHAO, {**ADAM, "amsgrad": True}),
}


@in_one_item(REFUSED)
def test_options_without_a_counterpart_are_refused_by_name(option):
    optimizer = stand_in(*REFUSED[option])([nn.Parameter(spread(LARGE, 1))])
    with pytest.raises(UnsupportedOptimizerError, match=option):
        adopt(optimizer)
    assert optimizer.param_groups[0].keys() == {"params", *REFUSED[option][3]}


def test_other_classes_of_the_libraries_are_refused_with_those_that_work():
    for module, name in (
        ("bitsandbytes.optim.ademamix", "AdEMAMix8bit"),
        ("torchao.optim.adam", "AdamW4bit"),
    ):
        optimizer = stand_in(module, name, OPTIONS, ADAM)([nn.Parameter(spread(LARGE, 1))])
        with pytest.raises(UnsupportedOptimizerError, match=rf"{name} cannot run.*AdamW8bit"):
            check(optimizer)


def saved_by_bitsandbytes(wrapped, signed_map=True):
    _, optimizer = stepped(OURS["adamw"])
    state = next(iter(optimizer.state.values()))
    tensors = {}
    for number, (name, signed) in enumerate({"exp_avg": True, "exp_avg_sq": False}.items(), 1):
        tensors[f"state{number}"] = state[name].codes.clone().view(50, 100)
        tensors[f"absmax{number}"] = state[name].scales.clone()
        tensors[f"qmap{number}"] = dynamic_map.values(signed if signed_map else True)
    held = {"__bnb_optimizer_quant_state__": tensors} if wrapped else tensors
    group = {**ADAM, "params": [0]}
    return {"state": {0: {"step": 2, **held}}, "param_groups": [group]}


@pytest.mark.parametrize("wrapped", [True, False])
def test_state_that_bitsandbytes_has_saved_is_loaded(wrapped):
    want, _ = stepped(OURS["adamw"], steps=4)
    got, _ = stepped(OURS["adamw"])
    got = nn.Parameter(got.detach().view(50, 100))
    optimizer = OURS["adamw"]([got])
    optimizer.load_state_dict(saved_by_bitsandbytes(wrapped))
    for seed in (4, 5):
        got.grad = spread(LARGE, seed).view(50, 100)
        optimizer.step()
    assert torch.equal(got.view(-1), want)
    with pytest.raises(UnsupportedOptimizerError, match="a map of its own"):
        optimizer.load_state_dict(saved_by_bitsandbytes(wrapped, signed_map=False))

"""Models, and optimizers over them, that cannot be laid out: each is refused by name, before
anything is changed.
"""

import itertools

import pytest
import torch
from torch import nn

from hf_zero.distributed import process_group
from hf_zero.errors import (
    ConfigError,
    HfZeroError,
    PartitionError,
    RankMismatchError,
    UnsupportedOptimizerError,
)
from hf_zero.zero.layout.materialize import check_parameters
from hf_zero.zero.layout.wrap import find_units
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, start
from tests.helpers.stacks import on_each_rank, stack
from tests.helpers.training import adamw, plain_sgd

NAME = r"blocks\.1\.up\.weight"


@pytest.fixture(autouse=True)
def one_process():
    yield
    process_group.destroy_process_group()


def plain(model):
    return {type(p) for p in model.parameters()} <= {nn.Parameter} and not model._forward_hooks


class Special(torch.Tensor):
    """Stands for tensors without memory of their own: those of torchao, distributed ones."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return Special(args[0])


def with_weight(value):
    model = stack()
    model.blocks[1].up.weight = nn.Parameter(value)
    return model, None


def with_buffer():
    model = stack()
    model.blocks[1].norm.register_buffer("angles", torch.empty(4, device="meta"))
    return model, None


def with_another_head():
    model = stack()
    optimizer = adamw(model)
    model.head = nn.Linear(32, 5)
    return model, optimizer


def in_16_bits():
    model = stack().bfloat16()
    return model, plain_sgd(model)


MODELS = {
    f"{NAME} is on the meta device": lambda: with_weight(torch.empty(64, 32, device="meta")),
    "buffer angles of LayerNorm is on the meta device": with_buffer,
    f"{NAME} is torch.complex64": lambda: with_weight(torch.zeros(64, 32, dtype=torch.complex64)),
    r"2 parameters that are not in the model \(shapes \[\(5, 32\), \(5,\)\]\)": with_another_head,
}


@in_one_item([*itertools.product(MODELS, (0, 3))])
def test_models_that_are_refused(case):
    words, stage = case
    model, optimizer = MODELS[words]()
    with pytest.raises(PartitionError, match=words):
        start(model, optimizer, config_of(stage))
    assert plain(model)


def test_16_bit_weights_in_fp32_training():
    model, optimizer = in_16_bits()
    with pytest.raises(ConfigError, match=r'parameter enter\.weight is torch\.bfloat16.*"bf16"'):
        start(model, optimizer, config_of(3))
    assert plain(model)


def test_a_parameter_of_a_special_class():
    model, _ = with_weight(Special(torch.zeros(64, 32)))
    with pytest.raises(PartitionError, match=f"{NAME} is a Special"):
        start(model, None, config_of(3))
    assert type(model.head.weight) is nn.Parameter


def test_a_lazy_parameter():
    model = stack()
    model.head = nn.LazyLinear(5)
    with pytest.raises((PartitionError, ValueError), match=r"head\.weight|uninitialized"):
        start(model, None, config_of(1))


def test_a_device_whose_tensors_torch_does_not_put_into_a_parameter(monkeypatch):
    """Tensors of PrivateUse1 backends are refused by torch; those of CUDA are not."""
    specs, _ = find_units(stack())
    check_parameters(specs, torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", lambda size, device: torch.zeros(size))
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda one, other: False)
    with pytest.raises(PartitionError, match="is on cpu, and torch cannot move it to 'xpu'"):
        check_parameters(specs, torch.device("xpu"))


@in_one_item((1, 3))
def test_state_that_cannot_be_carried_over_leaves_the_model_whole(stage):
    model = stack()
    optimizer = adamw(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state[model.head.weight]["step"] += 5
    with pytest.raises(UnsupportedOptimizerError, match=r"head\.weight.*step 6"):
        start(model, optimizer, config_of(stage))
    assert plain(model)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    optimizer.state.clear()
    start(model, optimizer, config_of(stage))


@pytest.mark.parametrize(
    ("stage", "different"), [(0, "shape"), (1, "dtype"), (2, "group"), (3, "name")]
)
@on_each_rank(2)
def test_ranks_that_hold_different_models(rank, model, stage, different):
    groups = [{"params": list(model.parameters())}]
    if rank == 1:
        if different == "shape":
            model.head = nn.Linear(32, 6)
        if different == "dtype":
            model.head.double()
        if different == "name":
            model.tail, model.head = model.head, nn.Identity()
        if different == "group":
            groups = [
                {"params": list(model.head.parameters())},
                {"params": [*model.enter.parameters(), *model.blocks.parameters()]},
            ]
    if different != "group":
        groups = [{"params": list(model.parameters())}]
    with pytest.raises(RankMismatchError, match="ranks 0 and 1 hold different models") as told:
        start(model, torch.optim.SGD(groups, lr=0.1), config_of(stage))
    assert "head" in str(told.value) or different == "group"


def test_a_model_that_has_an_engine_already():
    model = stack()
    engine = start(model, adamw(model), config_of(3))
    with pytest.raises(HfZeroError, match="destroy"):
        start(model, None, config_of(2))
    engine.destroy()
    start(model, None, config_of(2))

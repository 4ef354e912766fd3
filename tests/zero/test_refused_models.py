"""Models, and optimizers over them, that cannot be laid out: each is refused by name, before
anything is changed.
"""

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
from tests.helpers.engines import STAGES, config_of, start
from tests.helpers.stacks import on_each_rank, stack
from tests.helpers.training import adamw, plain_sgd

NAME = r"blocks\.1\.up\.weight"


@pytest.fixture(autouse=True)
def one_process():
    yield
    process_group.destroy_process_group()


def plain(model):
    return {type(p) for p in model.parameters()} <= {nn.Parameter} and not model._forward_hooks


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_values(stage):
    model = stack()
    model.blocks[1].up.weight = nn.Parameter(torch.empty(64, 32, device="meta"))
    with pytest.raises(
        PartitionError,
        match=rf"parameter {NAME} is on the meta device and has no values; load or initialise",
    ):
        start(model, None, config_of(stage))
    assert plain(model)


def test_a_device_whose_tensors_torch_does_not_put_into_a_parameter(monkeypatch):
    """Tensors of PrivateUse1 backends are refused by torch; those of CUDA are not."""
    specs, _ = find_units(stack())
    check_parameters(specs, torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", lambda size, device: torch.zeros(size))
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda one, other: False)
    with pytest.raises(
        PartitionError,
        match=r"is on cpu, and torch cannot move it to 'xpu' in place: move the model there first "
        r"\(model\.to\('xpu'\)\)",
    ):
        check_parameters(specs, torch.device("xpu"))


def test_a_buffer_without_values():
    model = stack()
    model.blocks[1].norm.register_buffer("angles", torch.empty(4, device="meta"))
    with pytest.raises(
        PartitionError,
        match="buffer angles of LayerNorm is on the meta device; initialise the model's buffers",
    ):
        start(model, None, config_of(2))
    assert plain(model)


@pytest.mark.parametrize("stage", STAGES)
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
    assert plain(model) and len(optimizer.param_groups[0]["params"]) == len(
        list(model.parameters())
    )
    optimizer.state.clear()
    start(model, optimizer, config_of(stage))


class Special(torch.Tensor):
    """Stands for tensors without memory of their own: those of torchao, distributed ones."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return Special(args[0])


def test_a_parameter_of_a_special_class():
    model = stack()
    model.blocks[1].up.weight = nn.Parameter(Special(torch.zeros(64, 32)))
    with pytest.raises(
        PartitionError,
        match=rf"parameter {NAME} is a Special, whose memory cannot be laid out flat; "
        rf"pass a model of plain",
    ):
        start(model, None, config_of(3))
    assert type(model.head.weight) is nn.Parameter


def test_a_lazy_parameter():
    model = stack()
    model.head = nn.LazyLinear(5)
    with pytest.raises((PartitionError, ValueError), match=r"head\.weight|uninitialized"):
        start(model, None, config_of(1))


def test_16_bit_weights_in_fp32_training():
    model = stack().bfloat16()
    with pytest.raises(ConfigError, match=r'parameter enter\.weight is torch\.bfloat16.*"bf16"'):
        start(model, plain_sgd(model), config_of(3))
    assert plain(model)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_over_another_models_parameters(stage):
    model = stack()
    optimizer = adamw(model)
    model.head = nn.Linear(32, 5)
    with pytest.raises(
        PartitionError,
        match=r"the optimizer holds 2 parameters that are not in the model \(shapes "
        r"\[\(5, 32\), \(5,\)\]\)",
    ):
        start(model, optimizer, config_of(stage))
    assert plain(model)


@pytest.mark.turns
@pytest.mark.parametrize("different", ["shape", "dtype", "group", "name"])
@pytest.mark.parametrize("stage", STAGES)
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


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_parameter_of_complex_numbers_that_trains(dtype):
    model = stack()
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(64, 32, dtype=dtype))
    with pytest.raises(
        PartitionError,
        match=rf"parameter {NAME} is {dtype}; train it as real numbers.*or set requires_grad=False",
    ):
        start(model, None, config_of(3))
    assert plain(model)

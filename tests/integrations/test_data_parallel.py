"""torch's data-parallel wrappers around a model that an engine trains, and around others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import hf_zero
from hf_zero.errors import PartitionError
from tests.helpers.cells import in_one_item
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import layers

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "fully_shard": fully_shard,
}
REFUSED = "around a model that an engine trains .* remove it, and call what hf_zero"


@pytest.fixture
def group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def trained(model: nn.Module, stage: int = 1) -> Any:
    config = {"stage": stage, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return hf_zero.initialize(model=model, config=config)[0]


class Owner(nn.Module):
    """A module that contains the engine of another, as one of Lightning may."""

    def __init__(self, engine: nn.Module) -> None:
        super().__init__()
        self.engine = engine


@pytest.mark.usefixtures("group")
@in_one_item(WRAPPERS, named=str)
def test_a_wrapper_refuses_what_an_engine_trains(name: str) -> None:
    model = layers()
    engine = trained(model)
    for module in (engine, model, model[0], Owner(engine)):
        with pytest.raises(PartitionError, match=f"{name} {REFUSED}"):
            WRAPPERS[name](module)
    x = torch.ones(3, 8)
    before = model[0].weight.detach().clone()
    engine.backward(engine(x).square().mean())  # nothing of the wrapper is left
    engine.step()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.usefixtures("group")
@in_one_item(("DistributedDataParallel", "DataParallel"))
def test_a_wrapper_that_is_older_than_the_engine_trains_nothing(name: str) -> None:
    """A script wraps its model, initializes the bare one, and calls the wrapper."""
    model, x = layers(), torch.ones(3, 8)
    wrapped = WRAPPERS[name](model)
    engine = trained(model)
    with pytest.raises(PartitionError, match=f"{name} {REFUSED}"):
        wrapped(x)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), engine(x))
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.destroy()
    wrapped(x).square().mean().backward()
    assert model[0].weight.grad is not None


@in_one_item((0, 1, 2, 3))
def test_each_stage_refuses_it_on_all_ranks(stage: int) -> None:
    models = [layers(), layers()]

    def wrap(rank: int) -> None:
        engine = trained(models[rank], stage)
        with pytest.raises(PartitionError, match=REFUSED):
            nn.parallel.DistributedDataParallel(engine)
        with pytest.raises(PartitionError, match=REFUSED):
            nn.parallel.DistributedDataParallel(engine.module)

    run_ranks(2, wrap)


@pytest.mark.usefixtures("group")
@in_one_item([name for name in WRAPPERS if name != "FullyShardedDataParallel"])  # needs a GPU
def test_a_wrapper_takes_other_models(name: str) -> None:
    """Another model beside an engine, one with a frozen part of an engine's model, and one whose
    engine has ended.
    """
    wrap = WRAPPERS[name]
    generator = trained(layers())
    discriminator = wrap(layers())
    discriminator(torch.ones(3, 8)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in discriminator.parameters())
    if name != "fully_shard":  # which would shard the frozen part, too
        generator.module.requires_grad_(False)
        wrap(nn.Sequential(layers(), generator.module[0]))
    trained(model := layers()).destroy()
    wrap(model)

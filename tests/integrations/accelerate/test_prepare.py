"""``accelerator.prepare`` in orders and without parts that Accelerate refuses under DeepSpeed,
or takes in silence; in one process.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, DummyScheduler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hf_zero.errors import PartitionError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.accelerator import (
    _counting_data_parallel_ranks,
    refuse_optimizer_apart,
)
from tests.helpers.models import features
from tests.helpers.stacks import stack

pytestmark = pytest.mark.usefixtures("plain_process")

ROWS = features(0, 0, 0)
LOADERS: dict[str, Any] = {
    "none": lambda: (),
    "of batches": lambda: (DataLoader([ROWS, ROWS], batch_size=None),),
    "with a batch sampler": lambda: (
        DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 2, False)),
    ),  # type: ignore[arg-type]
}


def accelerator() -> Accelerator:
    config = {
        "zero_optimization": {"stage": 2},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


@pytest.mark.parametrize("loader", LOADERS)
def test_no_batch_size_is_needed(loader: str) -> None:
    ours, model = accelerator(), stack()
    engine, optimizer, *_ = ours.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), *LOADERS[loader]()
    )
    ours.backward(engine(ROWS).pow(2).mean())
    optimizer.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("limit", [None, 0.1], ids=["no limit", "the script's"])
def test_gradient_clipping_of_0_leaves_the_limit_to_the_script(limit: float | None) -> None:
    """Accelerate drops a zero from the configuration that it makes of its YAML."""
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.0)
    ours, model = Accelerator(cpu=True, deepspeed_plugin=plugin), stack()
    before = [each.detach().clone() for each in model.parameters()]
    engine, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    ours.backward(engine(ROWS).mul(100.0).pow(2).mean())
    if limit is not None:
        ours.clip_grad_norm_(engine.parameters(), limit)
    optimizer.step()
    moved = [now.detach() - old for now, old in zip(model.parameters(), before, strict=True)]
    norm = float(torch.cat([each.flatten() for each in moved]).norm())
    assert norm > 2.0 if limit is None else norm == pytest.approx(limit, rel=1e-3)


def test_a_batch_size_that_comes_later_is_used() -> None:
    ours, model = accelerator(), stack()
    ours.prepare(DataLoader([ROWS], batch_size=None))
    engine, *_ = ours.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(ROWS, batch_size=2)
    )  # type: ignore[arg-type]
    assert engine.train_micro_batch_size_per_gpu() == 2


@pytest.mark.parametrize(
    ("split", "micro", "steps"), [(True, 4, 12), (False, "auto", 24)], ids=["split", "whole"]
)
def test_what_is_counted_by_data_parallel_ranks(split: bool, micro: Any, steps: int) -> None:
    """Four processes are two of them."""
    finder.choose()
    config = {"train_micro_batch_size_per_gpu": "auto", "tensor_parallel": {"autotp_size": 2}}
    plugin = SimpleNamespace(deepspeed_config=config, is_train_batch_min=True)
    state = SimpleNamespace(
        deepspeed_plugin=plugin, parallelism_config=None, num_processes=4, process_index=3
    )
    ours = SimpleNamespace(state=state, deepspeed_plugin=plugin, split_batches=split)
    schedule = DummyScheduler(None, total_num_steps=12)
    loaders = DataLoader(ROWS, batch_size=12), DataLoader(ROWS, batch_size=8)  # type: ignore[arg-type]
    with _counting_data_parallel_ranks(ours, (*loaders, schedule)):
        assert config["train_micro_batch_size_per_gpu"] == micro
        assert schedule.total_num_steps == steps
    assert schedule.total_num_steps == 12


def test_an_optimizer_after_its_model_is_refused() -> None:
    ours, model = accelerator(), stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours.prepare(model)
    with pytest.raises(
        PartitionError,
        match=r"given SGD after its model: .*model, optimizer = "
        r"accelerator.prepare\(model, optimizer\)",
    ):
        ours.prepare(optimizer)


@pytest.mark.parametrize(
    ("kind", "ranks", "refused"),
    [("DEEPSPEED", 2, True), ("DEEPSPEED", 1, False), ("MULTI_CPU", 2, False)],
)
def test_an_optimizer_apart_from_its_model_is_refused_on_ranks(
    kind: str, ranks: int, refused: bool
) -> None:
    accelerator()  # ZeRO is hf-zero's here
    prepare = refuse_optimizer_apart(lambda self, optimizer, device_placement: optimizer)
    taken = torch.optim.SGD(stack().parameters())
    of = SimpleNamespace(distributed_type=DistributedType(kind), num_processes=ranks)
    with (
        pytest.raises(PartitionError, match=r"prepare_optimizer\(SGD\) .*prepare both in one call")
        if refused
        else nullcontext()
    ):
        assert prepare(of, taken) is taken

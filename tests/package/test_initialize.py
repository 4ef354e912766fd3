"""``hf_zero.initialize``: the four-tuple, where each part comes from, and arguments that cannot
be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import hf_zero
from hf_zero.distributed import init, process_group
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.setup.training_loader import data_loader
from tests.helpers.engines import config_of
from tests.helpers.stacks import squared, stack
from tests.helpers.training import At, adamw

SGD = {"type": "SGD", "params": {"lr": 0.125}}


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert not process_group.is_initialized()
    yield
    process_group.destroy_process_group()


def refused(error: type[Exception], match: str, **arguments: Any) -> None:
    """``initialize`` raises and has left the model, and the process, as they were."""
    model = arguments.setdefault("model", stack())
    with pytest.raises(error, match=match):
        hf_zero.initialize(**arguments)
    if model is not None:
        assert {type(p) for p in model.parameters()} == {nn.Parameter} and not model._forward_hooks


def test_the_four_of_a_config_alone() -> None:
    model, stage = stack(), 3
    params = {"warmup_num_steps": 4, "warmup_max_lr": 0.125}
    schedule = {"type": "WarmupLR", "params": params}
    config = config_of(stage, optimizer=SGD, scheduler=schedule)
    engine, optimizer, loader, scheduler = hf_zero.initialize(model=model, config=config)
    assert isinstance(engine, Engine) and engine.module is model and engine.stage == stage
    assert type(optimizer) is torch.optim.SGD and engine.optimizer is optimizer
    assert loader is None and engine.lr_scheduler is scheduler and hasattr(scheduler, "step")
    assert process_group.is_initialized() and (engine.global_rank, engine.world_size) == (0, 1)
    before = [p.detach() for p in stack().parameters()]
    for step in range(3):  # the first two of a warm-up from 0 are taken at rate 0
        engine.backward(squared(engine, At(step, 0, 0)))
        engine.step()
    engine.destroy(gather=True)
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before))
    assert engine.get_lr()[0] > 0
    evaluates = hf_zero.initialize(model=stack(), config=config_of(3))
    assert isinstance(evaluates[0], Engine) and evaluates[1:] == (None, None, None)


def test_callables_make_the_optimizer_and_the_scheduler() -> None:
    model = stack()
    model.blocks[0].requires_grad_(False)
    given: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        given.extend(parameters)
        return torch.optim.SGD(given, lr=0.5)

    _, optimizer, _, scheduler = hf_zero.initialize(
        model=model,
        optimizer=make,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1),
        config=config_of(2),
    )
    assert {id(p) for p in given} == {id(p) for p in model.parameters() if p.requires_grad}
    assert optimizer.defaults["lr"] == 0.5 and scheduler.optimizer is optimizer
    # the user's own come back
    model = stack()
    mine = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(mine, lambda step: 0.5**step)
    engine, optimizer, _, scheduler = hf_zero.initialize(
        model=model, optimizer=mine, lr_scheduler=schedule, config=config_of(1)
    )
    assert optimizer is mine and scheduler is schedule and engine.lr_scheduler is schedule


def test_model_parameters_are_what_an_optimizer_is_made_of() -> None:
    model = stack()
    groups = [{"params": [model.head.weight], "lr": 0.5}, {"params": [model.head.bias]}]
    engine, optimizer, _, _ = hf_zero.initialize(
        model=model, model_parameters=iter(groups), config=config_of(1, optimizer=SGD)
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125]
    trained = {name for flat in engine.flats if flat.trainable for name in flat.parameters}
    assert trained == {"head.weight", "head.bias"}


def test_a_mistake_leaves_the_model_and_the_process_alone() -> None:
    """The messages in full are in mistakes/scripts.txt."""
    said = r"initialize needs model=; pass the torch\.nn\.Module to train"
    refused(ConfigError, said, model=None, config=config_of(1))
    refused(ConfigError, "train_batch_size", config=config_of(1, train_batch_size=7))
    config = {"gradient_clipping": "auto", "zero_optimization": {"stagee": 3}}
    refused(ConfigError, r"(?s)2 mistakes.*stagee.*still 'auto'.*gradient_clipping", config=config)
    said = r"not 'gpt2'; pass the torch\.nn\.Module .* AutoModel\.from_pretrained\('gpt2'\)"
    for given in ({"args": "gpt2"}, {"args": "gpt2", "model": "zero3"}):
        with pytest.raises(ConfigError, match=said):
            hf_zero.initialize(**given, config=config_of(1))
    for data in (7, {1, 2}, dict):
        said = rf"training_data is a {type(data).__name__}; pass a torch Dataset"
        refused(ConfigError, said, training_data=data, config=config_of(1))
    refused(ConfigError, "batch_size", training_data=[torch.zeros(2)], config="zero1")


def as_path(folder: Path) -> Any:
    path = folder / "ds.json"
    path.write_text(json.dumps(config_of(2)))
    return path


FORMS: list[Callable[[Path], dict[str, Any]]] = [
    lambda folder: {"config": str(as_path(folder))},
    lambda folder: {"config": "zero2"},
    lambda folder: {"config_params": config_of(2)},
    lambda folder: {"args": SimpleNamespace(deepspeed_config=str(as_path(folder)))},
    lambda folder: {"config": config_of(2), "config_params": config_of(2)},  # the same twice
]


def test_every_form_of_config(tmp_path: Path) -> None:
    for given in FORMS:
        engine = hf_zero.initialize(model=stack(), **given(tmp_path))[0]
        assert engine.stage == 2 and engine.config.world_size == 1
        engine.destroy()


def test_optimizers_that_cannot_be() -> None:
    config = config_of(1, optimizer=SGD)
    said = "both a callable optimizer and config optimizer 'SGD' are given; keep one"
    refused(ConfigError, said, optimizer=torch.optim.AdamW, config=config)
    for made in (None, SimpleNamespace(param_groups=[], step=lambda: None)):
        said = rf"callable optimizer returned a {type(made).__name__}; it must return a torch\.opt"
        make = lambda parameters, made=made: made  # noqa: E731
        refused(ConfigError, said, optimizer=make, config=config_of(1))
    said = r"optimizer is .* \(dict\); pass a torch\.optim\.Optimizer"
    refused(ConfigError, said, optimizer={"type": "AdamW"}, config=config_of(1))
    said = "no parameter of the model requires grad; unfreeze some, or remove the optimizer"
    refused(ConfigError, said, model=stack().requires_grad_(False), config=config)
    said = "model_parameters is empty; pass some, or remove the optimizer"
    refused(ConfigError, said, model_parameters=[], config=config)
    model = stack()
    head = model.head
    for parameters in (
        7,
        head,
        head.weight,
        {"params": [head.weight]},
        [head],
        ["head"],
        [{"lr": 1.0}],
    ):
        said = (
            r"model_parameters of type \w+ make no optimizer; pass model\.parameters\(\), or a list"
        )
        refused(ConfigError, said, model=model, model_parameters=parameters, config=config)
    mine = adamw(model)
    config = config_of(2, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    made_by = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)  # noqa: E731
    for given in (made_by, torch.optim.lr_scheduler.StepLR(mine, 1)):
        said = r"both lr_scheduler \((StepLR|function)\) and config scheduler 'WarmupLR' are given"
        more = {"optimizer": mine, "lr_scheduler": given, "config": config}
        refused(ConfigError, said, model=model, **more)


def test_schedulers_that_cannot_be() -> None:
    for given in ("cosine", lambda optimizer: None):
        said = r"lr_scheduler gives ('cosine'|None), which has no step\(\); pass a scheduler"
        refused(ConfigError, said, lr_scheduler=given, config=config_of(1, optimizer=SGD))
    said = "no optimizer is given or configured that it could schedule"
    refused(ConfigError, said, lr_scheduler=lambda optimizer: None, config=config_of(1))


def test_schedulers_of_another_optimizer() -> None:
    """One over the model is refused, one of a wrapper or of another model is not."""
    model, other = stack(), stack()
    schedule = torch.optim.lr_scheduler.StepLR(adamw(model), 1)
    said = r"lr_scheduler \(StepLR\) schedules another optimizer \(AdamW\) than the engine's"
    for source in (
        {"optimizer": adamw(model), "config": config_of(1)},
        {"optimizer": adamw, "config": config_of(1)},
        {"config": config_of(1, optimizer=SGD)},
    ):
        refused(ConfigError, said, model=model, lr_scheduler=schedule, **source)
    mine = adamw(model)
    wraps = SimpleNamespace(param_groups=mine.param_groups)
    for over in (wraps, adamw(other), None):
        given = SimpleNamespace(optimizer=over, step=lambda: None)
        arguments = {"model": model, "lr_scheduler": given, "config": config_of(1)}
        engine, *_, scheduler = hf_zero.initialize(optimizer=mine, **arguments)
        assert scheduler is given
        engine.destroy()


def test_an_mpu() -> None:
    for kind in ("model", "slice", "pipe", "pipeline_model", "sequence", "context", "expert_model"):
        name = f"get_{kind}_parallel_world_size"
        said = rf"mpu\.{name}\(\) is 2, and hf-zero cannot take [a-z]+ parallelism from an mpu"
        refused(NotBuiltError, said, mpu=SimpleNamespace(**{name: lambda: 2}), config="zero1")
    four = SimpleNamespace(get_data_parallel_world_size=lambda: 4)
    said = r"mpu\.get_data_parallel_world_size\(\) is 4, but 1 ranks were started"
    refused(ConfigError, said, mpu=four, config="zero1")
    one = {f"get_{name}_parallel_world_size": lambda: 1 for name in ("model", "data")}
    for mpu in (SimpleNamespace(**one), object()):
        assert hf_zero.initialize(model=stack(), mpu=mpu, config="zero1")[0].stage == 1


def test_a_group_that_should_exist_and_does_not() -> None:
    said = r"dist_init_required=False but no process group exists; call hf_zero\.init_distributed"
    refused(ConfigError, said, dist_init_required=False, config="zero1")


def test_a_model_that_a_wrapper_reduces_is_refused() -> None:
    model = stack()
    model.block = nn.DataParallel(nn.Linear(2, 2))
    said = "block is wrapped in DataParallel.*pass the module without"
    refused(ConfigError, said, model=model, config="zero1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        said = "the model is wrapped in DistributedDataParallel.*pass the module without"
        wrapped = nn.parallel.DistributedDataParallel(stack())
        refused(ConfigError, said, model=wrapped, config="zero3")
        sharded = stack()
        torch.distributed.fsdp.fully_shard(sharded)
        with pytest.raises(ConfigError, match="the model is wrapped in FSDPModule, and hf-zero"):
            hf_zero.initialize(model=sharded, config="zero3")
    finally:
        torch.distributed.destroy_process_group()
    assert not process_group.is_initialized()
    init.init_distributed(timeout=20)
    engine = hf_zero.initialize(model=stack(), dist_init_required=False, config="zero1")[0]
    assert engine.world_size == 1


@pytest.mark.parametrize("how", ["configuration", "engine", "unclipped", "all in groups"])
def test_clipping_tells_of_parameters_that_it_leaves_out(how: str, heard: list[str]) -> None:
    """As optimizers of matrices alone do: torch's clipping would count the gradients of the rest,
    too.
    """
    model = stack()
    given = [p for p in model.parameters() if how == "all in groups" or p.dim() > 1]
    config = config_of(1, gradient_clipping=0.0 if how in ("engine", "unclipped") else 1e-3)
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(given), config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 7)).sum())
        if how == "engine":
            engine.clip_gradient(1e-3)
        engine.step()
    said = [text for text in heard if "the norm and clipping leave out their gradients" in text]
    assert len(said) == (how in ("configuration", "engine"))
    if said:
        count = sum(p.dim() == 1 for p in model.parameters())
        assert said[0].startswith(f"{count} parameters of the model require grad")


@pytest.mark.parametrize("frozen", ["all", "but one", "without an optimizer"])
def test_an_optimizer_of_frozen_parameters_is_told(frozen: str, heard: list[str]) -> None:
    model = stack()
    first, *_ = model.requires_grad_(False).parameters()
    first.requires_grad_(frozen == "but one")
    optimizer = torch.optim.SGD(model.parameters())
    given = {} if frozen == "without an optimizer" else {"optimizer": optimizer}
    hf_zero.initialize(model=model, config="zero1", **given)
    said = [text for text in heard if "of the optimizer requires grad, so nothing trains" in text]
    assert len(said) == (frozen == "all"), heard


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", ["script", "trace"])
def test_a_model_that_torch_jit_compiles_is_refused(compiled: str) -> None:
    model, part = stack(), nn.Linear(2, 2)
    example = torch.ones(1, 2)
    model.block = torch.jit.script(part) if compiled == "script" else torch.jit.trace(part, example)
    said = r"block is compiled by torch\.jit.*pass the module as it was before torch\.jit\.script"
    refused(ConfigError, said, model=model, config="zero3")


class Configuration:
    """The configuration of a model that has no dictionary of attributes."""

    __slots__ = ("width",)

    def to_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("config", [Configuration(), Configuration])
def test_the_configuration_of_a_model_may_be_any_object(config: object) -> None:
    model = stack()
    model.config = config
    engine = hf_zero.initialize(model=model, config="zero3")[0]
    assert model.config is config
    engine.destroy()


def test_what_a_callable_optimizer_changes_in_the_model_stays() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first, last = model

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        first.weight.requires_grad_(False)
        last.weight = nn.Parameter(torch.full_like(last.weight, 2.0))
        model.register_forward_hook(lambda module, inputs, output: output * 2)
        model.groups = 1
        return torch.optim.SGD(model.parameters(), lr=0.1)

    engine = hf_zero.initialize(model=model, optimizer=make, config="zero1")[0]
    x = torch.ones(2, 3)
    with torch.no_grad():
        assert torch.equal(engine(x), 2 * last(first(x)))
    assert not first.weight.requires_grad
    assert torch.equal(last.weight, torch.full_like(last.weight, 2.0))
    assert model.groups == 1
    engine.destroy()


def test_a_callable_optimizer_gets_parameters_of_one_memory_once() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    first, bias, last = model[0].weight, model[0].bias, model[1].bias

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        assert list(map(id, parameters)) == list(map(id, (first, bias, last)))
        return torch.optim.SGD([{"params": [first]}, {"params": [bias, last]}], lr=0.1)

    engine = hf_zero.initialize(model=model, optimizer=make, config="zero1")[0]
    assert model[0].weight is model[1].weight
    engine.destroy()


def deepspeed_at(where: str | None) -> ModuleType:
    module = ModuleType("deepspeed")
    module.__file__ = where
    return module


def test_another_deepspeed_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = "deepspeed/__init__.py"
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed_at(str(tmp_path / file)))
    said = r"another deepspeed is imported.*deepspeed/__init__\.py.*HF_ZERO_BACKEND=hf_zero"
    refused(ConfigError, said, config="zero1")
    # our own one and a bare name are no other
    for where in (str(Path(hf_zero.__file__).parent / file), None):
        monkeypatch.setitem(sys.modules, "deepspeed", deepspeed_at(where))
        assert hf_zero.initialize(model=stack(), config="zero1")[0].stage == 1


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class PlacedStream(Stream):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def loader_of(data: Any, **more: Any) -> Any:
    given = {"training_data": data, "collate_fn": tuple, "config": config_of(1, **more)}
    return hf_zero.initialize(model=stack(), **given)[2]


def test_a_stream_is_batched_in_its_order_and_collated_as_said() -> None:
    assert list(loader_of(Stream())) == [(0, 1), (2, 3), (4, 5), (6,)]
    for stream in (Stream(), PlacedStream()):
        assert list(loader_of(stream, dataloader_drop_last=True)) == [(0, 1), (2, 3), (4, 5)]
    batches = list(loader_of(list(range(11)), dataloader_drop_last=True))
    assert len(batches) == 5 and {len(batch) for batch in batches} == {2}
    assert type(batches[0]) is tuple


def test_each_rank_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf_zero.ZeroConfig.from_dict(config_of(1)).resolve(4)
    monkeypatch.setattr(process_group, "get_world_size", lambda: 4)
    shares, orders = [], []
    for rank in range(4):
        monkeypatch.setattr(process_group, "get_rank", lambda rank=rank: rank)
        loader = data_loader(list(range(24)), None, config)
        assert loader is not None
        shares.append([int(value) for batch in loader for value in batch])
        loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
        orders.append([int(value) for batch in loader for value in batch])
    assert [len(share) for share in shares] == [6] * 4
    assert sorted(chain(*shares)) == sorted(chain(*orders)) == list(range(24)) and shares != orders

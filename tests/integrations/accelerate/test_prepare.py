"""Accelerate's process state under ZeRO, and ``accelerator.prepare`` in orders and without parts
that Accelerate refuses under DeepSpeed, or takes in silence; in one process.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import LlamaConfig, LlamaModel

from hf_zero.distributed import init, process_group
from hf_zero.errors import ConfigError, PartitionError, RankMismatchError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate import parallel_sizes, state
from hf_zero.integrations.accelerate.counted_once import count_batches_once
from hf_zero.integrations.accelerate.loaders import share_out
from hf_zero.integrations.accelerate.memory_saves import engines_of
from hf_zero.integrations.accelerate.open_values import _counted_by_data_parallel_ranks, open_values
from hf_zero.integrations.accelerate.refusals import refuse_optimizer_apart, refuse_several_models
from hf_zero.integrations.accelerate.state import division_in_effect
from hf_zero.launch.hosts import free_port
from hf_zero.parallel.sequence.division import Division
from hf_zero.zero.reduce.batch_codes import BatchCodes
from tests.helpers.accelerators import play_accelerator
from tests.helpers.cells import in_turn
from tests.helpers.models import features
from tests.helpers.plain_process import forget
from tests.helpers.stacks import stack


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Accelerate sets the number of threads for CPU ranks."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


ZERO3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}


def plugin(**more: bool) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(hf_ds_config=ZERO3, **more)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether ZeRO is on, on the CPU."""
    assert accelerator.device.type == "cpu"
    found = accelerator.distributed_type == DistributedType.DEEPSPEED
    assert process_group.is_initialized() is found
    assert found or accelerator.distributed_type == DistributedType.NO
    return found


def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of torchrun, with a world of one."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **place}.items():
        monkeypatch.setenv(name, value)


def test_without_zero_accelerate_answers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state made before ZeRO was asked for is made again, for ranks that meet over gloo."""
    launched(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = PartialState()
    theirs = PartialState._prepare_backend.__wrapped__(state)
    assert (state.backend, state.distributed_type) == theirs
    assert state.distributed_type != DistributedType.DEEPSPEED
    assert is_sharded(Accelerator(deepspeed_plugin=plugin()))
    assert state.backend == "gloo" and state.distributed_type == DistributedType.DEEPSPEED


def test_the_optimizer_keeps_no_module_alive_for_trl() -> None:
    forget()
    stage1 = {**ZERO3, "zero_optimization": {"stage": 1}}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=stage1))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = accelerator.prepare(model, optimizer)[0]
    assert optimizer.parameter_offload.module is model
    engine.destroy()
    alive = weakref.ref(model)
    del model, engine, accelerator
    gc.collect()
    assert alive() is None and optimizer.parameter_offload.module is None


@in_turn("how", ["argument", "variable", "beside GPUs"])
def test_forcing_the_cpu_keeps_zero(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    variable = "true" if how == "variable" else None
    if variable:
        monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    if how == "beside GPUs":
        play_accelerator(monkeypatch)
    accelerator = Accelerator(cpu=variable is None, deepspeed_plugin=plugin())
    assert is_sharded(accelerator) and process_group.default_device().type == "cpu"
    assert accelerator.state.deepspeed_plugin.zero_stage == 3
    if how != "beside GPUs":
        assert os.environ.get("ACCELERATE_USE_CPU") == variable


def test_a_start_that_fails_forces_no_later_one_onto_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget()
    launched(monkeypatch)

    def unreachable(*args: object, **kwargs: object) -> None:
        assert os.environ["ACCELERATE_USE_CPU"] == "true"
        raise RankMismatchError("the master is not there; start it")

    with monkeypatch.context() as patch:
        patch.setattr(init, "init_distributed", unreachable)
        with pytest.raises(RankMismatchError, match="the master is not there"):
            Accelerator(cpu=True, deepspeed_plugin=plugin())
    assert "ACCELERATE_USE_CPU" not in os.environ


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallelism of Accelerate's own, and peers that it cannot see."""
    with pytest.raises(ConfigError, match=r"tp_size=2.*write tensor_parallel\.autotp_size = 2"):
        Accelerator(deepspeed_plugin=plugin(), parallelism_config=ParallelismConfig(tp_size=2))
    forget()
    named = DeepSpeedPlugin(hf_ds_config=ZERO3 | {"context_parallel_size": 4})
    with pytest.raises(ConfigError, match=r"context_parallel_size is 4 .* 2 in the Par"):
        Accelerator(deepspeed_plugin=named, parallelism_config=ParallelismConfig(cp_size=2))
    forget()
    monkeypatch.setattr(process_group, "get_world_size", lambda: 2)
    counts = r"counts 1 process\(es\) and the process group 2.*LOCAL_RANK"
    with pytest.raises(RankMismatchError, match=counts):
        Accelerator(deepspeed_plugin=plugin())


NO_SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "a string": ({"sequence_parallel_size": "2"}, "sequence_parallel_size = '2' in the ZeRO"),
    "of rings": ({"context_parallel_size": "2"}, "'2' in the ZeRO .* integer of at least 1; write"),
    "of layers": ({"tensor_parallel": {"autotp_size": "2"}}, r"tensor_parallel\.autotp_size = '2'"),
    "left open": ({"tensor_parallel": {"autotp_size": "auto"}}, r"\.autotp_size = 'auto' in the"),
}


@in_turn("case", NO_SIZES)
def test_sizes_that_are_no_numbers_are_refused(case: str) -> None:
    """Also in a plugin that Accelerate selects later."""
    keys, message = NO_SIZES[case]
    forget()
    plugins = {"student": plugin(), "teacher": DeepSpeedPlugin(hf_ds_config=ZERO3 | keys)}
    with pytest.raises(ConfigError, match=message):
        Accelerator(deepspeed_plugins=plugins, parallelism_config=ParallelismConfig())


def test_a_size_as_a_float_is_an_integer() -> None:
    config: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2.0}, "context_parallel_size": 1}
    parallel_sizes.check_sizes(config)
    assert type(config["tensor_parallel"]["autotp_size"]) is int


def test_copies_of_shards_are_refused_without_their_key() -> None:
    copies = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    with pytest.raises(ConfigError, match=r"dp_replicate_size=2.* write replicate_size = 2 in the"):
        Accelerator(deepspeed_plugin=plugin(), parallelism_config=copies)
    assert state._parallelism_under_zero(copies, {"replicate_size": 2}) is copies
    shards = ParallelismConfig(dp_shard_size=2)
    assert state._parallelism_under_zero(shards, {}) is shards


RINGS: dict[str, tuple[dict[str, int], dict[str, Any], Division]] = {
    "a ring": ({"cp_size": 2}, {}, Division(1, 2)),
    "heads and a ring": ({"cp_size": 2}, {"sequence_parallel_size": 2}, Division(2, 2)),
    "left open": (
        {"cp_size": 2},
        {"sequence_parallel_size": "auto", "context_parallel_size": "auto"},
        Division(1, 2),
    ),
    "keys": ({}, {"sequence_parallel_size": 2, "context_parallel_size": 3}, Division(2, 3)),
    "the first of several plugins": ({}, {"sequence_parallel_size": 2}, Division(2, 1)),
}


@in_turn("case", RINGS)
def test_the_ranks_of_a_ring_are_counted_as_sequence_parallel(case: str) -> None:
    """So neither Accelerate nor the Trainer cuts batches for torch's rings, too."""
    if "sp_size" not in ParallelismConfig.__dataclass_fields__:
        pytest.skip("this release of Accelerate counts no sequence-parallel ranks")
    sizes, keys, division = RINGS[case]
    forget()
    parallelism = ParallelismConfig(**sizes)  # type: ignore[arg-type]
    named = DeepSpeedPlugin(hf_ds_config=ZERO3 | {"gradient_accumulation_steps": 1} | keys)
    several = case == "the first of several plugins"
    plugins = {"student": named, "teacher": plugin()} if several else named
    found = Accelerator(deepspeed_plugins=plugins, parallelism_config=parallelism)
    assert "auto" not in named.deepspeed_config.values()
    assert is_sharded(found)
    counted = found.parallelism_config
    assert (counted.sp_size, counted.cp_size) == (division.ranks, 1)
    assert counted.sp_enabled and not counted.cp_enabled and counted.sp_handler is not None
    assert division_in_effect() == division
    assert (parallelism.sp_size, parallelism.cp_size) == (1, sizes.get("cp_size", 1))
    forget()
    Accelerator(deepspeed_plugin=plugin())
    assert division_in_effect() is None


def test_shared_sequences_are_refused_where_accelerate_cannot_count_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accelerate 1.11 has rings, and no ``sp_size``."""
    monkeypatch.delattr("accelerate.utils.DeepSpeedSequenceParallelConfig", raising=False)
    alone, ring = SimpleNamespace(cp_size=1), SimpleNamespace(cp_size=2)
    assert state._with_shared_sequences(alone, {}) is alone  # type: ignore[arg-type]
    assert parallel_sizes.sequence_ranks(SimpleNamespace(parallelism_config=ring)) == 1
    with pytest.raises(ConfigError, match=r"2 ranks share a sequence .* 'accelerate>=1.12'"):
        state._with_shared_sequences(ring, {})  # type: ignore[arg-type]


def test_models_made_with_zero_init_disabled_stay_whole() -> None:
    made_under = plugin(zero3_init_flag=False)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}

    def has_facts_of_shards() -> bool:
        model = LlamaModel._from_config(LlamaConfig(num_hidden_layers=1, **sizes))
        return hasattr(model.norm.weight, "ds_id")

    Accelerator(deepspeed_plugin=made_under)
    assert has_facts_of_shards()
    with made_under.zero3_init_context_manager(enable=False):
        assert not has_facts_of_shards()
    assert has_facts_of_shards()


ROWS = features(0, 0, 0)


def accelerator(stage: int = 2) -> Accelerator:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {"zero_optimization": {"stage": stage}, **dict.fromkeys(sizes, "auto")}
    return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


def prepared(ours: Accelerator, *loaders: Any, lr: float = 0.1) -> tuple[Any, Any]:
    model = stack()
    engine, optimizer, *_ = ours.prepare(
        model, torch.optim.SGD(model.parameters(), lr=lr), *loaders
    )
    return engine, optimizer


@in_turn("limit", [None, 0.1])
def test_gradient_clipping_of_0_leaves_the_limit_to_the_script(limit: float | None) -> None:
    """Accelerate drops a zero from the configuration that it makes of its YAML."""
    forget()
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.0)
    ours = Accelerator(cpu=True, deepspeed_plugin=plugin)
    engine, optimizer = prepared(ours, lr=1.0)
    ours.backward(engine(ROWS).mul(100.0).pow(2).mean())
    if limit is not None:
        ours.clip_grad_norm_(engine.parameters(), limit)
    optimizer.step()
    before = stack().parameters()
    moved = [now - old for now, old in zip(engine.module.parameters(), before, strict=True)]
    norm = float(torch.cat([each.flatten() for each in moved]).norm())
    assert norm > 2.0 if limit is None else norm == pytest.approx(limit, rel=1e-3)


GROUPS = {
    "layers": ({"tensor_parallel": {"autotp_size": 2}}, None),
    "sequences": ({}, SimpleNamespace(sp_size=2)),
}


@in_turn("shared", GROUPS)
def test_what_is_counted_by_data_parallel_ranks(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes are two of them."""
    finder.choose()
    keys, parallelism = GROUPS[shared]
    for split, micro, steps in ((True, 4, 12), (False, "auto", 24)):
        config = {"train_micro_batch_size_per_gpu": "auto", **keys}
        plugin = SimpleNamespace(deepspeed_config=config, is_train_batch_min=True)
        state = SimpleNamespace(
            deepspeed_plugin=plugin, parallelism_config=parallelism, num_processes=4
        )
        ours = SimpleNamespace(state=state, deepspeed_plugin=plugin, split_batches=split)
        dummy = DummyScheduler(None, total_num_steps=12)
        loaders = DataLoader(ROWS, batch_size=12), DataLoader(ROWS, batch_size=8)  # type: ignore[arg-type]
        with _counted_by_data_parallel_ranks(ours, (*loaders, dummy)):
            assert config["train_micro_batch_size_per_gpu"] == micro
            assert dummy.total_num_steps == steps
        assert dummy.total_num_steps == 12

    # Accelerate steps a schedule once for each process
    monkeypatch.setattr("accelerate.state.AcceleratorState", lambda: state)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(stack().parameters()), 1)
    wrapped = SimpleNamespace(scheduler=schedule, split_batches=False, step_with_optimizer=True)
    count_batches_once(lambda self: [self.scheduler.step() for _ in range(4)], wrapped)
    assert schedule.last_epoch == 2


def test_a_prepare_that_fails_leaves_auto_sizes_in_place() -> None:
    """The next one, with a data loader, fills them in."""
    finder.choose()
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    plugin = SimpleNamespace(deepspeed_config={**sizes}, gradient_clipping=1.0)
    state = SimpleNamespace(deepspeed_plugin=plugin, parallelism_config=None, num_processes=1)
    ours = SimpleNamespace(state=state, deepspeed_plugin=plugin, split_batches=False)
    with pytest.raises(ConfigError), open_values(ours, (stack(),)):
        assert not sizes.keys() & plugin.deepspeed_config.keys()
        raise ConfigError("refused; write another value")
    assert sizes.items() <= plugin.deepspeed_config.items()


def shared(
    monkeypatch: pytest.MonkeyPatch, stage: int, batches: int, ranks: int = 2, **loading: Any
) -> Any:
    """A loader of ``batches`` batches as the first of ``ranks`` has it."""
    finder.choose()
    plugin = SimpleNamespace(deepspeed_config={}, zero_stage=stage)
    state = SimpleNamespace(deepspeed_plugin=plugin, parallelism_config=None)
    even = {
        "even_batches": loading.pop("even_batches", False),
        "split_batches": loading.pop("split_batches", False),
    }
    rows = torch.ones(loading.pop("rows", 2 * batches), *ROWS.shape[1:])
    if loading.pop("as_sampler", False):
        loading |= {"sampler": BatchSampler(SequentialSampler(rows), 2, False), "batch_size": None}
    loader = DataLoader(rows, **{"batch_size": 2, **loading})  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.state.AcceleratorState", lambda: state)
        return share_out(prepare_data_loader, loader, None, ranks, 0, **even)


def test_a_loader_that_brings_ranks_different_numbers_of_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Is refused at stage 3, for evaluation too."""
    for stage, batches, changes in (
        (2, 3, {}), (3, 4, {}), (3, 3, {"drop_last": True}), (3, 3, {"even_batches": True}),
    ):  # fmt: skip
        assert len(shared(monkeypatch, stage, batches, **changes)) in (1, 2)
    with pytest.raises(ConfigError, match="even_batches"):
        shared(monkeypatch, 3, 3)
    shared(monkeypatch, 3, 4, as_sampler=True)
    with pytest.raises(ConfigError, match="even_batches"):
        shared(monkeypatch, 3, 3, as_sampler=True)


def test_a_split_batch_that_leaves_ranks_without_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Accelerate's own sampler gives them to the ranks."""
    for ranks, rows, even in (
        (2, 4, True), (2, 5, False), (2, 6, False), (2, 7, True), (4, 9, False), (4, 14, False),
        (4, 15, True),
    ):  # fmt: skip
        batches = BatchSampler(SequentialSampler(range(rows)), 2 * ranks, drop_last=False)
        counts = {
            sum(1 for _ in BatchSamplerShard(batches, ranks, rank, True, False))
            for rank in range(ranks)
        }
        assert even is (len(counts) == 1)
        expected = nullcontext() if even else pytest.raises(ConfigError, match="even_batches")
        with expected:
            shared(
                monkeypatch, 3, 0, ranks=ranks, rows=rows, batch_size=2 * ranks, split_batches=True
            )


class SpreadBatches(BatchSampler):
    """Five samples in batches of 4 and 1, of which the last is filled up with the first ones."""

    def __iter__(self) -> Any:
        yield from ([0, 1, 2, 3], [4, 0, 1, 2])


def test_split_batches_of_a_sampler_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches need not be those that its samples would fill."""
    rows = torch.ones(5, *ROWS.shape[1:])
    batches = SpreadBatches(SequentialSampler(rows), 4, drop_last=False)
    given = {"batch_sampler": batches, "batch_size": 1, "split_batches": True}
    loader = shared(monkeypatch, 3, 0, rows=5, **given)
    assert [len(batch) for batch in loader] == [2, 2]


@in_turn("stage", [1, 2])
def test_a_loader_that_trains_ranks_on_different_numbers_of_batches(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused by its first backward; windows of two of three batches are as many at stage 1."""
    forget()
    for batches, steps in ((4, 1), (7, 2), (5, 2), (3, 1)):
        ours = accelerator(stage)
        ours.gradient_accumulation_steps = steps
        engine, _ = prepared(ours, DataLoader(ROWS, batch_size=2))  # type: ignore[arg-type]
        trains = batches == 4 or (batches == 7 and stage == 1)
        expected = nullcontext() if trains else pytest.raises(ConfigError, match="even_batches")
        with expected:
            for batch in shared(monkeypatch, stage, batches):
                ours.backward(engine(batch).pow(2).mean())
        assert trains is (engine.global_steps > 0)
        engine.destroy()
        forget()


def test_a_loss_of_a_model_that_was_not_prepared_is_refused() -> None:
    ours, model = accelerator(), stack()
    loss = model(torch.ones(2, 7)).square().mean()
    with pytest.raises(PartitionError, match=r"has prepared no model.*= accelerator\.prepare\("):
        ours.backward(loss)
    engine, optimizer = prepared(ours)
    ours.backward(engine(torch.ones(2, 7)).square().mean())
    optimizer.step()


def test_keywords_of_a_backward() -> None:
    """Only what engines take is passed on; freezing, the remedy that is named, works."""
    ours = accelerator()
    engine, optimizer = prepared(ours)
    first, *others = engine.module.parameters()
    before = [p.detach().clone() for p in others]
    for keywords in (
        {"inputs": [first]},
        {"create_graph": True},
        {"inputs": None, "gradient": None},
    ):
        (name, value), *_ = keywords.items()
        loss = engine(torch.ones(2, 7)).square().mean()
        expected = (
            nullcontext()
            if value is None
            else pytest.raises(PartitionError, match=f"{name}=.*requires_grad_")
        )
        with expected:
            ours.backward(loss, **keywords)
    optimizer.zero_grad()
    for p in others:
        p.requires_grad_(False)
    ours.backward(engine(torch.ones(2, 7)).square().mean())
    optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(others, before))
    assert engine.global_steps == 1


@in_turn("order", ["loader first", "together", "loader last", "no loader"])
def test_batches_of_a_prepared_loader_are_not_compared(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the Trainer has emptied the list of loaders."""
    forget()
    trusted: list[BatchCodes] = []
    monkeypatch.setattr(BatchCodes, "trust_loader", lambda codes: trusted.append(codes))
    ours, loader = accelerator(), DataLoader(torch.ones(4, 7), batch_size=2)  # type: ignore[arg-type]
    if order == "loader first":
        ours.prepare(loader)
        ours.free_memory()
    engine, _ = prepared(ours, *([loader] if order == "together" else []))
    if order == "loader last":
        ours.prepare(loader)
    assert (engine.optimizer_step.agreement.batches in trusted) == (order != "no loader")


def test_an_optimizer_apart_from_its_model_is_refused() -> None:
    """After its model, and on ranks."""
    ours, model = accelerator(), stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours.prepare(model)
    with pytest.raises(PartitionError, match=r"given SGD after its model"):
        ours.prepare(optimizer)
    prepare = partial(refuse_optimizer_apart, lambda self, optimizer, device_placement: optimizer)
    for kind, ranks in (("DEEPSPEED", 1), ("MULTI_CPU", 2)):
        of = SimpleNamespace(distributed_type=DistributedType(kind), num_processes=ranks)
        assert prepare(of, optimizer) is optimizer
    of = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, num_processes=2)
    with pytest.raises(PartitionError, match=r"prepare_optimizer\(SGD\)"):
        prepare(of, optimizer)


def test_an_engines_own_optimizer_may_be_prepared_again() -> None:
    """Its group has a frozen parameter, which the engine owns."""
    ours, model = accelerator(), stack()
    next(model.parameters()).requires_grad_(False)
    engine, _ = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours.prepare(engine.optimizer)
    engine.destroy()


def test_a_loss_beside_its_model_in_one_call_is_refused() -> None:
    """The remedy works, and without ZeRO Accelerate decides."""
    ours, model, loss = accelerator(), stack(), nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match=r"2 models \(\w+, Linear\).*loss stays out of prepare"):
        ours.prepare(model, loss, optimizer)
    engine, optimizer = ours.prepare(model, optimizer)
    ours.backward(engine(ROWS).pow(2).mean() + loss(ROWS[:, :2]).sum())
    optimizer.step()
    assert engine.global_steps == 1
    engine.destroy()
    of = SimpleNamespace(distributed_type=DistributedType("MULTI_CPU"))
    assert refuse_several_models(lambda self, *args: args, of, model, loss) == (model, loss)


@in_turn("configured", [False, True])
def test_a_model_that_is_prepared_again_has_one_engine(configured: bool, tmp_path: Path) -> None:
    """The state that is saved is that of the engine that trains."""
    forget()
    ours = accelerator()
    first = ours.prepare(stack())
    optimizer: Any = torch.optim.SGD(first.parameters(), lr=0.1)
    if configured:
        written = {"type": "SGD", "params": {"lr": 0.1}}
        ours.deepspeed_plugin.deepspeed_config["optimizer"] = written
        optimizer = DummyOptim(first.parameters())
    engine, optimizer = ours.prepare(first, optimizer)
    assert first.destroyed and ours._models == [engine]
    ours.backward(engine(ROWS).pow(2).mean())
    optimizer.step()
    ours.save_state(str(tmp_path))
    ours.load_state(str(tmp_path))
    assert engine.global_steps == 1
    engine.destroy()
    assert engines_of(ours) == []


def test_what_is_prepared_already_is_returned_as_it_is() -> None:
    """As without ZeRO; beside it something new is prepared."""
    ours, model = accelerator(), stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = ours.prepare(model, optimizer, schedule)
    again = ours.prepare(*given, DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
    assert all(now is before for now, before in zip(again[:3], given, strict=True))
    assert ours._dataloaders == [again[3]]
    assert ours.prepare(given[0]) is given[0] and ours.prepare(*given[:2]) == given[:2]
    assert (ours._models, ours._optimizers, ours._schedulers) == tuple([one] for one in given)
    ours.backward(given[0](ROWS).pow(2).mean())
    given[1].step()
    assert given[0].global_steps == 1
    with pytest.raises(PartitionError, match="SGD"):
        ours.prepare(given[0], torch.optim.SGD(model.parameters(), lr=0.1))


def test_batch_sizes_of_auto_are_those_of_each_prepare() -> None:
    ours, loaders = accelerator(), [DataLoader(ROWS, batch_size=size) for size in (4, 2)]  # type: ignore[arg-type]
    prepared(ours, loaders[0])
    ours.free_memory()
    ours.gradient_accumulation_steps = 3
    ours.prepare(loaders[0])
    assert ours.gradient_accumulation_steps == 3
    for written in (3, 5):
        ours.deepspeed_plugin.deepspeed_config["gradient_accumulation_steps"] = written
        engine, _ = prepared(ours, loaders[1])
        assert engine.train_micro_batch_size_per_gpu() == 2
        assert engine.train_batch_size() == 2 * written
        assert ours.gradient_accumulation_steps == written


def test_a_scheduler_without_its_model_is_told(heard: list[str]) -> None:
    ours, model = accelerator(), stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _, optimizer, together = ours.prepare(model, optimizer, schedule)
    assert together in ours._schedulers
    assert not any("StepLR" in text for text in heard)
    assert ours.prepare(schedule) is schedule
    assert any("is given StepLR without its model" in text for text in heard)

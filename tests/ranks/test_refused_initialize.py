"""A refused ``initialize`` leaves model, optimizer, scheduler, loader and process as they were, for
every feature that changes a model and every refusal; the right call after it trains as a first one.
"""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import hf_zero
from hf_zero.distributed import process_group
from hf_zero.errors import CheckpointError, HfZeroError, PartitionError, RankMismatchError
from hf_zero.planning import check_on_all_ranks
from hf_zero.setup import steps
from hf_zero.setup.steps import ORDER
from tests.helpers import layer_drop, tensor_parallel
from tests.helpers.engines import full_weights
from tests.helpers.models import bert, llama, seeded, tokens
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import llama as long_llama
from tests.helpers.snapshots import snapshot


@pytest.fixture(autouse=True)
def one_process():
    yield
    process_group.destroy_process_group()


class Quantized(nn.Linear):
    """A linear layer of torchao's, as far as a refusal is concerned."""


def quantize(model: nn.Module, chosen: Callable[[nn.Module, str], bool]) -> None:
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and chosen(module, path):
            made = Quantized(module.in_features, module.out_features, module.bias is not None)
            made.weight, made.bias = module.weight, module.bias
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made)


def stand_in_for_torchao(name: str, key: str) -> Any:
    recipe = types.SimpleNamespace(from_recipe_name=lambda name: Recipe())
    return types.SimpleNamespace(
        QATConfig=lambda *args, **kwargs: None,
        PerGroup=lambda size: None,
        PerAxis=lambda axis: None,
        IntxWeightOnlyConfig=lambda **kwargs: None,
        quantize_=lambda model, how, filter_fn: quantize(model, filter_fn),
        Float8LinearConfig=recipe,
        convert_to_float8_training=lambda model, config, module_filter_fn: quantize(
            model, module_filter_fn
        ),
    )


@dataclass(frozen=True)
class Recipe:
    emulate: bool = False


def tied() -> nn.Module:
    """The weight of the head is the memory of the embedding, and another parameter."""
    model: Any = llama()
    model.lm_head.weight.data = model.model.embed_tokens.weight.data
    return model


@dataclass(frozen=True)
class Feature:
    """A feature that changes a model: how the model is built, the keys of the configuration."""

    build: Callable[[], nn.Module] = llama
    keys: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    stage: int = 1


FEATURES = {
    "plain": Feature(),
    "tied memory": Feature(tied),
    "bf16": Feature(keys={"bf16": {"enabled": True}}, stage=2),
    "kernels": Feature(keys={"kernels": ["norms", "rotary", "qkv", "activations"]}),
    "tensor parallel": Feature(
        tensor_parallel.llama, {"tensor_parallel": {"autotp_size": 2}}, ranks=2
    ),
    "expert parallel": Feature(
        tensor_parallel.mixtral, {"expert_parallel": {"autoep_size": 2}}, ranks=2
    ),
    "float8": Feature(keys={"float8_training": {"recipe": "rowwise", "emulate": True}}),
    "quantization aware": Feature(
        keys={"quantization_aware_training": {"config": "int4_weight", "group_size": 1}}
    ),
    "norms before": Feature(bert, {"pre_layer_norm": True}),
    "sparse attention": Feature(keys={"sparse_attention": {"mode": "bigbird", "block": 16}}),
    "layer dropping": Feature(
        layer_drop.FAMILIES["llama"][0],
        {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1}, "seed": 3},
    ),
    "recomputation": Feature(keys={"activation_checkpointing": {"blocks": True}}, stage=3),
    "sequence parallel": Feature(long_llama, {"sequence_parallel_size": 2}, ranks=2, stage=2),
}


def from_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


FURTHER = {
    "offloaded": Feature(
        keys={
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            }
        }
    ),
    "in files": Feature(
        keys={
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "nvme", "nvme_path": "files"},
            }
        }
    ),
    "on the meta device": Feature(from_meta, stage=2),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def two_optimizers(model: nn.Module, folder: Path) -> dict[str, Any]:
    return {
        "optimizer": adamw(model),
        "config": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    }


def misspelt_scheduler(model: nn.Module, folder: Path) -> dict[str, Any]:
    return {
        "optimizer": adamw(model),
        "config": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 3}}},
    }


def broken_checkpoint(model: nn.Module, folder: Path) -> dict[str, Any]:
    return {"optimizer": adamw(model), "resume": folder}


def foreign_parameter(model: nn.Module, folder: Path) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(3))])}


REFUSALS = {
    "optimizer": two_optimizers,
    "scheduler": misspelt_scheduler,
    "checkpoint": broken_checkpoint,
    "foreign parameter": foreign_parameter,
}


def configuration(feature: Feature, more: dict[str, Any]) -> dict[str, Any]:
    stage = {"zero_optimization": {"stage": feature.stage}}
    return {"train_micro_batch_size_per_gpu": 2} | stage | feature.keys | more


def step(engine: Any, feature: Feature, number: int) -> None:
    ids = tokens(number, 0, 0)[:, :8].contiguous()
    if feature.build is from_meta:
        loss = engine(ids.float()).pow(2).mean()
    elif "sequence_parallel_size" in feature.keys:
        batch = hf_zero.sequence_parallel().shard({"input_ids": ids, "labels": ids.clone()})
        loss = engine(**batch).loss
    else:
        loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()


def trained(model: nn.Module, feature: Feature, rank: int) -> dict[str, torch.Tensor]:
    """The weights after two steps of the right call."""
    config = configuration(feature, {})
    torch.manual_seed(5)
    engine, *_ = hf_zero.initialize(model=model, optimizer=adamw(model), config=config)
    for number in range(2):
        step(engine, feature, number)
    weights = full_weights(engine)
    engine.destroy(gather=True)
    return weights


def models_of(feature: Feature) -> list[tuple[nn.Module, nn.Module]]:
    """Return two equal models for each rank. Ranks have values of their own: rank 0's count."""
    models = [(seeded(feature.build), seeded(feature.build)) for _ in range(feature.ranks)]
    for rank, pair in enumerate(models):
        for parameter in (p for model in pair for p in model.parameters() if rank):
            parameter.data.mul_(1 + rank)
    return models


def refuse(
    rank: int, models: list[tuple[nn.Module, nn.Module]], feature: Feature, folder: Path
) -> list[str]:
    """Return what each refusal changes, and the weights that differ after the right call."""
    model, other = models[rank]
    alone, found = feature.ranks == 1, []
    for name, arguments in REFUSALS.items():
        call = arguments(model, folder)
        config = configuration(feature, call.pop("config", {}))
        objects = {"model": model, "optimizer": call["optimizer"]}
        before = snapshot(objects, folder, whole_process=alone)
        with pytest.raises(HfZeroError) as refused:
            hf_zero.initialize(model=model, config=config, training_data=[torch.zeros(2)], **call)
        assert len(str(refused.value).splitlines()) <= 8
        changes = before.changes_until(snapshot(objects, folder, whole_process=alone))
        found += [f"{name}: {change}" for change in changes]
    again, first = trained(model, feature, rank), trained(other, feature, rank)
    return found + [key for key in first if not torch.equal(first[key], again[key])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a checkpoint of another model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = nn.Linear(2, 2)
    engine, *_ = hf_zero.initialize(model=model, optimizer=adamw(model), config="zero1")
    engine.save_checkpoint(folder)
    engine.destroy()
    process_group.destroy_process_group()
    return folder


def on_each_rank(feature: Feature, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of ``function(rank, *args)``."""
    if feature.ranks == 1:
        return [function(0, *args)]
    return run_ranks(feature.ranks, function, *args)


# those whose plans look at models, and what they share, in their own ways
REFUSING = ("tied memory", "tensor parallel", "sparse attention", "layer dropping")


@pytest.mark.parametrize("name", REFUSING)
def test_refusals_change_nothing(name, checkpoint, monkeypatch):
    monkeypatch.setattr("hf_zero.techniques.quantized_linears._torchao", stand_in_for_torchao)
    feature = FEATURES[name]
    found = on_each_rank(feature, refuse, models_of(feature), feature, checkpoint)
    assert found == [[]] * feature.ranks, "\n".join(chain.from_iterable(found))


def test_groups_of_a_refused_optimizer_are_as_they_were():
    model = seeded(llama)
    weights, norms = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    groups = [{"params": iter(weights)}, {"params": norms, "weight_decay": 0.0}]
    more = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 3}},
    }
    config = configuration(FEATURES["plain"], more)
    for _ in range(2):  # an exhausted iterator would have no parameters left
        with pytest.raises(HfZeroError, match="warmup_num_step"):
            hf_zero.initialize(model=model, model_parameters=groups, config=config)
        assert groups == [{"params": weights}, {"params": norms, "weight_decay": 0.0}]


def test_a_refusal_of_one_rank_is_raised_on_all():
    def on_rank(rank: int) -> str:
        model = models[rank]
        optimizer = adamw(others if rank else model)
        before = snapshot({"model": model, "optimizer": optimizer}, whole_process=False)
        with pytest.raises(PartitionError if rank else RankMismatchError) as refused:
            hf_zero.initialize(model=model, optimizer=optimizer, config="zero3")
        after = snapshot({"model": model, "optimizer": optimizer}, whole_process=False)
        assert before.changes_until(after) == []
        return str(refused.value)

    *models, others = (seeded(llama) for _ in range(3))
    follows, own = run_ranks(2, on_rank)
    assert "outside the model, and lacks model.embed_tokens.weight" in own
    assert "rank 1 could not plan its engine" in follows and own.splitlines()[0] in follows


class Broken(Exception):
    """The exception of a step that was broken off."""


def broken_off(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which raises :class:`Broken` once it has done its work."""

    def run(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        raise Broken

    return run


last = threading.local()  # .step: after which :class:`Broken` is raised; of a rank


def broken_off_after_last(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``function``, which raises :class:`Broken` if it is the last step of this rank."""

    def run(now: Any) -> None:
        function(now)
        if getattr(last, "step", None) is function:
            raise Broken

    return run


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)


def break_off(
    rank: int, models: list[tuple[nn.Module, nn.Module]], feature: Feature, folder: Path
) -> list[str]:
    """Return what an exception after each step changes, and the weights that differ after that."""
    model, other = models[rank]
    alone, found = feature.ranks == 1, []
    config = configuration(feature, {})
    for last.step in ORDER:
        optimizer = adamw(model)
        group = {"model": model, "optimizer": optimizer}
        before = snapshot(group, folder, whole_process=alone)
        with pytest.raises(Broken):
            hf_zero.initialize(
                model=model,
                optimizer=optimizer,
                config=config,
                training_data=[torch.zeros(2)],
                lr_scheduler=schedule,
                resume=folder,
            )
        changes = before.changes_until(snapshot(group, folder, whole_process=alone))
        found += [f"after {last.step.__name__}: {change}" for change in changes]
    last.step = None
    again, first = trained(model, feature, rank), trained(other, feature, rank)
    return found + [key for key in first if not torch.equal(first[key], again[key])]


def save(
    rank: int, models: list[tuple[nn.Module, nn.Module]], feature: Feature, folder: Path
) -> None:
    """Save a checkpoint of a copy of the model, to resume from."""
    model = copy.deepcopy(models[rank][0])
    config = configuration(feature, {})
    engine, *_ = hf_zero.initialize(model=model, optimizer=adamw(model), config=config)
    step(engine, feature, 0)
    engine.save_checkpoint(folder)
    engine.destroy()


def saved_before_this_process(
    models: list[tuple[nn.Module, nn.Module]], feature: Feature, folder: Path
) -> None:
    """Save a checkpoint, and leave nothing of the engines in this process."""
    on_each_rank(feature, save, models, feature, folder)
    process_group.destroy_process_group()
    for interface in (AttentionInterface, AttentionMaskInterface):
        for held in [held for held in interface._global_mapping if held.startswith("hf_zero")]:
            del interface._global_mapping[held]


@pytest.mark.parametrize("name", [*FEATURES, *FURTHER])
def test_an_exception_after_each_step_is_undone(name, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_zero.techniques.quantized_linears._torchao", stand_in_for_torchao)
    monkeypatch.setattr(steps, "ORDER", tuple(map(broken_off_after_last, ORDER)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    feature = (FEATURES | FURTHER)[name]
    models = models_of(feature)
    saved_before_this_process(models, feature, tmp_path)
    found = on_each_rank(feature, break_off, models, feature, tmp_path)
    assert found == [[]] * feature.ranks, "\n".join(chain.from_iterable(found))


def refuse_damaged(
    rank: int, models: list[tuple[nn.Module, nn.Module]], feature: Feature, folder: Path
) -> list[str]:
    """Return what the refusal of a damaged checkpoint changes, and the weights that differ after
    the right call, made while the exception lives.
    """
    model, other = models[rank]
    optimizer = adamw(model)
    objects = {"model": model, "optimizer": optimizer}
    before = snapshot(objects, folder, whole_process=feature.ranks == 1)
    config = configuration(feature, {})
    with pytest.raises(CheckpointError, match="is damaged") as refused:
        hf_zero.initialize(model=model, optimizer=optimizer, config=config, resume=folder)
    found = before.changes_until(snapshot(objects, folder, whole_process=feature.ranks == 1))
    again, first = trained(model, feature, rank), trained(other, feature, rank)
    assert refused.value.__traceback__ is not None
    return found + [key for key in first if not torch.equal(first[key], again[key])]


@pytest.mark.parametrize("name", ["kernels", "tensor parallel", "offloaded", "in files"])
def test_a_damaged_checkpoint_changes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    feature, folder = (FEATURES | FURTHER)[name], tmp_path / "saved"
    models = models_of(feature)
    saved_before_this_process(models, feature, folder)
    for path in folder.rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-64:] = bytes(each ^ 0xFF for each in content[-64:])
        path.write_bytes(content)
    found = on_each_rank(feature, refuse_damaged, models, feature, folder)
    assert found == [[]] * feature.ranks, "\n".join(chain.from_iterable(found))


def test_parameters_without_room_beside_the_engine_are_not_kept(monkeypatch):
    """The exception says so; a model that is whole trains with the values that it had."""

    def without_room(*args: Any) -> Any:
        return replace(check_on_all_ranks(*args), spare=False)

    model, other = seeded(llama), seeded(llama)
    monkeypatch.setattr("hf_zero.planning.memory_check.check_on_all_ranks", without_room)
    monkeypatch.setattr(steps, "ORDER", (*ORDER[:-1], broken_off(ORDER[-1])))
    memory = [p.data_ptr() for p in model.parameters()]
    config = configuration(FEATURES["plain"], {})
    with pytest.raises(Broken) as raised:
        hf_zero.initialize(model=model, optimizer=adamw(model), config=config)
    assert "build or load the model again" in str(raised.value.__notes__)
    assert all(now != former.data_ptr() for now, former in zip(memory, model.parameters()))
    monkeypatch.undo()
    again, first = (trained(each, FEATURES["plain"], 0) for each in (model, other))
    assert all(torch.equal(first[key], again[key]) for key in first)

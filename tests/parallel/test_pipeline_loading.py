"""Stages of models that a function loads: each rank reads its own layers alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.loading import building
from hf_zero.loading.expressions import Filled
from hf_zero.loading.shard_only import hold
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers.ranks import run_ranks
from tests.loading.counting import counting
from tests.parallel.causal import batches_of, model_of
from tests.parallel.pipelines import config, plain, sgd

STAGES = 3
AsRank = Callable[[int, int], None]


def bytes_of(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


def counted(values: torch.Tensor, made: list[int]) -> torch.Tensor:
    made.append(values.nbytes)
    return values


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_a_rank_reads_its_own_layers_alone(kind, as_rank, tmp_path):
    whole = model_of(kind)
    whole.save_pretrained(tmp_path)
    held: set[str] = set()
    for rank in range(STAGES):
        as_rank(rank, STAGES)
        with counting() as read:
            stages = hf_zero.pipeline_stages(
                lambda: AutoModelForCausalLM.from_pretrained(tmp_path), STAGES
            )
        assert read.bytes == bytes_of(stages) < bytes_of(whole)
        for name, parameter in stages.named_parameters():
            assert type(parameter) is nn.Parameter and parameter.requires_grad
            assert torch.equal(parameter, whole.get_parameter(name)), name
            held.add(name)
        kept = model_of(kind)
        other = dict(hf_zero.pipeline_stages(kept, STAGES).named_buffers())
        for name, buffer in stages.named_buffers():
            assert torch.equal(buffer, other.pop(name)), name
        assert not other
    assert held == dict(whole.named_parameters()).keys()


def test_a_rank_initialises_its_own_layers_alone(as_rank, monkeypatch):
    monkeypatch.setattr(building, "SMALL_BYTES", 0)
    made: list[int] = []
    real = Filled.whole
    monkeypatch.setattr(Filled, "whole", lambda self: counted(real(self), made))
    found: dict[str, list[torch.Tensor]] = {}
    for rank in range(STAGES):
        as_rank(rank, STAGES)
        made.clear()
        stages = hf_zero.pipeline_stages(lambda: model_of("llama"), STAGES)
        assert sum(made) == bytes_of(stages)
        for name, parameter in stages.named_parameters():
            found.setdefault(name, []).append(parameter.detach())
    tied = found["model.embed_tokens.weight"]
    assert len(tied) == 2 and torch.equal(*tied)
    assert 0.01 < float(found["model.layers.0.mlp.up_proj.weight"][0].std()) < 0.03


def test_what_a_function_loads_trains_as_the_model(tmp_path):
    whole, data = model_of("llama"), batches_of(6)
    whole.save_pretrained(tmp_path)

    def rank(_):
        stages = hf_zero.pipeline_stages(
            lambda: AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"),
            1,
            stages_per_rank=2,
        )
        engine, _, _, _ = hf_zero.initialize(
            model=stages, config=config(3, 1, kernels="off"), optimizer=sgd
        )
        batches = iter(data)
        told = [(float(engine.train_batch(batches)), engine.get_global_grad_norm())]
        told += [(float(engine.train_batch(batches)), engine.get_global_grad_norm())]
        engine.destroy()
        return told

    expected, _ = plain(
        whole, [data[:3], data[3:]], lambda model, batch: model(**batch, use_cache=False).loss
    )
    (told,) = run_ranks(1, rank)
    for found, wanted in zip(told, expected):
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.usefixtures("loads_at_once")
def test_layers_in_parts_are_read_in_parts(tmp_path):
    whole = model_of("qwen3")
    whole.save_pretrained(tmp_path)

    def rank(_):
        stages = hf_zero.pipeline_stages(
            lambda: hf_zero.tensor_parallel(AutoModelForCausalLM.from_pretrained(tmp_path), 2), 1
        )
        parts = {name: (p.detach(), sharding_of(p).box) for name, p in stages.named_parameters()}
        return parts

    with counting() as read:
        found = run_ranks(2, rank)
    # what is cut along columns, which are short here, is read whole
    assert read.bytes == sum(
        (value if box is None or box.cuts[0][0] == 0 else whole.get_parameter(name)).nbytes
        for parts in found
        for name, (value, box) in parts.items()
    )
    for parts in found:
        assert any(box is not None for _, box in parts.values())
        for name, (value, box) in parts.items():
            own = whole.get_parameter(name)
            assert torch.equal(value, own if box is None else box.take(own)), name


def test_what_is_refused():
    def rank(_):
        with pytest.raises(ConfigError, match=r"returned a dict; it must return a causal model"):
            hf_zero.pipeline_stages(dict, 1)
        model = model_of("llama")
        engine = hold(model, ZeroConfig(stage=3))
        with pytest.raises(ConfigError, match=r"made in shards .* pass a function that loads it"):
            hf_zero.pipeline_stages(model, 1)
        engine.destroy()

    run_ranks(1, rank)

"""Causal models of transformers as stages of a pipeline, against the whole model."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import hf_zero
from hf_zero.errors import ConfigError, PipelineError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.accelerator import prepare_engines
from hf_zero.integrations.transformers.pipeline_stages import FAMILIES
from tests.helpers.ranks import run_ranks
from tests.parallel.causal import TYPES, batches_of, model_of
from tests.parallel.pipelines import config, plain, sgd


def test_every_family_is_tested():
    assert {type(model_of(kind)).__name__ for kind in TYPES} == set(FAMILIES)


@pytest.mark.parametrize("kind", TYPES)
def test_stages_one_after_another_are_the_model(kind, as_rank):
    whole = model_of(kind)
    names = dict(whole.named_parameters())
    stages = []
    for rank in range(3):
        as_rank(rank, 3)
        stages.append(hf_zero.pipeline_stages(copy.deepcopy(whole), 3, partition_method="uniform"))
    held = [set(dict(stage.named_parameters())) for stage in stages]
    assert set().union(*held) == set(names)
    shared = {name for name in names if sum(name in each for each in held) > 1}
    tied = whole.get_input_embeddings().weight is whole.get_output_embeddings().weight
    assert len(shared) == int(tied)
    for batch in batches_of(3):
        inputs, labels = stages[0].split_batch(batch)
        value: Any = inputs
        for stage in stages:
            value = stage(value)
        expected = whole(**batch, use_cache=False)
        assert torch.equal(value, expected.logits)
        loss = stages[-1].loss(value, labels)
        assert torch.equal(loss, expected.loss)
        loss.backward()
        expected.loss.backward()
        for name, parameter in names.items():
            own = [dict(stage.named_parameters()).get(name) for stage in stages]
            parts = [each.grad for each in own if each is not None and each.grad is not None]
            total = torch.stack(parts).sum(0)
            assert parameter.grad is not None
            assert (total - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-9, name
    assert stages[1].config is stages[1].hf_model.config


def test_embeddings_that_are_added_elsewhere_come_from_no_host_memory(as_rank):
    """A copy of them to a GPU would be a wait for it in each forward of a stage."""
    as_rank(1, 3)
    stage = hf_zero.pipeline_stages(model_of("gpt2"), 3)
    nothing = stage.hf_model.transformer.wpe(torch.zeros(1, 5, dtype=torch.long, device="meta"))
    assert nothing.device.type == "meta"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_one_call_and_it_trains(kind):
    """Interleaved on one rank: the same blocks in each chunk's forward as in the whole model."""
    whole, cut = model_of(kind), model_of(kind)

    def rank(_):
        stages = hf_zero.pipeline_stages(cut, 1, stages_per_rank=3)
        engine, _, _, _ = hf_zero.initialize(
            model=stages, config=config(3, 1, kernels="off"), optimizer=sgd
        )
        data = iter(batches_of(6))
        told = [(float(engine.train_batch(data)), engine.get_global_grad_norm()) for _ in range(2)]
        with pytest.raises(ConfigError, match="have no labels"):
            engine.eval_batch([{"input_ids": torch.ones(1, 4, dtype=torch.long)}] * 3)
        outputs = engine.eval_batch(batches_of(1), compute_loss=False, num_micro_batches=1)
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        engine.destroy()
        return told, weights, outputs[0]

    data = batches_of(6)
    expected, _ = plain(
        whole, [data[:3], data[3:]], lambda model, batch: model(**batch, use_cache=False).loss
    )
    ((told, weights, logits),) = run_ranks(1, rank)
    for (loss, norm), (want, of) in zip(told, expected):
        assert loss == pytest.approx(want, rel=1e-6) and norm == pytest.approx(of, rel=1e-6)
    for name, value in whole.named_parameters():
        assert (weights[name] - value).norm() <= 1e-5 * value.norm(), name
    with torch.no_grad():
        torch.testing.assert_close(logits, whole.eval()(**batches_of(1)[0]).logits)


def test_generating_on_stages():
    models = [model_of("llama") for _ in range(2)]

    def rank(rank):
        stages = hf_zero.pipeline_stages(models[rank], 2)
        engine = hf_zero.initialize(model=stages, optimizer=sgd, config=config(2, 0))[0]
        ids = batches_of(1)[0]["input_ids"]
        calls: tuple[Callable[..., Any], ...] = (
            engine.module.generate, models[rank].generate, models[rank]
        )  # fmt: skip
        for call in calls:
            with pytest.raises(PipelineError, match=r"generate\(\) after pipeline_stages"):
                call(ids)
        engine.destroy()

    run_ranks(2, rank)


def test_what_is_refused():
    bert = BertForMaskedLM(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ConfigError, match=r"cut a BertForMaskedLM; it cuts LlamaForCausalLM, "):
        hf_zero.pipeline_stages(bert, 1)
    with torch.device("meta"):
        nothing = model_of("llama")
    with pytest.raises(ConfigError, match="on the meta device"):
        hf_zero.pipeline_stages(nothing, 1)
    stages = hf_zero.pipeline_stages(model_of("llama"), 1)
    finder.choose()
    with pytest.raises(ConfigError, match="got the stages of a pipeline, and its loops"):
        prepare_engines(lambda *args: args)(Namespace(parallelism_config=None), stages)
    ids = torch.ones(1, 4, dtype=torch.long)
    for batch in ({"inputs_embeds": ids}, {"input_ids": ids, "token_type_ids": ids}):
        with pytest.raises(ConfigError, match="for a pipeline of a causal model"):
            stages.split_batch(batch)
    assert stages.split_batch((ids, ids))[0].keys() == {"input_ids"}
    with pytest.raises(ConfigError, match=r"pipeline\.activation_checkpoint_interval is for a"):
        hf_zero.initialize(
            model=stages,
            config=config(1, 0, pipeline={"activation_checkpoint_interval": 1}),
            optimizer=sgd,
        )

"""Models of transformers as stages of a pipeline: values, loading, and memory that is estimated."""

from __future__ import annotations

import copy
import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, GPT2Config, LlamaConfig
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli.app import app
from hf_zero.config import ZeroConfig
from hf_zero.device.free_memory import FreeBytes
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError, DoesNotFitError, PipelineError, RankMismatchError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.accelerator import prepare_engines
from hf_zero.integrations.transformers.pipeline_stages import (
    FAMILIES,
    names_of_stages,
    stages_of_tied,
)
from hf_zero.loading import building
from hf_zero.loading.expressions import Filled
from hf_zero.loading.shard_only import hold
from hf_zero.logging import parse_size
from hf_zero.parallel.pipeline.module import PipelineModule
from hf_zero.parallel.pipeline.tied_parameters import set_tied
from hf_zero.planning import checking
from hf_zero.planning.estimate import propose
from hf_zero.planning.needs import needs
from hf_zero.planning.simulation.simulating import plans_of_stages
from tests.helpers.cells import in_one_item
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_each_rank
from tests.loading.counting import counting
from tests.parallel.causal import SMALL, TYPES, batches_of, model_of
from tests.parallel.pipelines import config, plain, sgd

STAGES = 3


def bytes_of(module):
    return sum(each.numel() * each.element_size() for each in module.parameters())


def counted(values, made):
    made.append(values.nbytes)
    return values


def test_a_rank_reads_its_own_layers_alone(as_rank, tmp_path):
    whole = model_of("llama")
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
        own = dict(stages.named_buffers())
        other = dict(hf_zero.pipeline_stages(model_of("llama"), STAGES).named_buffers())
        assert own.keys() == other.keys()
        assert all(torch.equal(buffer, other[name]) for name, buffer in own.items())
    assert held == dict(whole.named_parameters()).keys()


def test_a_rank_initializes_its_own_layers_alone(as_rank, monkeypatch):
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


def test_every_family_is_tested():
    assert {type(model_of(kind)).__name__ for kind in TYPES} == set(FAMILIES)


def test_stages_one_after_another_are_the_model(as_rank):
    in_one_item(TYPES)(lambda kind: one_after_another(kind, as_rank))()


def one_after_another(kind, as_rank):
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
    for batch in batches_of(2):
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


def test_one_call_and_it_trains():
    """Interleaved on one rank: the same blocks in each chunk's forward as in the whole model."""
    whole, cut = model_of("gpt2"), model_of("gpt2")

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
        engine.destroy()
        return told, outputs[0]

    data = batches_of(6)
    expected, _ = plain(
        whole, [data[:3], data[3:]], lambda model, batch: model(**batch, use_cache=False).loss
    )
    ((told, logits),) = run_ranks(1, rank)
    for (loss, norm), (want, of) in zip(told, expected):
        assert loss == pytest.approx(want, rel=1e-6) and norm == pytest.approx(of, rel=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(logits, whole.eval()(**batches_of(1)[0]).logits)


@on_each_rank(2, build=lambda: model_of("llama"))
def test_generating_on_stages(rank, model):
    stages = hf_zero.pipeline_stages(model, 2)
    engine = hf_zero.initialize(model=stages, optimizer=sgd, config=config(2, 0))[0]
    ids = batches_of(1)[0]["input_ids"]
    calls: tuple[Callable[..., Any], ...] = (
        engine.module.generate, model.generate, model
    )  # fmt: skip
    for call in calls:
        with pytest.raises(PipelineError, match=r"generate\(\) after pipeline_stages"):
            call(ids)
    engine.destroy()


@on_each_rank(1)
def test_models_that_are_refused(rank):
    for model in (None, "gpt2"):
        with pytest.raises(ConfigError, match=f"got a {type(model).__name__}"):
            hf_zero.pipeline_stages(model, 1)
    with pytest.raises(ConfigError, match="returned a dict"):
        hf_zero.pipeline_stages(dict, 1)
    held = model_of("llama")
    engine = hold(held, ZeroConfig(stage=3))
    with pytest.raises(ConfigError, match="made in shards"):
        hf_zero.pipeline_stages(held, 1)
    engine.destroy()


def test_stages_that_are_refused():
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
        prepare_engines(lambda *args: args, Namespace(parallelism_config=None), stages)
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


# each block is a unit, so that stages and the whole model have the same ones
ALONE = {
    "zero_optimization": {"stage": 1, "stage3_module_granularity_threshold": 0},
    "bf16": {"enabled": True},
}
LLAMA = LlamaConfig(**SMALL, **TYPES["llama"], architectures=["LlamaForCausalLM"])


def test_a_row_is_that_of_the_stage_that_needs_most(as_rank):
    kind, stages, ranks = "llama", 3, 12
    found = hf_zero.estimate(model_of(kind), ranks, config=ALONE, pipeline_parallel=stages)
    assert found.pipeline == stages and [row.stage for row in found.stages] == [0, 1]
    assert found.total_parameters == model_of(kind).num_parameters()
    held = []
    for rank in range(stages):
        as_rank(4 * rank, ranks)
        own = hf_zero.pipeline_stages(model_of(kind), stages)
        names = names_of_stages(model_of(kind), own.parts)
        set_tied(own, stages_of_tied(names))  # what initialize() finds out with the other ranks
        held.append(hf_zero.estimate(own, 4, config=ALONE))
    for row in found.stages:
        tiers = [each.at(row.stage).tiers for each in held]
        assert row.tiers.device == max(each.device for each in tiers)
        of_stage = held[row.pipeline_stage].at(row.stage)
        assert row.tiers.device == of_stage.tiers.device and row.state == of_stage.state


def free(device):
    return FreeBytes(device=parse_size(device), ram=parse_size("1TB"), host_device=False)


def test_the_stage_that_needs_most_may_not_have_most_state():
    """The head alone trains, and its state is on the host: the first stage has more parameters."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 1024}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=4)
    ).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    job = {"stage": 1, "pipeline_parallel": 2}

    def stages(**offload):
        _, plans = plans_of_stages(model, 2, **job, **offload)
        return plans, [needs(part).device_bytes for part in plans]

    (apart, away), (together, here) = stages(offload_optimizer="cpu"), stages()
    assert needs(apart[1]).ram_bytes > needs(apart[0]).ram_bytes  # of another stage
    assert away[0] > away[1] and here[0] < here[1]
    for parts, wanted, row in (
        (apart, away, hf_zero.estimate(model, 2, offload_optimizer="cpu", **job).at(1)),
        (together, here, hf_zero.estimate(model, 2, **job).at(1)),
    ):
        assert row.tiers.device == max(wanted) == wanted[row.pipeline_stage]
        assert row.tiers.ram == max(needs(part).ram_bytes for part in parts)

    def proposed(device):
        room = replace(free("1GB"), device=device)
        return propose(model, 2, room, margin=0.0, **job).fit

    found = proposed(away[0])
    assert found.chosen.plan.settings.offload_optimizer.on
    assert found.chosen.needs.device_bytes == away[0]
    assert proposed(away[0] - 1).chosen is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stage": 2}, "stage 0 or 1, not at 2"),
    ({"stage": 5}, "stage 5 is unknown"),
    ({"expert_parallel": 2}, "in a pipeline of 2 stages"),
    ({"tensor_parallel": 3}, "2 ranks cannot be 3 tensor"),
]


@in_one_item(REFUSED)
def test_what_there_is_not(row):
    given, said = row
    with pytest.raises(ConfigError, match=said):
        hf_zero.estimate(LLAMA, 4, pipeline_parallel=2, **given)
    with pytest.raises(ConfigError, match=said):
        propose(LLAMA, 4, free("1GB"), pipeline_parallel=2, **given)
    config = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError, match="stage 0 or 1, not at 3"):
        propose(LLAMA, 4, free("1GB"), config=config, pipeline_parallel=2)


def test_the_command(tmp_path):
    GPT2Config(
        n_layer=4, n_embd=32, n_head=2, vocab_size=64, architectures=["GPT2LMHeadModel"]
    ).save_pretrained(tmp_path)
    asked = ["estimate", str(tmp_path), "--ranks", "8", "--pp", "2"]
    shown = CliRunner().invoke(app, asked, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "8 ranks, 2 pipeline stages" in shown.output and "pipeline stage" in shown.output
    said = CliRunner().invoke(app, [*asked, "--tp", "2", "--json"])
    assert said.exit_code == 0, said.exception
    read = json.loads(said.output)
    assert read["pipeline"] == read["tensor"] == 2 and len(read["stages"]) == 2
    fitting = CliRunner().invoke(app, [*asked, "--fit", "--device-memory", "1GB"])
    assert "hf_zero.pipeline_stages(model, 2)" in fitting.output
    linked = CliRunner().invoke(app, [*asked, "--link", "1Gbit"])
    assert isinstance(linked.exception, ConfigError) and "leave it or --pp" in str(linked.exception)


def test_a_stage_that_does_not_fit_ends_all_stages(monkeypatch):
    monkeypatch.setattr(checking, "free_memory_for", lambda *args: free("1MB"))

    def rank(number):
        init_parallel(ParallelDims.over(2, pipeline=2))
        layers = [nn.Linear(4, 4), nn.Linear(4, 1 << 17)]
        module = PipelineModule(layers, 2, partition_method="uniform")
        with pytest.raises((DoesNotFitError, RankMismatchError)) as raised:
            hf_zero.initialize(
                model=module,
                config=config(1, 1, optimizer={"type": "AdamW", "params": {"lr": 0.1}}),
            )
        return f"{type(raised.value).__name__}: {raised.value}"

    small, large = run_ranks(2, rank)
    assert small.startswith("RankMismatchError: rank 1 could not fit its pipeline stage into its")
    assert large.startswith("DoesNotFitError: training as configured does not fit")
    assert "(bytes for the one rank of this pipeline stage, activations not counted)" in large
    assert "stage 3" not in large  # nor is it proposed

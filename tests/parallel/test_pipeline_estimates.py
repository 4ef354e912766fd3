"""Memory of pipeline stages: estimated, proposed, and checked before training."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn
from transformers import GPT2Config, LlamaConfig
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli.app import app
from hf_zero.device.free_memory import Free
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError, DoesNotFitError, RankMismatchError
from hf_zero.logging import parse_size
from hf_zero.parallel.pipeline.module import PipelineModule
from hf_zero.planning import checking
from hf_zero.planning.estimate import propose
from tests.helpers.ranks import run_ranks
from tests.parallel.causal import SMALL, TYPES, model_of
from tests.parallel.pipelines import config

# each block is a unit, so that stages and the whole model have the same ones
ALONE = {
    "zero_optimization": {"stage": 1, "stage3_module_granularity_threshold": 0},
    "bf16": {"enabled": True},
}
LLAMA = LlamaConfig(**SMALL, **TYPES["llama"], architectures=["LlamaForCausalLM"])


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_row_is_that_of_the_stage_that_needs_most(kind, stages, as_rank):
    ranks = 4 * stages
    found = hf_zero.estimate(model_of(kind), ranks, config=ALONE, pipeline_parallel=stages)
    assert found.pipeline == stages and [row.stage for row in found.stages] == [0, 1]
    assert found.total_parameters == model_of(kind).num_parameters()
    held = []
    for rank in range(stages):
        as_rank(4 * rank, ranks)
        own = hf_zero.pipeline_stages(model_of(kind), stages)
        held.append(hf_zero.estimate(own, 4, config=ALONE))
    for row in found.stages:
        states = [each.at(row.stage).state for each in held]
        assert row.state == max(states) and states[row.pipeline_stage] == row.state
        of_stage = held[row.pipeline_stage].at(row.stage)
        assert row.tiers == of_stage.tiers


def test_with_tensor_parallelism():
    alone = hf_zero.estimate(LLAMA, 8, config=ALONE, pipeline_parallel=2)
    both = hf_zero.estimate(LLAMA, 8, config=ALONE, tensor_parallel=2, pipeline_parallel=2)
    assert (both.tensor, both.pipeline, both.ranks) == (2, 2, 8)
    assert both.total_parameters == alone.total_parameters
    # matrices in halves; norms whole; padding
    assert both.at(0).state < 0.7 * alone.at(0).state
    written = {**ALONE, "tensor_parallel": {"autotp_size": 2}}
    assert hf_zero.estimate(LLAMA, 8, config=written, pipeline_parallel=2) == both


def free(device: str) -> Free:
    return Free(device=parse_size(device), ram=parse_size("1TB"), host_device=False)


def test_what_fits_a_stage():
    config_of_llama = LlamaConfig(
        hidden_size=1024,
        intermediate_size=8192,
        num_hidden_layers=6,
        num_attention_heads=8,
        vocab_size=32000,
        architectures=["LlamaForCausalLM"],
    )
    whole = propose(config_of_llama, 8, free("2.5GB"), stage=1)
    assert whole.config is not None and "offload_optimizer" in str(whole.config) and not whole.cut
    found = propose(config_of_llama, 8, free("2.5GB"), tensor_parallel=2, pipeline_parallel=2)
    assert found.config is not None
    assert found.config["zero_optimization"] == {"stage": 1}
    assert "tensor_parallel" not in found.config  # the call cuts it
    assert found.cut == "hf_zero.pipeline_stages(hf_zero.tensor_parallel(model, 2), 2)"
    found = propose(config_of_llama, 8, free("5GB"), tensor_parallel=2)
    assert found.config is not None and found.config["tensor_parallel"] == {"autotp_size": 2}
    nothing = propose(config_of_llama, 8, free("1MB"), pipeline_parallel=2)
    assert nothing.config is None and not any("stage 3" in each.name for each in nothing.fit.trials)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stage": 2}, "a pipeline of 2 stages trains at ZeRO stage 0 or 1, not at 2"),
    ({"stage": 5}, "stage 5 is unknown"),
    ({"expert_parallel": 2}, "in a pipeline of 2 stages are not built"),
    ({"tensor_parallel": 3}, "2 ranks cannot be 3 tensor x 1 sequence x 1 pipeline parallel"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_there_is_not(given, said):
    with pytest.raises(ConfigError, match=said):
        hf_zero.estimate(LLAMA, 4, pipeline_parallel=2, **given)
    with pytest.raises(ConfigError, match=said):
        propose(LLAMA, 4, free("1GB"), pipeline_parallel=2, **given)


def test_a_configuration_of_stage_3_is_not_proposed_for():
    with pytest.raises(ConfigError, match="trains at ZeRO stage 0 or 1, not at 3"):
        propose(LLAMA, 4, free("1GB"), config={"zero_optimization": {"stage": 3}},
                pipeline_parallel=2)  # fmt: skip


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
    monkeypatch.setattr(checking, "room_for", lambda *args: free("1MB"))

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

"""``hf_zero.estimate`` counts every parameter of the model as the engine would lay it out, and
refuses what it cannot price.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BertConfig, BertForMaskedLM, LlamaConfig

import hf_zero
from hf_zero.device.free_memory import FreeBytes
from hf_zero.errors import ConfigError
from hf_zero.integrations.transformers import meta_model
from hf_zero.planning.estimate import traffic
from hf_zero.planning.estimate_job import asked_for
from tests.helpers.cells import in_one_item, runs_long

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
TINY = BertConfig(vocab_size=512, intermediate_size=128, architectures=["BertForMaskedLM"], **SIZES)


def test_tied_and_frozen_parameters_are_counted_once_and_without_state() -> None:
    model = BertForMaskedLM(TINY)
    model.bert.encoder.requires_grad_(False)
    frozen = sum(p.numel() for p in model.bert.encoder.parameters())
    result = hf_zero.estimate(model, ranks=4, precision="fp32")
    assert result.total_parameters - result.trainable_parameters == frozen
    whole, sharded = result.at(0), result.at(3)
    padding = 0.06  # of a small model
    assert whole.parameters == pytest.approx(4 * result.total_parameters, rel=padding)
    assert whole.optimizer == pytest.approx(8 * result.trainable_parameters, rel=padding)
    assert sharded.parameters == pytest.approx(result.total_parameters, rel=padding)


def test_nothing_is_allocated_and_the_largest_unit_is_named() -> None:
    sizes = {"num_hidden_layers": 20, "hidden_size": 8192, "intermediate_size": 28672}
    llama = LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)
    seen = hf_zero.estimate(llama, ranks=64, precision="bf16", stage=3)
    assert seen.total_parameters > 15e9
    row = seen.at(3)
    assert row.largest_unit_name.startswith("model.layers.")
    assert row.largest_unit == 2 * (4 * 8192**2 + 3 * 8192 * 28672 + 2 * 8192)
    with pytest.raises(ConfigError, match="stage 1 was not estimated"):
        seen.at(1)


SMALL = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip


def test_a_model_without_its_head_is_named(heard: list[str], tmp_path: Path) -> None:
    for kind, named, said, remedy in (
        ("bert", [], "no architectures; counted as BertModel", 'add .*"BertForMaskedLM"'),
        ("llama", ["Mine"], r"only architectures .* \(Mine\); counted as Llama", "write .*For"),
        ("gpt2", "Mine", r"only architectures .* \(Mine\); counted as GPT2", "write .*LMHead"),
    ):
        path = tmp_path / kind / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(SMALL | {"model_type": kind, "architectures": named}))
        heard.clear()
        traffic(str(path.parent), 2)
        hf_zero.estimate(str(path.parent), 2)
        [warning] = heard
        assert re.match(rf"{path} names {said}.* without a head; {remedy}", warning)
        # what needs a loss does not begin
        match = rf"{path} names .*; \w+ has no head to compute a loss; {remedy}"
        with pytest.raises(ConfigError, match=match):
            hf_zero.simulate(str(path), 2)
        with pytest.raises(ConfigError, match=match):
            hf_zero.estimate(str(path), 2, sequence_lengths=[8])
        with pytest.raises(ConfigError, match=match):
            hf_zero.propose(str(path), 1, FreeBytes(1 << 30, 1 << 30), sequence_length=8)


def test_a_config_decides_precision_optimizer_and_replicas() -> None:
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
    }
    result = hf_zero.estimate(TINY, ranks=4, precision="fp32", config=config)
    assert (result.precision, result.optimizer) == ("bf16", "Lion")
    assert (result.moments, result.replicas) == (1, 2)
    halves = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    halved = hf_zero.estimate(TINY, ranks=1, config=halves, stage=0).at(0).gradients
    assert 2 * halved == hf_zero.estimate(TINY, ranks=1).at(0).gradients
    # replicas shard over fewer ranks
    over_two = hf_zero.estimate(TINY, ranks=2, precision="bf16")
    replicated = hf_zero.ZeroConfig(3, bf16=True, replicate_size=2)
    two_replicas = hf_zero.estimate(TINY, ranks=4, config=replicated)
    assert two_replicas.at(3).state == over_two.at(3).state


@in_one_item(
    [
        ({"model": "/no/such/model"}, "/no/such/model.*pass a model folder"),
        ({"model": {"hidden_size": 3}}, "without model_type"),
        ({"model": {"model_type": "no-such-type"}}, "no-such-type"),
        ({"model": 3}, "int 3 describes no model"),
        ({"ranks": 0}, "ranks = 0"),
        ({"ranks": 10**400}, r"ranks = 1000\d* is not a number of ranks; .* to 1,048,576"),
        ({"ranks": 3, "config": {"stage": 3, "replicate_size": 2}}, "does not divide 3 ranks"),
        ({"precision": "int8"}, "precision 'int8' is unknown"),
        ({"precision": [1]}, r"precision \[1\] is unknown"),
        ({"stage": 4}, "stage 4 is unknown"),
        ({"stage": [1]}, r"stage \[1\] is unknown"),
        ({"pipeline_parallel": "2"}, "pipeline_parallel = '2'"),
        ({"pipeline_parallel": None}, "pipeline_parallel = None"),
        ({"sequence_lengths": None}, "length of None"),
        ({"sequence_lengths": "8"}, "length of '8'"),
        ({"sequence_lengths": [8, 0]}, "length of 0"),
        ({"optimizer": "Shampoo"}, "Shampoo"),
        ({"config": "/no/such/file.yaml"}, "/no/such/file.yaml"),
    ]
)
def test_bad_input_is_named(case: tuple[dict[str, Any], str]) -> None:
    changes, says = case
    with pytest.raises(hf_zero.HfZeroError, match=says):
        hf_zero.estimate(**{"model": TINY, "ranks": 2, **changes})


def test_lengths_may_be_of_numpy() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    head = ["LlamaForCausalLM"]
    config = LlamaConfig(vocab_size=16, num_hidden_layers=2, architectures=head, **sizes)
    by_list, by_number, by_array = (
        hf_zero.estimate(config, 2, sequence_lengths=lengths).lengths
        for lengths in ([8, 16], np.array(8), np.array([8, 16]))
    )
    assert by_list == by_array and by_list[:1] == by_number


def test_bad_input_of_traffic_and_of_proposals_is_named() -> None:
    with pytest.raises(ConfigError, match="stage 4 is unknown"):
        traffic(TINY, 2, stage=4)
    with pytest.raises(ConfigError, match="pipeline_parallel = 2"):
        traffic(TINY, 2, pipeline_parallel=2)
    with pytest.raises(hf_zero.HfZeroError, match="Shampoo"):
        traffic(TINY, 2, optimizer="Shampoo")
    with pytest.raises(ConfigError, match="free = None"):
        hf_zero.propose(TINY, 2, None)
    free = FreeBytes(1 << 30, 1 << 30)
    for margin in ("a", -1, 2, 1.0, float("nan"), [0.1]):
        with pytest.raises(ConfigError, match=re.escape(f"margin = {margin!r}")):
            hf_zero.propose(TINY, 2, free, margin=margin)
    for length in ("8", 0):
        with pytest.raises(ConfigError, match=f"length of {length!r}"):
            hf_zero.propose(TINY, 2, free, sequence_length=length)


ABSURD = {
    "num_hidden_layers": (10**7, 10**400, "a", None, [2]),
    "hidden_size": (0, -4, 10**19, "64", 65),
    "vocab_size": (10**18,),
    "num_attention_heads": (0,),
    "model_type": ("\u202e", [1]),
    "architectures": ([1], ["AutoModel"], ["pipeline"]),
    "rope_parameters": (3, {"rope_type": "none"}),
    "quantization_config": (3,),
    "layer_types": (["none"],),
    "hidden_act": ("none",),
    "text_config": (3,),
}


def test_a_configuration_that_holds_anything_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    monkeypatch.setattr(meta_model, "MAX_MODULES", 200)
    for key, values in {**ABSURD, "num_hidden_layers": (50, *ABSURD["num_hidden_layers"])}.items():
        for value in values:
            (tmp_path / "config.json").write_text(json.dumps({**sizes, key: value}))
            for model in (str(tmp_path), {**sizes, key: value}):
                with pytest.raises(ConfigError, match=r"no model|not a model folder"):
                    hf_zero.estimate(model, ranks=2)


PUBLISHED = {  # the parameters that the models' pages give
    "openai-community/gpt2": 124_439_808,
    "google-bert/bert-base-uncased": 109_514_298,
    "google-t5/t5-base": 222_903_552,
    "google/gemma-2-2b": 2_614_341_888,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "meta-llama/Llama-2-7b": 6_738_415_616,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "openai/gpt-oss-20b": 20_914_757_184,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
}


def test_models_that_people_train_most_are_known_without_the_hub(
    heard: list[str], pytestconfig: pytest.Config
) -> None:
    chosen = PUBLISHED if runs_long(pytestconfig) else ["openai-community/gpt2", "Qwen/Qwen3-8B"]
    for name in chosen:
        assert hf_zero.estimate(name, 1, stage=0).total_parameters == PUBLISHED[name], name
    tuned = hf_zero.estimate("qwen2.5-0.5B-Instruct", 1, stage=0)
    assert tuned.total_parameters == PUBLISHED["Qwen/Qwen2.5-0.5B"]
    assert any("sizes that hf-zero knows" in line for line in heard)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        hf_zero.estimate("Qwen/Qwen2.5-0.6B", 1)


NONE = {"device": "none"}


def test_a_proposal_keeps_what_the_configuration_says() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "fp16": {"enabled": True},
        "optimizer": {"type": "Lion", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_param": NONE},
    }
    found = hf_zero.propose(TINY, 2, FreeBytes(1 << 30, 1 << 30), config=config)
    assert found.config == {**config, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    only = hf_zero.propose(TINY, 2, FreeBytes(1 << 30, 1 << 30), stage=3, config=config)
    assert only.config is not None and only.config["zero_optimization"]["stage"] == 3


def test_a_momentum_in_one_bit_is_proposed_at_the_stage_of_its_runs() -> None:
    free = FreeBytes(1 << 30, 1 << 30)
    for stage in (1, 2):
        config = {
            "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 10}},
            "zero_optimization": {"stage": stage},
        }
        proposal = hf_zero.propose(TINY, 2, free, config=config)
        assert proposal.config is not None and proposal.config["zero_optimization"]["stage"] == 1
        at_one = hf_zero.estimate(TINY, 2, stage=1, config=config).at(1)
        assert [trial.needs.device_bytes for trial in proposal.fit.trials] == [at_one.tiers.device]


@in_one_item([(8, 1), (16, 2)])
def test_ranks_that_share_layers_share_batches(case: tuple[int, int]) -> None:
    batch, accumulation = case
    config = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": 2}
    for keys, size in (({}, 2), ({"tensor_parallel": {"autotp_size": 2}}, None)):
        asked = asked_for(8, "bf16", "AdamW", config={**config, **keys}, tensor_parallel=size)
        assert asked.settings.gradient_accumulation_steps == accumulation
        assert (asked.dims.tensor, asked.settings.train_batch_size) == (2, batch)
    in_stages = {"tensor_parallel": 2, "pipeline_parallel": 2}
    assert asked_for(16, "bf16", "AdamW", config=config, **in_stages).settings == asked.settings

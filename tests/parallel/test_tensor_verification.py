"""``tensor_parallel.verify``: silent where a plan fits the model, else told what differs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, DoesNotFitError, VerificationError
from hf_zero.parallel.tensor import verification
from hf_zero.parallel.tensor.layers import Rowwise
from hf_zero.zero.layout.sharding import Sharding, set_sharding
from tests.helpers.causal_zoo import batch_of, model_types, tiny
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.tensor_parallel import gpt2, llama, mixtral, qwen3
from tests.helpers.training import plain_sgd
from tests.parallel.test_tensor_placements import REFUSED

TP: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2, "verify": True}}


def _train(model_of: Any, prepare: Any = lambda model: None, steps: int = 2, **config: Any) -> Any:
    """Steps on two ranks that share a model; what the comparisons said."""
    models = [seeded(model_of) for _ in range(2)]
    said: list[str] = []
    written = config_of(config.pop("stage", 1), **{**TP, **config})

    def run(rank: int) -> None:
        model: Any = models[rank]
        engine = start(model, plain_sgd(model), written)
        prepare(model)
        for step in range(steps):
            engine.backward(engine(**batch_of(seed=step)).loss)
            engine.step()
        engine.destroy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "log_rank0", said.append)
        run_ranks(2, run)
    return said


@pytest.mark.parametrize("make", (llama, qwen3, gpt2), ids=("llama", "qwen3", "gpt2"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_model_that_is_right(make, stage):
    said = _train(make, stage=stage)
    assert len(said) == 2  # one of each rank, once
    assert "are those of the whole model, on 2 ranks" in said[0]


@pytest.mark.parametrize(
    "more",
    (
        {"bf16": {"enabled": True}},
        {"gradient_accumulation_steps": 2},
        {"activation_checkpointing": {"blocks": True}},
    ),
    ids=("bf16", "accumulation", "recomputed"),
)
def test_with_other_sections(more):
    assert len(_train(llama, stage=3, **more)) == 2


def _loses_a_sum(model: Any) -> None:
    for layer in model.model.layers:
        set_sharding(layer.self_attn.q_norm.weight, Sharding())


def _doubles(model: Any) -> None:
    down = model.model.layers[1].mlp.down_proj
    assert isinstance(down, Rowwise)
    down.register_forward_hook(lambda module, args, output: 2 * output)


def _doubles_a_gradient(model: Any) -> None:
    model.model.norm.weight.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize(
    ("prepare", "words"),
    (
        (_loses_a_sum, r"gradients differ .*q_norm.weight \(off by"),
        (_doubles, r"outputs differ .*output 0"),
        (_doubles_a_gradient, r"1 of \d+ gradients differ .*model.norm.weight"),
    ),
)
def test_what_differs(prepare, words):
    with pytest.raises(RankFailed, match=words) as raised:
        _train(qwen3, prepare)
    assert isinstance(raised.value.__cause__, VerificationError)


@pytest.mark.parametrize(
    ("make", "more", "words"),
    (
        (lambda: gpt2(dropout=0.1), {}, r"the model draws some \(dropout\)"),
        (llama, {"sequence_parallel_size": 2}, r"verify with sequence_parallel_size = 1"),
        (mixtral, {"expert_parallel": {"enabled": True, "autoep_size": 2}}, r"autoep_size = 1"),
    ),
    ids=("dropout", "sequence", "expert"),
)
def test_refused(make, more, words):
    models = [seeded(make) for _ in range(4)]

    def run(rank):
        start(models[rank], plain_sgd(models[rank]), config_of(1, **TP, **more))

    with pytest.raises(RankFailed, match=words) as raised:
        run_ranks(4, run)
    assert isinstance(raised.value.__cause__, ConfigError)


def test_a_model_that_was_cut_before():
    models = [seeded(llama) for _ in range(2)]

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        start(model, plain_sgd(model), config_of(1, **TP))

    with pytest.raises(RankFailed, match=r"pass verify=True to the call") as raised:
        run_ranks(2, run)
    assert isinstance(raised.value.__cause__, ConfigError)


def test_adapters_that_came_between():
    from peft import LoraConfig, get_peft_model

    models = [seeded(llama) for _ in range(2)]

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2, verify=True)
        adapted: nn.Module = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        adapted.train()(**batch_of())

    with pytest.raises(RankFailed, match=r"add adapters before the model is cut") as raised:
        run_ranks(2, run)
    assert isinstance(raised.value.__cause__, ConfigError)


def test_a_whole_model_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(verification, "free_bytes", lambda device: 1000)
    with pytest.raises(RankFailed, match=r"verify a smaller model") as raised:
        _train(llama)
    assert isinstance(raised.value.__cause__, DoesNotFitError)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(model_types(with_plan=True)) - set(REFUSED)))
def test_every_model_type_that_has_a_plan(name):
    assert len(_train(lambda: tiny(name), steps=1, stage=2)) == 2

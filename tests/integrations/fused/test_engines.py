"""Fused kernels that the configuration asks for: engines of every stage on ranks as threads,
against one plain process.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.activations.compile import to_be_compiled
from hf_zero.errors import KernelError
from hf_zero.integrations.fused import report
from hf_zero.ops.packed_linear import adjacent
from hf_zero.zero.layout.wrap import PACKED
from tests.helpers import oracle
from tests.helpers.engines import engine_opener, start, train_on_threads
from tests.helpers.training import At, Driver, Job, Plan, plain_sgd
from tests.integrations.fused.animals import BLOCKS, build, inputs

PLAN = Plan(ranks=2, steps=2)


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")


class Fused(Job):
    """A model of the zoo, its own loss: the mean over the tokens of one micro-batch."""

    def __init__(self, name: str, seen: list[int] | None = None) -> None:
        self.name, self.seen = name, seen

    def build(self) -> nn.Module:
        return build(self.name)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return plain_sgd(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        if self.seen is not None:
            self.seen.append(len(report(net.module).replaced))
        made: torch.Tensor = net(**inputs(self.name, seed=10 * at.step + at.rank)).loss
        return made


class Read(Fused):
    """A loss of its own, of logits that the model was asked for together with its loss."""

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        given = inputs(self.name, seed=10 * at.step + at.rank)
        outputs = net(**given)
        return outputs.loss + nn.functional.cross_entropy(
            outputs.logits.float().transpose(1, 2), given["labels"], label_smoothing=0.1
        )


@pytest.mark.parametrize("name, stage", [("llama", 2), ("llama", 3), ("bert", 3)])
def test_logits_that_are_read_train_as_the_models(name: str, stage: int) -> None:
    trace = train_on_threads(Read(name), PLAN, engine_opener(stage, kernels=["loss"]))
    oracle.compare(trace, oracle.run(Read(name), PLAN), weight_floor=oracle.ROUNDING)


@pytest.mark.turns
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_every_stage_trains_as_one_plain_process(name: str, stage: int) -> None:
    seen: list[int] = []
    trace = train_on_threads(
        Fused(name, seen), PLAN, engine_opener(stage, kernels=[*BLOCKS, "loss"])
    )
    assert min(seen) > 8
    oracle.compare(trace, oracle.run(Fused(name), PLAN), weight_floor=oracle.ROUNDING)


@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        "qwen3",
        "gemma2",
        "phi",
        "phi3",
        "mixtral",
        "roberta",
        "deberta-v2",
        "distilbert",
        "t5",
        "vit",
    ],
)
def test_every_family_trains_at_stage_3(name: str) -> None:
    trace = train_on_threads(Fused(name), PLAN, engine_opener(3, kernels=[*BLOCKS, "loss"]))
    oracle.compare(trace, oracle.run(Fused(name), PLAN), weight_floor=oracle.ROUNDING)


def started(**more: Any) -> Any:
    model = build(more.pop("name", "bert"))
    return start(model, plain_sgd(model), {"train_micro_batch_size_per_gpu": 3, **more})


@pytest.mark.parametrize(
    ("name", "outside"),
    [
        ("bert", {"bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"}),
        ("llama", {"model.norm"}),
    ],
)
def test_auto_leaves_to_compiled_blocks_what_inductor_fuses(
    name: str, outside: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.import_module("hf_zero.initialize"), "kind_for_auto", lambda device: "cuda"
    )
    compiled = {"blocks": True, "backend": "aot_eager"}
    engine = started(name=name, kernels="auto", compile=compiled)
    lines = report(engine.module).replaced
    blocks = [
        name
        for name, module in engine.module.named_modules()
        if module in {*engine.patches.compiled._blocks}
    ]
    assert len(blocks) >= 2
    inside = {line.kernels for line in lines if line.where.startswith(tuple(blocks))}
    assert inside == {("qkv",)}
    assert {line.where for line in lines if line.kernels == ("norms",)} == outside
    engine.destroy()
    # who names them has them everywhere
    engine = started(name=name, kernels=["norms", "residual"], compile=compiled)
    assert {line.kernels for line in report(engine.module).replaced} == {("norms",), ("residual",)}
    engine.destroy()
    trace = train_on_threads(Fused(name), PLAN, engine_opener(3, kernels="auto", compile=compiled))
    oracle.compare(trace, oracle.run(Fused(name), PLAN), weight_floor=oracle.ROUNDING)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "t5", "mixtral", "vit"])
def test_what_will_be_compiled_is_known_before_the_engine_is_made(name: str) -> None:
    model = build(name)
    expected = to_be_compiled(model)
    engine = start(model, plain_sgd(model), {"train_micro_batch_size_per_gpu": 3})
    assert expected and engine.patches.compiled._blocks == expected
    engine.destroy()


def test_auto_is_settled_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(kernels="auto")
    row = next(row for row in engine.config.explain() if row.key == "kernels")
    assert row.value == ("loss", "optimizer")
    assert row.source == "computed: config dict: kernels is auto, on cpu"
    assert {line.kernels for line in report(engine.module).lines} == {("loss",)}
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_lays_q_k_and_v_side_by_side(stage: int) -> None:
    """BERT's have biases between them; with the kernels named each kind is one matrix, and one
    bias.
    """
    parts = [
        [
            f"bert.encoder.layer.0.attention.self.{layer}.{part}"
            for layer in ("query", "key", "value")
        ]
        for part in ("weight", "bias")
    ]
    for kernels, beside in (("off", False), (["qkv"], True)):
        engine = started(kernels=kernels, zero_optimization={"stage": stage})
        parameters = dict(engine.module.named_parameters())
        with hf_zero.GatheredParameters([parameters[name] for names in parts for name in names]):
            assert [adjacent([parameters[name].data for name in names]) for names in parts] == [
                beside,
                beside,
            ]
        engine.destroy()
        hf_zero.restore(engine.module)
        assert not any(PACKED in module.__dict__ for module in engine.module.modules())


def test_without_the_key_nothing_is_replaced() -> None:
    engine = started()
    assert not report(engine.module).lines
    engine.destroy()


def test_a_model_outlives_its_engine() -> None:
    engine = started(kernels=["norms"])
    model = engine.module
    engine.destroy()
    assert report(model).replaced
    second = start(
        model, plain_sgd(model), {"train_micro_batch_size_per_gpu": 3, "kernels": ["activations"]}
    )
    assert {line.kernels for line in report(model).lines} == {("activations",)}
    second.destroy()
    hf_zero.restore(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_pre_layer_norm_by_the_configuration() -> None:
    engine = started(pre_layer_norm=True)
    assert {line.kernels for line in report(engine.module).lines} == {("pre_layer_norm",)}
    engine.destroy()
    with pytest.raises(
        KernelError,
        match="pre_layer_norm is for BERT, RoBERTa and ELECTRA, and LlamaForCausalLM has no",
    ):
        started(name="llama", pre_layer_norm=True)


@pytest.mark.parametrize("section", [{"mode": "dense"}, {"enabled": False, "mode": "fixed"}])
def test_dense_attention_replaces_nothing(section: dict[str, Any]) -> None:
    engine = started(sparse_attention=section)
    assert not report(engine.module).lines
    engine.destroy()

"""Fused kernels against the untouched model, family by family: alone, and in engines of every stage
on ranks as threads.
"""

from __future__ import annotations

import importlib
from typing import Any

import peft
import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.activations.compile import to_be_compiled
from hf_zero.errors import KernelError
from hf_zero.integrations.fused import report
from hf_zero.ops import philox
from hf_zero.ops.packed_linear import adjacent
from hf_zero.zero.layout.wrap import PACKED
from tests.helpers import oracle
from tests.helpers.cells import fast, in_one_item
from tests.helpers.engines import engine_opener, start, train_on_threads
from tests.helpers.training import At, Driver, Job, Plan, plain_sgd
from tests.integrations.fused.animals import (
    ANIMALS,
    BLOCKS,
    FORMER_NAMES,
    KINDS,
    build,
    error,
    inputs,
    step,
)
from tests.integrations.fused.test_restoring import attributes, same_step

ALL = (*BLOCKS, "loss")


def assert_equal(
    model: nn.Module, right: nn.Module, batch: dict[str, torch.Tensor], bound: float = 1e-5
) -> None:
    (loss, grads), (right_loss, right_grads) = step(model, batch), step(right, batch)
    torch.testing.assert_close(loss, right_loss, rtol=bound, atol=0)
    worst = max(error(grads, right_grads).items(), key=lambda item: item[1])
    assert worst[1] < bound, worst


@in_one_item(KINDS, long=[name for name in ANIMALS if name not in KINDS])
def test_a_family_is_replaced_trains_and_is_restored(name: str) -> None:
    """Restored, it is bit-equal and has nothing left."""
    model, right, batch = build(name), build(name), inputs(name)
    parameters = dict(model.named_parameters())
    hf_zero.optimize(model, BLOCKS)
    found: dict[str, set[str]] = {}
    for line in report(model).replaced:
        found.setdefault(FORMER_NAMES.get(line.what, line.what), set()).update(line.kernels)
    wanted = {kind: set(kernels) for kind, kernels in ANIMALS[name].replaced.items()}
    assert found == wanted, str(report(model))
    assert_equal(model, right, batch)
    hf_zero.optimize(model, ALL)  # in place of the first
    assert list(model.state_dict()) == list(right.state_dict())
    assert all(model.get_parameter(key) is each for key, each in parameters.items())
    with torch.no_grad():
        out, expected = model.eval()(**batch).logits, right.eval()(**batch).logits
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    hf_zero.restore(model.train())
    assert attributes(model) == attributes(right) and not report(model).lines
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in model.parameters())
    assert same_step(model, right.train(), name)


class PhiloxDropout(nn.Module):
    """Dropout with the mask of the fused kernels, in plain torch."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seed = philox.draw_seed(x.device)
        kept = philox.kept_rows(seed, x.numel() // x.shape[-1], x.shape[-1], self.p).view_as(x)
        return torch.where(kept, x / (1 - self.p), 0.0)


@in_one_item(["llama", "phi3", "bert", "t5", "vit"])
def test_fused_dropout_is_dropout(name: str) -> None:
    """Without "residual" every mask is still torch's, drawn in the same order."""
    batch, right = inputs(name), build(name, dropout=True)
    without = hf_zero.optimize(build(name, dropout=True), [k for k in BLOCKS if k != "residual"])
    assert_equal(without, right, batch)
    model = hf_zero.optimize(build(name, dropout=True), BLOCKS)
    for line in report(model).replaced:
        if "residual" in line.kernels:
            other: Any = right.get_submodule(line.where)
            other.dropout = PhiloxDropout(other.dropout.p)
    assert_equal(model, right, batch)


@in_one_item([("mixtral", False), ("bert", True), ("t5", False), ("vit", True)])
def test_checkpointing_replays_the_same_dropout(case: tuple[str, bool]) -> None:
    name, reentrant = case
    models = [hf_zero.optimize(build(name, dropout=True), BLOCKS) for _ in range(2)]
    models[1].gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant and name != "vit":
        for model in models:
            model.enable_input_require_grads()
    assert_equal(models[1], models[0], inputs(name))


def with_adapters(model: Any) -> Any:
    torch.manual_seed(3)
    settings = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, settings)


@in_one_item([("llama", False), ("phi", True), ("phi3", False), ("bert", True), ("t5", False)])
def test_adapters_are_called(case: tuple[str, bool]) -> None:
    name, adapters_first = case
    if adapters_first:
        model = hf_zero.optimize(with_adapters(build(name)), BLOCKS)
        assert report(model).replaced
    else:
        model = with_adapters(hf_zero.optimize(build(name), BLOCKS))
    assert_equal(model, with_adapters(build(name)), inputs(name))


def with_adalora(model: nn.Module) -> nn.Module:
    """Adapters that write into the output of the layer they are around."""
    torch.manual_seed(4)
    settings = peft.AdaLoraConfig(
        total_step=9, init_r=2, target_r=2, target_modules=["q_proj", "k_proj"]
    )
    return peft.get_peft_model(model, settings)


def test_layers_of_one_product_are_layers() -> None:
    """A weight that changes between the calls of two counts, and an output may be written into."""
    model, right = hf_zero.optimize(build("llama"), ["qkv"]), build("llama")
    x, outputs = torch.randn(1, 5, 32), []
    for each in (model, right):
        attention = each.model.layers[0].self_attn
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            with torch.no_grad():
                layer.weight.mul_(2.0)
            outputs.append(layer(x))
    for ours, plain in zip(outputs[:3], outputs[3:], strict=True):
        torch.testing.assert_close(ours, plain)
    fused = with_adalora(hf_zero.optimize(build("llama"), ["qkv"]))
    assert_equal(fused, with_adalora(build("llama")), inputs("llama"))


@pytest.mark.parametrize("name", fast(["bert", "llama", "t5"], lambda name: name != "t5"))
def test_a_compiled_block_is_one_graph(name: str) -> None:
    """A forward asks of its modules nothing that Dynamo stops at."""
    torch._dynamo.reset()
    model, blocks = hf_zero.optimize(build(name), BLOCKS), 0
    for module in model.modules():
        if any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__):
            module.forward = torch.compile(module.forward, backend="eager", fullgraph=True)
            blocks += 1
    assert blocks >= 2
    assert_equal(model, build(name), inputs(name))


def test_under_autocast_the_models_own_code_runs_and_generation_is_the_models() -> None:
    model, right = hf_zero.optimize(build("llama"), ALL), build("llama")
    ids = inputs("llama")["input_ids"][1:]
    wanted = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    made = [each.eval().generate(ids, **wanted) for each in (model, right)]
    assert torch.equal(*made)
    hf_zero.optimize(model.train(), BLOCKS)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_step(model, right.train(), "llama")


PLAN = Plan(ranks=2, steps=2)


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


def assert_trains(job: Fused, plain: Fused, stage: int, **keys: Any) -> None:
    trace = train_on_threads(job, PLAN, engine_opener(stage, **keys))
    oracle.compare(trace, oracle.run(plain, PLAN), weight_floor=oracle.ROUNDING)


STAGES = [("llama", 0), ("gpt2", 2), ("bert", 3), ("t5", 3), ("mixtral", 3), ("vit", 3)]


@pytest.mark.parametrize("name, stage", fast(STAGES, lambda name, _: name in ("llama", "t5")))
def test_a_family_trains_as_one_plain_process(name: str, stage: int) -> None:
    seen: list[int] = []
    assert_trains(Fused(name, seen), Fused(name), stage, kernels=[*BLOCKS, "loss"])
    assert min(seen) > 3


def started(**more: Any) -> Any:
    model = build(more.pop("name", "bert"))
    return start(model, plain_sgd(model), {"train_micro_batch_size_per_gpu": 3, **more})


def test_auto_leaves_to_compiled_blocks_what_inductor_fuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which blocks will be compiled is known before the engine is made."""
    made = importlib.import_module("hf_zero.setup.plan")
    monkeypatch.setattr(made, "kind_for_auto", lambda device: "cuda")
    for name, outside in (
        ("llama", {"model.norm"}),
        ("bert", {"bert.embeddings.LayerNorm"}),
    ):
        compiled = {"blocks": True, "backend": "aot_eager"}
        plain = build(name)
        known = {*to_be_compiled(plain)}
        engine = started(name=name, kernels="auto", compile=compiled)
        inductors = {*engine.feature_set.by_name["activations"].compiled._blocks}
        blocks = [each for each, module in engine.module.named_modules() if module in inductors]
        assert blocks == [each for each, module in plain.named_modules() if module in known]
        assert len(blocks) >= 2
        lines = report(engine.module).replaced
        inside = {line.kernels for line in lines if line.where.startswith(tuple(blocks))}
        assert inside == {("qkv",)}
        assert {line.where for line in lines if line.kernels == ("norms",)} == outside
        engine.destroy()
    # who names them has them everywhere
    engine = started(kernels=["norms", "residual"], compile=compiled)
    assert {line.kernels for line in report(engine.module).replaced} == {("norms",), ("residual",)}
    engine.destroy()
    assert_trains(Fused("llama"), Fused("llama"), 3, kernels="auto", compile=compiled)


def test_what_a_configuration_replaces() -> None:
    dense = [{"mode": "dense"}, {"enabled": False, "mode": "fixed"}]
    for keys in ({}, *({"sparse_attention": section} for section in dense)):
        engine = started(**keys)
        assert not report(engine.module).lines, keys
        engine.destroy()
    engine = started(kernels="auto")
    row = next(row for row in engine.config.explain() if row.key == "kernels")
    assert row.value == ("loss", "optimizer")
    assert row.source == "computed: config dict: kernels is auto, on cpu"
    assert {line.kernels for line in report(engine.module).lines} == {("loss",)}
    engine.destroy()
    engine = started(pre_layer_norm=True)
    assert {line.kernels for line in report(engine.module).lines} == {("pre_layer_norm",)}
    engine.destroy()
    with pytest.raises(KernelError, match="LlamaDecoderLayer"):
        started(name="llama", pre_layer_norm=True)


@in_one_item([0, 3])
def test_an_engine_lays_q_k_and_v_side_by_side(stage: int) -> None:
    """BERT's have biases between them."""
    attention = "bert.encoder.layer.0.attention.self"
    layers = ("query", "key", "value")
    parts = [[f"{attention}.{layer}.{part}" for layer in layers] for part in ("weight", "bias")]
    for kernels, beside in (("off", False), (["qkv"], True)):
        engine = started(kernels=kernels, zero_optimization={"stage": stage})
        found = [[engine.module.get_parameter(name) for name in names] for names in parts]
        with hf_zero.GatheredParameters([each for kind in found for each in kind]):
            assert [adjacent([each.data for each in kind]) for kind in found] == [beside] * 2
        engine.destroy()
        hf_zero.restore(engine.module)
        assert not any(PACKED in module.__dict__ for module in engine.module.modules())

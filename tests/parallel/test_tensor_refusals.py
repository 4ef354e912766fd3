"""Refusals under tensor parallelism; heads whose weight TRL reads; ``tensor_parallel.verify``; the
whole parameters that see parts of activations.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from trl.trainer.utils import add_fused_lm_head

import hf_zero
from hf_zero.distributed import init, process_group
from hf_zero.errors import (
    ConfigError,
    DoesNotFitError,
    NotBuiltError,
    PartitionError,
    VerificationError,
)
from hf_zero.parallel.tensor import cuts_of, styles, verification
from hf_zero.parallel.tensor.layers import Rowwise
from hf_zero.zero.layout.sharding import Sharding, set_sharding, sharding_of
from tests.helpers.caches import cache_argument
from tests.helpers.causal_zoo import batch_of, by_model_type, tiny
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.tensor_parallel import (
    VOCAB,
    boxes_of,
    gpt2,
    llama,
    mixtral,
    opt,
    put_together,
    qwen3,
)
from tests.helpers.training import plain_sgd
from tests.parallel.expert_cases import keys
from tests.parallel.test_tensor_layers import loss_and_gradients

TP: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}
VERIFIED_TP: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2, "verify": True}}


def cut(model, **more):
    return hf_zero.tensor_parallel(model, 2, **more)


def planned(plan):
    return lambda model: cut(model, plan=plan)


def engine_of(stage=1, **section):
    return lambda model: start(model, plain_sgd(model), config_of(stage, **section))


def adapted(model, **settings):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))


def quantized():
    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.int8), requires_grad=False)
    return model


def embedding_with(**options):
    def make():
        model = llama()
        model.set_input_embeddings(nn.Embedding(VOCAB, 32, **options))
        return model

    return make


def called_with_a_cache(heads):
    def call(model):
        cache: Any = transformers.DynamicCache()
        for layer in range(2):
            cache.update(torch.zeros(2, heads, 3, 8), torch.zeros(2, heads, 3, 8), layer)
        name = cache_argument(type(model).forward)
        cut(model)(**batch_of(), **{name: cache if heads else ((),)})

    return call


def shared_sequences(model):
    former = hf_zero.sequence_parallel(2)
    start(cut(model), plain_sgd(model), config_of(1), mpu=former)


UP_WHOLE = {"model.layers.*.mlp.up_proj": None, "model.layers.*.mlp.gate_proj": None,
            "model.layers.*.mlp.down_proj": None}  # fmt: skip
BITS = {"enabled": True, "quantize_bits": {"start_bits": 8, "target_bits": 8}}
PER_RANK = {"enabled": True, "per_rank": True}
OF_EXPERTS = {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}
TOKENS = {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}
OF_PARTS = {"target_modules": ["c_proj"], "fan_in_fan_out": True}
# ranks, model, what is called with it, words of the message
CALLS: dict[str, tuple[int, Any, Any, str]] = {
    "heads": (2, lambda: llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48), cut,
              "k_proj has 3 attention heads"),
    "vocabulary": (2, lambda: llama(vocab_size=67), cut, "pad_to_multiple_of=2"),
    "a style of no layer": (2, llama, planned({"model.layers.*.input_layernorm": "colwise"}),
                            "input_layernorm"),
    "norms of whole rows": (2, embedding_with(max_norm=0.5), cut, 
                            "Embedding(68, 32, max_norm"),
    "counts of all tokens": (2, embedding_with(scale_grad_by_freq=True), cut, "scale_grad_by_freq"),
    "sparse gradients": (2, embedding_with(sparse=True), cut, "sparse=True"),
    "another plan": (2, llama, lambda model: cut(cut(cut(model)), plan={"lm_head": None}),
                     "'lm_head'"),
    "less than a plan": (2, llama, lambda model: cut(cut(model, plan=UP_WHOLE), plan={}),
                         "mlp.down_proj'"),
    "a misspelled name": (2, llama, planned({"model.layers.*.mlp.up_projection": "colwise"}),
                          "did you mean 'model.layers.*.mlp.up_proj'"),
    "an unknown name": (2, gpt2, planned({"c_atn": None}), "c_atn"),
    "tied": (2, lambda: llama(tied=True), planned({"lm_head": None}), "are one parameter"),
    "no plan": (2, lambda: nn.Linear(4, 4), cut, "no tensor-parallel plan"),
    "quantized": (2, quantized, cut, "quantized"),
    "a class": (1, llama, lambda model: cut(transformers.LlamaForCausalLM), "LlamaForCausalLM"),
    "ranks": (1, llama, cut, "does not divide the 1 rank"),
    "two sizes": (2, llama, lambda model: engine_of(tensor_parallel={"autotp_size": 1})(cut(model)),
                  "among 2 ranks already"),
    "heads of a cache": (2, llama, called_with_a_cache(3), "has 3 heads"),
    "a latent cache": (2, lambda: tiny("deepseek_v2"), called_with_a_cache(4), "prefix tuning"),
    "a cache that is a tuple": (2, llama, called_with_a_cache(0), "is a tuple, of which"),
    "sequences were shared before": (4, llama, shared_sequences, "after hf_zero.tensor_parallel"),
    "few bits": (2, mixtral, engine_of(3, quantize_training=BITS, **TP), "scales of rounded"),
    "quantization-aware": (
        2, llama, engine_of(quantization_aware_training={"config": "int8_weight"}, **TP),
        "tensor-parallel rank"),
    "float8": (2, llama, engine_of(float8_training={"recipe": "tensorwise"}, **TP),
               "tensor-parallel rank"),
    "blocks dropped by rank": (2, mixtral, engine_of(progressive_layer_drop=PER_RANK, **TP),
                               "compute each block together"),
    "adapters of experts": (
        2, mixtral, lambda model: engine_of(**TP)(adapted(model, **OF_EXPERTS)),
        "target_parameters"),
    "adapters of experts that were spread": (
        2, mixtral,
        lambda model: engine_of()(adapted(hf_zero.expert_parallel(model, 2), **OF_EXPERTS)),
        "target_parameters"),
    "tokens that train": (2, llama, lambda model: cut(adapted(model, **TOKENS)),
                          "embed_tokens has an adapter"),
    "DoRA": (2, gpt2, lambda model: cut(adapted(model, use_dora=True, **OF_PARTS)), "DoRA"),
    "adapters of parts": (2, gpt2, lambda model: cut(adapted(cut(model), **OF_PARTS)),
                          "this rank's part"),
    "verified dropout": (2, lambda: gpt2(dropout=0.1), engine_of(**VERIFIED_TP), "dropout"),
    "verified sequences": (4, llama, engine_of(sequence_parallel_size=2, **VERIFIED_TP),
                           "sequence_parallel_size = 1"),
    "verified experts": (4, mixtral, engine_of(**keys(2), **VERIFIED_TP), "autoep_size = 1"),
    "verified after the cut": (2, llama, lambda model: engine_of(**VERIFIED_TP)(cut(model)),
                               "verify=True"),
    "verified with later adapters": (
        2, llama,
        lambda model: adapted(cut(model, verify=True), target_modules=["q_proj"]).train()(
            **batch_of()
        ),
        "before the model is cut"),
}  # fmt: skip


@in_one_item(CALLS)
def test_refused(case):
    ranks, make, call, words = CALLS[case]
    models = [seeded(make) for _ in range(ranks)]
    with pytest.raises(RankFailed) as raised:
        run_ranks(ranks, lambda rank: call(models[rank]))
    assert isinstance(raised.value.__cause__, ConfigError) and words in str(raised.value.__cause__)


def test_a_plan_that_is_repeated():
    models = [seeded(llama) for _ in range(2)]

    def run(rank):
        model: Any = cut(models[rank], plan=UP_WHOLE)
        for plan in (None, dict(UP_WHOLE)):
            assert cut(model, plan=plan).model.layers[0].mlp.up_proj.weight.shape == (48, 32)

    run_ranks(2, run)


def test_the_ranks_that_a_launcher_has_started_are_counted(monkeypatch):
    """Without a process group, as in a plain loop under torchrun."""
    ranks = [1]
    monkeypatch.setattr(process_group, "get_world_size", lambda: ranks[-1])
    monkeypatch.setattr(init, "init_distributed", lambda: ranks.append(2))
    with pytest.raises(ConfigError, match="no tensor-parallel plan"):
        hf_zero.tensor_parallel(nn.Linear(4, 4), 2)


def test_a_style_that_is_not_built():
    models = [seeded(llama) for _ in range(2)]
    call = planned({"model.layers.*.mlp.up_proj": "sequence_parallel"})
    with pytest.raises(RankFailed, match="'sequence_parallel', which is not built") as raised:
        run_ranks(2, lambda rank: call(models[rank]))
    assert isinstance(raised.value.__cause__, NotBuiltError)


@in_one_item(["alone", "engine"])
def test_the_state_of_a_smaller_model_is_refused(where):
    """Its tensors have the shape of a part, as plain torch sees in the whole model."""
    models = [seeded(llama) for _ in range(2)]
    half = seeded(lambda: llama(intermediate_size=24)).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"

    def run(rank):
        model = cut(models[rank])
        engine = None if where == "alone" else start(model, plain_sgd(model), config_of(1))
        before = model.state_dict()[name].clone()
        with pytest.raises(RuntimeError, match=rf"mismatch for {name}: .*24, 32.*48, 32") as raised:
            model.load_state_dict(half)
        assert "Missing key" not in str(raised.value)
        assert model.state_dict()[name].equal(before)
        if engine is not None:
            engine.destroy()

    run_ranks(2, run)


def test_a_cut_model_is_not_pickled():
    models = [seeded(llama) for _ in range(2)]

    def run(rank):
        with pytest.raises(PartitionError, match=r"Embedding .*state_dict\(\)"):
            torch.save(cut(models[rank]), io.BytesIO())

    run_ranks(2, run)


def test_a_vocabulary_in_parts_keeps_its_size():
    models = [seeded(lambda: llama(tied=True)) for _ in range(2)]

    def run(rank):
        model = cut(models[rank])
        embeddings: Any = model.get_input_embeddings()
        for asked in ({"new_num_tokens": VOCAB}, {"pad_to_multiple_of": 2}, {}):
            assert model.resize_token_embeddings(**asked) is embeddings
        for asked in ({"new_num_tokens": VOCAB + 2}, {"pad_to_multiple_of": 64}):
            with pytest.raises(PartitionError, match="before it is cut"):
                model.resize_token_embeddings(**asked)
        assert embeddings.weight.shape[0] == VOCAB // 2

    run_ranks(2, run)


@in_one_item([("before", False, 3), ("after", True, 1)])
def test_a_head_whose_weight_trl_reads(case):
    """Losses of a training in which TRL's patch came before or after the cut."""
    patched, tied, stage = case
    models = [seeded(lambda: llama(tied=tied)) for _ in range(3)]
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, VOCAB, (2, 9), generator=draw) for _ in range(2)]

    def losses(model, train):
        found = []
        for ids in batches:
            for more in ({"fused_lm_head": True}, {}):
                loss = model(input_ids=ids, labels=ids, **more).loss
                found.append(float(loss.detach()))
                train(loss)
        return found

    for model in models if patched == "before" else models[2:]:
        add_fused_lm_head(model)
    optimizer = plain_sgd(models[2])

    def train(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    want = losses(models[2], train)

    def run(rank):
        model: Any = cut(models[rank])
        if patched == "after":
            add_fused_lm_head(model)
        engine = start(model, plain_sgd(model), config_of(stage, **TP))

        def train(loss):
            engine.backward(loss)
            engine.step()

        return losses(engine, train)

    for found in run_ranks(2, run):
        assert found == pytest.approx(want, rel=1e-5)


def _train(model_of, prepare=lambda model: None, steps=2, **config):
    """Steps on two ranks that share a model; what the comparisons said."""
    models = [seeded(model_of) for _ in range(2)]
    said: list[str] = []
    written = config_of(config.pop("stage", 1), **{**VERIFIED_TP, **config})

    def run(rank):
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


RECOMPUTED = {"activation_checkpointing": {"blocks": True}, "gradient_accumulation_steps": 2}


@in_one_item([(gpt2, 3, RECOMPUTED), (llama, 2, {"bf16": {"enabled": True}})])
def test_a_model_that_is_right(case):
    make, stage, more = case
    said = _train(make, stage=stage, **more)
    assert len(said) == 2  # one of each rank, once
    assert "are those of the whole model, on 2 ranks" in said[0]


def test_a_forward_that_raised_is_not_compared_with_the_next_batch():
    def run(rank):
        model = cut(models[rank], verify=True).train()
        layer = model.model.layers[1]

        def fail(*_):
            raise MemoryError

        hook = layer.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            model(**batch_of(seed=1))
        hook.remove()
        model(**batch_of(seed=2)).loss.backward()

    models = [seeded(llama) for _ in range(2)]
    run_ranks(2, run)


def test_further_backwards_after_the_comparison():
    """Of a graph that was kept, as of a second loss."""

    def gradients(model):
        output = model.train()(**batch_of())
        output.loss.backward(retain_graph=True)
        output.logits.square().mean().backward()
        return model.model.norm.weight.grad

    models = [seeded(llama) for _ in range(2)]
    want = gradients(seeded(llama))
    for got in run_ranks(2, lambda rank: gradients(cut(models[rank], verify=True))):
        torch.testing.assert_close(got, want)


def _loses_a_sum(model):
    for layer in model.model.layers:
        set_sharding(layer.self_attn.q_norm.weight, Sharding())


def _doubles(model):
    down = model.model.layers[1].mlp.down_proj
    assert isinstance(down, Rowwise)
    down.register_forward_hook(lambda module, args, output: 2 * output)


def _doubles_a_gradient(model):
    model.model.norm.weight.register_hook(lambda gradient: 2 * gradient)


DIFFERENT = {
    r"gradients differ .*q_norm.weight \(off by": _loses_a_sum,
    "outputs differ .*output 0": _doubles,
    r"1 of \d+ gradients differ .*model.norm.weight": _doubles_a_gradient,
}


@in_one_item(DIFFERENT)
def test_what_differs(words):
    prepare = DIFFERENT[words]
    with pytest.raises(RankFailed, match=words) as raised:
        _train(qwen3, prepare)
    assert isinstance(raised.value.__cause__, VerificationError)


def test_a_whole_model_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(verification, "free_bytes", lambda device: 1000)
    with pytest.raises(RankFailed, match="verify a smaller model") as raised:
        _train(llama)
    assert isinstance(raised.value.__cause__, DoesNotFitError)


# A mechanism each: an activation with parameters, sums of modules and stacked gates that a plan
# does not call so, latent attention, an index beside it, sinks, convolutions.
SOON = {"apertus", "inkling_text", "deepseek_v32", "qwen3_next", "doge"}
UNPLACED = {"doge": "DogeForCausalLM runs whole, and cut by its tensor-parallel plan it does not"}


def _compare(model, batch, **plan):
    """Loss and gradients of ``model`` cut among two ranks, against those of the whole."""
    copies = [copy.deepcopy(model) for _ in range(2)]

    def share(rank):
        cut = hf_zero.tensor_parallel(copies[rank], 2, **plan)
        loss, gradients = loss_and_gradients(cut, batch)
        named = dict(cut.named_parameters())
        partial = {name for name in gradients if sharding_of(named[name]).partial}
        return loss, gradients, boxes_of(cut), partial

    parts = run_ranks(2, share, timeout=240)
    loss, gradients = loss_and_gradients(model, batch)
    assert parts[1][0] == pytest.approx(loss, rel=1e-4)
    assert set(parts[0][1]) == set(gradients)
    sums = [
        {
            name: sum(part[1][name] for part in parts) if name in partial else gradient
            for name, gradient in found.items()
        }
        for _, found, _, partial in parts
    ]
    got = put_together(sums, [part[2] for part in parts], exact=False)
    compare_tensors("gradient", got, gradients, tolerance=2e-3, floor=1e-5)


pytest_generate_tests = by_model_type(SOON, with_plan=True)


def test_every_model_type_that_has_a_plan(model_type):
    if model_type not in UNPLACED:
        _compare(tiny(model_type), batch_of())
        return
    with pytest.raises(RankFailed, match=UNPLACED[model_type]) as raised:
        _compare(tiny(model_type), batch_of())
    assert isinstance(raised.value.__cause__, ConfigError)


PLAN_OF_OPT = {
    f"model.decoder.layers.*.{name}": style
    for style, names in (
        ("colwise", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1")),
        ("rowwise", ("self_attn.out_proj", "fc2")),
    )
    for name in names
}


def test_a_plan_for_a_model_that_views_by_its_number_of_heads(monkeypatch) -> None:
    """A view (batch, -1, heads, width) with all heads would take two tokens for one, in silence."""
    monkeypatch.delitem(styles.FAMILIES, "opt")
    _compare(seeded(opt), batch_of(), plan=PLAN_OF_OPT)


def test_a_tied_weight_that_the_plan_cuts_under_one_name() -> None:
    """As that of Lfm2 before Transformers placed its embedding."""
    model = tiny("lfm2")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    said = "are one parameter, which the tensor-parallel plan leaves whole there"
    with pytest.raises(RankFailed, match=said) as raised:
        _compare(model, batch_of(), plan={"model.embed_tokens": None})
    assert isinstance(raised.value.__cause__, ConfigError)


class _Between(nn.Module):
    """An activation with a weight, between layers that are cut; ``whole`` weighs what comes in."""

    def __init__(self, inner, whole=False):
        super().__init__()
        self.inner, self.whole = inner, whole
        self.weight = nn.Parameter(torch.full((), 0.7))

    def forward(self, x):
        if self.whole:
            return self.inner(self.weight * x)  # type: ignore[no-any-return]
        return self.weight * self.inner(x)  # type: ignore[no-any-return]


class _Gated(nn.Module):
    """A layer that is cut, times something of its input, which is whole."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * x.mean(-1, keepdim=True)  # type: ignore[no-any-return]


class _Twice(nn.Module):
    """A layer that is cut, and one that reads its elements."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.then = inner, nn.Linear(1, 2)

    def forward(self, x):
        return self.then(self.inner(x).unsqueeze(-1)).sum(-1)  # type: ignore[no-any-return]


class _ReadsNumbers(_Between):
    def forward(self, x):
        return super().forward(x) if x.detach().numpy().any() else x


class _WithASwitch(_Between):
    switch = torch.ones(())

    def forward(self, x):
        return super().forward(x) if self.switch.item() else self.inner(x)


def _changed(name, made):
    """A Llama with ``made`` around one layer of each MLP."""
    model: Any = seeded(llama)
    for layer in model.model.layers:
        setattr(layer.mlp, name, made(getattr(layer.mlp, name)))
    return model


@in_one_item((("act_fn", None, False), ("up_proj", "inner", False), ("up_proj", "inner", True)))
def test_parameters_that_no_plan_names(case):
    name, inner, whole = case
    place = f"model.layers.*.mlp.{name}"
    plan = {place: None, f"{place}.{inner}": "colwise"} if inner else None
    model = _changed(name, lambda inner: _Between(inner, whole))
    cut = copy.deepcopy(model)
    if plan is None:
        marks = {each for each, sharding in cuts_of(cut, 2).items() if sharding.partial}
        assert marks == {layer.mlp.act_fn.weight for layer in cut.model.layers}
    _compare(model, batch_of(), plan=plan)


def test_parameters_between_layers_of_rectangular_images():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        image_size=[8, 16], patch_size=4,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    mlp = model.get_submodule("vit.layers.0.mlp")
    mlp.activation_fn = _Between(mlp.activation_fn)
    marks = {each for each, sharding in cuts_of(model, 2).items() if sharding.partial}
    assert marks == {mlp.activation_fn.weight}


def test_a_branch_on_a_number_of_the_host():
    """A run without memory takes the branch that a tensor with values chooses."""
    model = _changed("act_fn", _WithASwitch)
    marks = {each for each, sharding in cuts_of(model, 2).items() if sharding.partial}
    assert marks == {layer.mlp.act_fn.weight for layer in model.model.layers}


MISPLACED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "mixed": (
        lambda: _changed("up_proj", _Gated),
        {"mlp.up_proj": None, "mlp.up_proj.inner": "colwise"},
        "in one place and with whole ones in another",
    ),
    "parts twice": (
        lambda: _changed("up_proj", _Twice),
        {"mlp.up_proj": None, "mlp.up_proj.inner": "colwise", "mlp.up_proj.then": "colwise"},
        "takes whole inputs by its style",
    ),
    "nothing cut": (
        lambda: seeded(llama),
        {"mlp": "all_reduce", **dict.fromkeys(("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"))},
        "all that it is given is whole",
    ),
    "does not run": (lambda: seeded(llama), {"mlp.down_proj": None}, "runs whole, and cut"),
    "cannot be run": (lambda: _changed("act_fn", _ReadsNumbers), {}, "mlp.act_fn.weight is whole"),
}


@in_one_item(MISPLACED)
def test_what_cannot_be_placed(case):
    make, plan, words = MISPLACED[case]
    models = [make() for _ in range(2)]
    plan = {f"model.layers.*.{name}": style for name, style in plan.items()}
    with pytest.raises(RankFailed, match=words) as raised:
        run_ranks(2, lambda rank: hf_zero.tensor_parallel(models[rank], 2, plan=plan))
    assert isinstance(raised.value.__cause__, ConfigError)
    assert not any(sharding_of(each).axes for each in models[0].parameters())


def test_what_the_plan_says_where_nothing_runs():
    model = _changed("act_fn", _ReadsNumbers)
    plan = {"model.layers.*.mlp.act_fn.weight": "replicated_with_grad_allreduce"}
    _compare(model, batch_of(), plan=plan)

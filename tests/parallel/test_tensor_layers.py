"""Layers that ranks share: values and messages; gradients of weights beside a sum; processes, which
have random generators of their own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_zero
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import RankMismatchError
from hf_zero.parallel.tensor import agreement
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.parallel.tensor.shared_inputs import SharedInputs, WeightGradients
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers.cells import in_one_item
from tests.helpers.dropout import dropout_by
from tests.helpers.models import seeded, tokens
from tests.helpers.oracle import compare_tensors
from tests.helpers.processes import run_processes
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.tensor_parallel import (
    HEADS,
    MODELS,
    VOCAB,
    boxes_of,
    gpt2,
    llama,
    mixtral,
    put_together,
    qwen3,
)


def loss_and_gradients(model, batch):
    loss = model(**batch).loss
    loss.backward()
    named = model.named_parameters()
    return float(loss.detach()), {name: p.grad for name, p in named if p.grad is not None}


def _on_ranks(run, make=llama, size=2):
    """``run`` with a model cut among ``size`` ranks, on each of them."""
    model = seeded(make)
    copies = [copy.deepcopy(model) for _ in range(size)]
    return run_ranks(size, lambda rank: run(hf_zero.tensor_parallel(copies[rank], size)))


def test_keys_and_values_of_fewer_heads_than_ranks():
    batch, name = MODELS["llama"].batch(0, 0, 0), "model.layers.0.self_attn.k_proj.weight"

    def run(model):
        assert sharding_of(model.get_parameter(name)).partial
        return loss_and_gradients(model, batch)

    parts = _on_ranks(run, llama, 4)  # which has two
    loss, gradients = loss_and_gradients(seeded(llama), batch)
    assert parts[3][0] == pytest.approx(loss, rel=1e-5)
    total = sum(gradients[name] for _, gradients in parts)
    compare_tensors("gradient", {name: total}, {name: gradients[name]})


@in_one_item([VOCAB + 5, VOCAB, -1, -100])
def test_a_token_outside_the_vocabulary_is_an_error_as_in_one_process(token):
    ids = torch.tensor([[1, 2, token, VOCAB - 1]])

    def run(model):
        with pytest.raises(IndexError):
            model(input_ids=ids)

    run(seeded(llama))
    _on_ranks(run)


def test_a_bias_added_after_the_sum_keeps_the_dtype_of_autocast():
    def run(model):
        dtypes = []
        model.transformer.h[0].mlp.c_proj.register_forward_hook(
            lambda module, inputs, output: dtypes.append(output.dtype)
        )
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=torch.tensor([[1, 2, 3]]))
        return dtypes

    assert _on_ranks(run, gpt2) == [run(seeded(gpt2))] * 2


def _sent(make, backward=True):
    models = [seeded(make) for _ in range(2)]
    batch = MODELS["llama"].batch(0, 0, 0)

    def count(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        groups = get_parallel()
        assert groups is not None
        model(**batch)  # the first forward compares batches, too
        stats = groups.stats["tensor"]
        stats.counts.clear(), stats.bytes.clear()
        loss = model.train(backward)(**batch).loss
        before = dict(stats.counts)
        if backward:
            loss.backward()
        return before, dict(stats.counts), dict(stats.bytes), batch["input_ids"].numel()

    return run_ranks(2, count)[0]


def test_a_layer_sums_twice_forward_and_twice_backward(monkeypatch):
    monkeypatch.setattr(agreement.Agreement, "_compare", lambda *_: None)
    forward, both, sent, words = _sent(lambda: llama(num_hidden_layers=4))
    # embedding, and attention and MLP of 4 layers; the head's backward in place of the embedding
    assert forward == {"all_reduce": 9, "all_gather": 1}
    assert both == {"all_reduce": 18, "all_gather": 1}
    assert sent == {"all_reduce": 18 * words * 32 * 4, "all_gather": words * VOCAB * 4}


def _generate(model, ids):
    with hf_zero.summon_full_params(model):
        model.generate(ids, max_new_tokens=2, do_sample=False)


# the calls that each rank makes with its own batch, after some with the same
_WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "evaluation after training": lambda model, alike, own: (
        [model(**alike) for _ in range(3)] and model.eval()(**own)
    ),
    "training after an evaluation": lambda model, alike, own: (
        model(**alike) and [model.eval()(**alike) for _ in range(3)] and model.train()(**own)
    ),
    "one prompt a rank after a generation": lambda model, alike, own: (
        _generate(model, alike["input_ids"]), _generate(model, own["input_ids"])
    ),
    "a loop that draws tokens apart": lambda model, alike, own: [
        model.eval()(torch.cat([alike["input_ids"], own["input_ids"][:, :end]], 1))
        for end in range(2)
    ],
}  # fmt: skip


def test_weights_are_between_the_launch_of_a_sum_and_its_wait(monkeypatch):
    order: dict[int, list[str]] = {}
    launch, compute = TensorAxis.launch_sum, WeightGradients.compute

    def launched(self, x, name):
        seen = order.setdefault(self.rank, [])
        seen.append(f"launch {name}")
        total, under_way = launch(self, x, name)
        wait = under_way.wait
        monkeypatch.setattr(under_way, "wait", lambda: (seen.append("wait"), wait()))
        return total, under_way

    def computed(self, x):
        found = compute(self, x)
        seen = order[get_parallel().along("tensor").rank]
        seen.append(f"{sum(each is not None for each in found)} weights")
        return found

    monkeypatch.setattr(TensorAxis, "launch_sum", launched)
    monkeypatch.setattr(WeightGradients, "compute", computed)

    def run(model):
        loss = _loss(model)
        seen = order[get_parallel().along("tensor").rank]
        seen.clear()
        loss.backward()
        return list(seen)

    wanted = ["launch lm_head", "1 weights", "wait"]
    for number in (1, 0):
        for part, weights in (("mlp", "2 weights"), ("self_attn", "3 weights")):
            wanted += [f"launch model.layers.{number}.{part}", weights, "wait"]
    assert _on_ranks(run) == [wanted, wanted]


@in_one_item(_WAYS)
def test_ranks_that_read_different_batches_are_told(way):
    models, batch = [seeded(llama) for _ in range(2)], MODELS["llama"].batch

    def differ(rank):
        model = hf_zero.tensor_parallel(models[rank].train(), 2)
        _WAYS[way](model, batch(0, 0, 0), batch(0, 0, rank))

    with pytest.raises(RankFailed, match="given different batches") as raised:
        run_ranks(2, differ)
    assert isinstance(raised.value.__cause__, RankMismatchError)


def test_values_are_those_of_rank_0():
    models = [seeded(qwen3) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(1)
    wanted = models[0].model.layers[0].mlp.down_proj.weight.detach()[:, 24:].clone()

    def cut(rank):
        made = hf_zero.tensor_parallel(models[rank], 2)
        return made.model.layers[0].mlp.down_proj.weight.detach()

    assert torch.equal(run_ranks(2, cut)[1], wanted)


@in_one_item(["tensor_parallel_sum", "tensor_parallel_join"])
def test_no_cuda_graph_records_collectives(name):
    operator = getattr(torch.ops.hf_zero, name).default
    assert torch.Tag.cudagraph_unsafe in operator.tags


@in_one_item([("q_proj", True), ("o_proj", False), ("embed_tokens", False), ("lm_head", True)])
def test_adapters_that_are_merged(case):
    """Each rank merges its part of each layer: together they equal the layers merged whole."""
    layer, tied = case

    def make():
        settings = LoraConfig(r=4, target_modules=[layer], init_lora_weights=False)
        return seeded(lambda: get_peft_model(llama(key_value_heads=2, tied=tied), settings)).eval()

    models, ids = [make() for _ in range(2)], tokens(0, 0, 0)
    merged = make().merge_and_unload()
    expected = merged(input_ids=ids).logits.detach()

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2).merge_and_unload()
        return model(input_ids=ids).logits.detach(), model.state_dict()

    for logits, state in run_ranks(2, run):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)
        for name, value in merged.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=name)


@contextmanager
def _one_after_the_other():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedInputs, "_beside", lambda *_: None)
        yield


def _loss(model):
    loss: torch.Tensor = model(**MODELS["llama"].batch(0, 0, 0)).loss
    return loss


def _same_bits(run, make=llama):
    """The gradients that ``run`` gives are those of one after the other."""
    with _one_after_the_other():
        wanted = _on_ranks(run, make)
    for mine, theirs in zip(_on_ranks(run, make), wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a is b is None or torch.equal(a, b)
    return wanted


def test_gradients_that_are_asked_for_in_part():
    """Of one weight or of one activation alone, twice of one graph, and under autocast."""

    def run(model):
        layer, kept = model.model.layers[1], list[torch.Tensor]()
        layer.input_layernorm.register_forward_hook(lambda *given: kept.append(given[1][0]))
        loss = _loss(model)
        found = [*torch.autograd.grad(loss, layer.self_attn.k_proj.weight, retain_graph=True)]
        found += torch.autograd.grad(loss, kept[0], retain_graph=True)
        for _ in range(2):
            loss.backward(retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model)
        loss.backward()
        return [*found, *(each.grad for each in model.parameters())]

    _same_bits(run)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_layers_that_compute_otherwise_keep_their_backward():
    """A forward of its own, an input that is no plain memory, weights without a gradient."""

    def made():
        model: Any = llama()
        for layer in model.model.layers:
            layer.self_attn.k_proj.__class__ = Doubled
            layer.mlp.register_forward_pre_hook(
                lambda _, given: (given[0].transpose(0, 1).contiguous().transpose(0, 1),)
            )
        gate = model.model.layers[0].mlp.gate_proj
        gate.register_forward_hook(lambda *given: given[2].detach())
        return model

    def run(model):
        _loss(model).backward()
        return [each.grad for each in model.parameters()]

    for found in _same_bits(run, made):
        assert sum(each is None for each in found) == 1


def _model():
    model = seeded(functools.partial(gpt2, 0.25))
    model.config._attn_implementation = "eager"
    return model


def _run(model):
    loss = model(**MODELS["gpt2"].batch(0, 0, 0)).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}


def dropped():
    """Loss, gradients, boxes and masks of a forward and a backward that recomputes."""
    masks: list[torch.Tensor] = []

    def draw(shape, p):
        masks.append((torch.rand(shape) >= p).float())
        return masks[-1]

    model = hf_zero.tensor_parallel(_model(), 2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(11)
    with dropout_by(draw):
        loss, gradients = _run(model)
    return loss, gradients, boxes_of(model), masks[:7], torch.rand(2)


def jittered():
    """Draws, and has no dropout."""
    model = seeded(mixtral)
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.1
    return model


def seeded_apart(rank):
    """Return the error of each model whose ranks have generators of their own, or ""."""
    told = []
    for make in (_model, jittered, lambda: seeded(llama)):
        model = hf_zero.tensor_parallel(make(), 2)
        torch.manual_seed(rank)
        try:
            _run(model)
            told.append("")
        except RankMismatchError as error:
            told.append(str(error))
    return told


PROMPT = {"max_new_tokens": 8, "do_sample": True}


def sampled(rank):
    """Tokens that ranks with generators of their own draw, and what they would draw next."""
    model = hf_zero.tensor_parallel(seeded(llama), 2)
    torch.manual_seed(5 + rank)
    ids = MODELS["llama"].batch(0, 0, 0)["input_ids"]
    return model.eval().generate(ids, **PROMPT), torch.rand(2)


def split_by_transformers(rank, folder):
    config = transformers.distributed.DistributedConfig(tp_size=2)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    hf_zero.tensor_parallel(model.train(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_zero.initialize(
        model=model, optimizer=optimizer, config={"zero_optimization": {"stage": 3}}
    )[0]
    assert engine.config.tensor_parallel.size == 2
    loss = engine(**MODELS["llama"].batch(0, 0, 0)).loss
    engine.backward(loss)
    parts = {name: hf_zero.safe_get_full_grad(p).clone() for name, p in model.named_parameters()}
    boxes = boxes_of(model)
    state = model.state_dict()
    engine.destroy()
    return float(loss.detach()), parts, boxes, state


def each(rank, folder):
    return (dropped(), seeded_apart(rank), split_by_transformers(rank, folder), sampled(rank))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("llama")
    seeded(llama).save_pretrained(folder)
    return run_processes(2, each, str(folder), timeout=400.0)


def test_dropout_differs_where_activations_are_parts(ranks):
    first, second = (each[0] for each in ranks)
    masks = []
    for one, other in zip(first[3], second[3], strict=True):
        if one.dim() == 4:  # attention weights: heads / 2 of a rank
            assert one.shape[1] == HEADS // 2 and not torch.equal(one, other)
            masks.append(torch.cat([one, other], 1))
        else:
            assert torch.equal(one, other)
            masks.append(one)
    assert torch.equal(first[4], second[4])  # and the generators go on alike
    model = _model()
    with dropout_by(lambda shape, p: masks.pop(0)):
        loss, gradients = _run(model)
    assert first[0] == second[0] == pytest.approx(loss, rel=1e-5)
    got = put_together([first[1], second[1]], [first[2], second[2]], exact=False)
    compare_tensors("gradient", got, gradients, floor=1e-6)


def test_generators_that_differ_are_told_where_a_forward_draws(ranks):
    for _, (drops, jitters, draws_nothing), *_ in ranks:
        for told in (drops, jitters):
            assert "random generators of tensor-parallel ranks 0-1 differ" in told
        assert not draws_nothing


def test_sampled_tokens_are_those_of_the_first_rank(ranks):
    model = seeded(llama).eval()
    torch.manual_seed(5)
    wanted = model.generate(MODELS["llama"].batch(0, 0, 0)["input_ids"], **PROMPT), torch.rand(2)
    for *_, found in ranks:
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_models_that_transformers_has_split(ranks):
    parts = [each[2] for each in ranks]
    model = seeded(llama)
    loss = model(**MODELS["llama"].batch(0, 0, 0)).loss
    loss.backward()
    assert parts[0][0] == pytest.approx(float(loss.detach()), rel=1e-5)
    got = put_together([part[1] for part in parts], [part[2] for part in parts])
    compare_tensors("gradient", got, {n: p.grad for n, p in model.named_parameters()}, floor=1e-6)
    for name, value in model.state_dict().items():
        assert torch.equal(parts[1][3][name], value), name

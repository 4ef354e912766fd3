"""Tensor parallelism on processes: each has random generators of its own."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import RankMismatchError
from tests.helpers.dropout import dropout_by
from tests.helpers.models import seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.processes import run_processes
from tests.helpers.tensor_parallel import (
    HEADS,
    MODELS,
    boxes_of,
    gpt2,
    llama,
    mixtral,
    put_together,
)


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

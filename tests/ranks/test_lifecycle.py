"""destroy() gives a plain model back, and several engines live side by side or one after
another.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd

RANKS = 2


def test_two_engines_side_by_side():
    """A policy and its reference at different stages, stepped in turn."""
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 3, RANKS)
    others = [stack() for _ in range(RANKS)]

    def run(rank, model):
        one = start(model, plain_sgd(model), config_of(3))
        two = start(others[rank], plain_sgd(others[rank]), config_of(2))
        for step in range(3):
            loss_one, loss_two = squared(one, At(step, 0, rank)), squared(two, At(step, 0, rank))
            two.backward(loss_two)
            one.backward(loss_one)
            one.step()
            two.step()
        return full_weights(one), full_weights(two)

    for weights in on_ranks(RANKS, run):
        for each in weights:
            oracle.compare_tensors("weights", each, want)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_bf16_destroy_and_names_of_the_engine(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage, Plan(precision="bf16")))
    assert engine.stage == stage and engine.config.precision == "bf16"
    assert (engine.global_rank, engine.world_size, engine.device.type) == (rank, RANKS, "cpu")
    assert engine.train_batch_size() == engine.train_micro_batch_size_per_gpu() * RANKS
    assert engine.module is model
    assert engine.head is model.head
    with pytest.raises(AttributeError, match="no_such_name"):
        engine.no_such_name  # noqa: B018
    engine.eval()
    assert not model.training
    engine.train()
    assert model.training
    engine.backward(squared(engine, At(0, 0, rank), torch.bfloat16))
    engine.step()
    engine.destroy(gather=True)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_are_neither_cast_nor_sharded(stage):
    before = {name: value.clone() for name, value in ARCHITECTURES["llama"].build().named_buffers()}
    assert before

    def run(rank, model):
        start(model, adamw(model), config_of(stage, Plan(precision="bf16")))
        for name, value in model.named_buffers():
            assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name

    on_ranks(RANKS, run, build=ARCHITECTURES["llama"].build)


class OddBuffers(torch.nn.Linear):
    """A buffer in each layout that is not row by row, with values of the rank it is made for."""

    def __init__(self, rank):
        super().__init__(4, 1)
        start = 100.0 * rank
        self.register_buffer("turned", torch.arange(start, start + 6).reshape(2, 3).t())
        self.register_buffer("gaps", torch.arange(start, start + 6)[::2])
        self.register_buffer("expanded", torch.full((1, 2), start).expand(3, 2))
        self.register_buffer("conjugate", torch.tensor([1 + start * 1j]).conj())
        self.register_buffer("negative", torch.tensor([1 + start * 1j]).conj().imag)


def test_buffers_of_every_layout_have_rank_0s_values():
    models = [OddBuffers(rank) for rank in range(RANKS)]

    def run(rank):
        before = {name: value.stride() for name, value in models[rank].named_buffers()}
        start(models[rank], None, config_of(3))
        wanted = dict(OddBuffers(0).named_buffers())
        for name, value in models[rank].named_buffers():
            assert torch.equal(value, wanted[name]) and value.stride() == before[name], name

    run_ranks(RANKS, run)


@on_each_rank(RANKS, build=ARCHITECTURES["t5"].build)
def test_t5_keeps_in_fp32_what_transformers_keeps(rank, model):
    """``wo`` in fp16, as from_pretrained(dtype=float16) has it."""
    start(model, adamw(model), config_of(3, Plan(precision="fp16")))
    for name, p in model.named_parameters():
        kept = ".wo." in name
        assert p.dtype == (torch.float32 if kept else torch.float16), name


def test_a_model_without_parameters_to_train_is_told():
    def frozen():
        return seeded(lambda: stack().requires_grad_(False))

    def run(rank, model):
        engine = start(model, None, config_of(3))
        with torch.no_grad():
            assert torch.isfinite(squared(engine, At(0, 0, rank)))

    on_ranks(RANKS, run, build=frozen)

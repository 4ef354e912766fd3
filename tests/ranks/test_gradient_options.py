"""Options that change how gradients travel and add up, none of which may change what they are; the
passes over memory that they cost; sparse gradients, torch.autocast, the dtype of buffers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import NotBuiltError
from tests.helpers import oracle
from tests.helpers.engines import (
    STAGES,
    config_of,
    engine_opener,
    full_grads,
    full_weights,
    start,
    train_on_threads,
)
from tests.helpers.models import ARCHITECTURES, Stack, features, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, StackJob, adamw, plain_sgd, sgd

RANKS = 2


class PlainStack(StackJob):
    name = "plain stack with sgd"

    def optimizer(self, model):
        return plain_sgd(model)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "options",
    [
        {"prescale_gradients": True},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 2.0},
        {"communication_data_type": "fp32"},
        {"data_types": {"grad_accum_dtype": "fp32"}},
    ],
    ids=str,
)
def test_gradients_are_the_same(stage, options):
    plan = Plan(ranks=RANKS, steps=3, accumulation=2)
    got = train_on_threads(PlainStack(), plan, engine_opener(stage, **options))
    oracle.compare(got, oracle.kept(PlainStack(), plan), weight_floor=oracle.ROUNDING)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [0.05, 1e4])
def test_clipping(stage, clip):
    """The norm reported is the one before clipping; a large limit changes nothing."""
    plan = Plan(ranks=RANKS, steps=4, accumulation=2, clip=clip)
    got = train_on_threads(PlainStack(), plan, engine_opener(stage))
    want = oracle.kept(PlainStack(), plan)
    assert (max(want.norms) > clip) == (clip < 1)
    oracle.compare(got, want, weight_floor=oracle.ROUNDING)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_communication_in_16_bits_rounds_and_no_more(stage, dtype):
    """In fp32 training, gradients sent in 16 bits are off by that rounding: not exact, not
    worse.
    """
    plan = Plan(ranks=RANKS, steps=1)
    got = train_on_threads(PlainStack(), plan, engine_opener(stage, communication_data_type=dtype))
    want = oracle.kept(PlainStack(), plan)
    eps = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).eps
    error = oracle.errors(got, want)["gradients"] / want.norms[0]
    assert 0.02 * eps < error < eps, f"relative error {error:.3g}, rounding of {dtype} is {eps:.3g}"


class Adds(torch.nn.Module):
    """Its loss is the mean of weight times x: the gradient of a weight is x."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(1, 16, bias=False) for _ in range(2))

    def forward(self, x):
        return sum(block(x).sum() for block in self.blocks)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulate, exact", [(None, True), ("fp32", True), ("bf16", False)])
def test_small_addends_survive_in_fp32(stage, accumulate, exact):
    """1 + 100 × 2^-9 is 1.195 in fp32 and stays 1 where bf16 accumulates: the config decides,
    and by default it is fp32.
    """
    more = {"data_types": {"grad_accum_dtype": accumulate}} if accumulate else {}

    def run(rank, model):
        engine = start(
            model,
            plain_sgd(model),
            config_of(stage, Plan(accumulation=101, precision="bf16"), **more),
        )
        for micro in range(101):
            x = torch.full((1, 1), 1.0 if micro == 0 else 2.0**-9, dtype=torch.bfloat16)
            engine.backward(engine(x), scale_wrt_gas=False)
            if micro < 100:
                engine.step()
        return full_grads(engine)

    for grads in on_ranks(RANKS, run, build=lambda: seeded(Adds)):
        for name, grad in grads.items():
            want = 1 + 100 * 2.0**-9 if exact else 1.0
            assert torch.allclose(grad, torch.full_like(grad, want), rtol=1e-3), (
                f"{name}: {grad.flatten()[0]:.6f}, expected {want:.6f}"
            )


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_norm_is_a_float_everywhere(stage, precision):
    def run(rank, model):
        plan = Plan(precision=precision)
        engine = start(model, plain_sgd(model), config_of(stage, plan))
        run_steps(engine, rank, [0])
        norm = engine.get_global_grad_norm()
        assert type(norm) is float
        full_weights(engine)
        return norm

    found = on_ranks(RANKS, run)
    assert found == [found[0]] * RANKS
    assert found[0] == pytest.approx(
        oracle.kept(PlainStack(), Plan(ranks=RANKS, steps=1)).norms[0],
        rel=2e-2 if precision == "bf16" else 5e-3,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_to_clip_to_may_change_between_steps(stage):
    """A trainer of its own clips each step as it likes; the config gives the first value."""
    limits = [0.5, 0.05, 0.0]

    def by_hand_step(model, optimizer, step):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (squared(model, At(step, 0, rank)) / RANKS).backward()
        if limits[step]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limits[step])
        optimizer.step()

    model = seeded(Stack)
    optimizer = plain_sgd(model)
    for step in range(len(limits)):
        by_hand_step(model, optimizer, step)
    want = {name: p.detach() for name, p in model.named_parameters()}

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, gradient_clipping=limits[0]))
        assert engine.max_norm == limits[0]
        for step, limit in enumerate(limits):
            engine.max_norm = limit
            run_steps(engine, rank, [step])
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


PASSES_RANKS = 3  # no power of two


class Passes(TorchDispatchMode):
    """Elements that were multiplied in place or added, and calls over lists, by the dtypes of
    what is written and what is read.
    """

    def __init__(self):
        super().__init__()
        self.multiplied = 0
        self.lists: set[tuple[str, torch.dtype, torch.dtype]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = (kwargs or {}).get("out")
        if func._schema.name in ("aten::mul_", "aten::mul") and (
            out is not None or func._schema.name.endswith("_")
        ):
            self.multiplied += args[0].numel()
        if (
            func._schema.name.startswith("aten::_foreach_")
            and len(args) > 1
            and isinstance(args[1], (list, tuple))
        ):
            self.lists.add((func._schema.name, args[0][0].dtype, args[1][0].dtype))
        return func(*args, **(kwargs or {}))


def backwards(rank, models, stage, plan):
    engine = start(models[rank], sgd(models[rank]), config_of(stage, plan))
    step = 0
    for micro in range(plan.accumulation):
        loss = engine(**ARCHITECTURES["gpt2"].batch(step, micro, rank)).loss
        if micro == plan.accumulation - 1:
            with Passes() as passes:
                engine.backward(loss)
        else:
            engine.backward(loss)
    numbers = passes.multiplied, sum(flat.layout.padded for flat in engine.flats), passes.lists
    engine.destroy()
    return numbers


@pytest.mark.parametrize("stage, precision", [(2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_the_average_is_one_pass_over_this_ranks_chunk(stage, precision):
    models = [ARCHITECTURES["gpt2"].build() for _ in range(PASSES_RANKS)]
    for multiplied, padded, _ in run_ranks(
        PASSES_RANKS, backwards, models, stage, Plan(ranks=PASSES_RANKS, precision=precision)
    ):
        assert 0 < multiplied <= padded // PASSES_RANKS


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_another_dtype_are_added_in_one_call(stage):
    """A list whose dtypes differ falls out of torch's fast path: it is added one parameter, one
    launch, after the other.
    """
    models = [ARCHITECTURES["gpt2"].build() for _ in range(2)]
    plan = Plan(ranks=2, precision="bf16", accumulation=2)
    for _, _, lists in run_ranks(2, backwards, models, stage, plan):
        assert lists and all(
            one == other for name, one, other in lists if name != "aten::_foreach_copy_"
        ), lists


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.words(ids)).square().mean()


def ids_of(step, rank):
    return torch.tensor([step, rank, 5])


@pytest.mark.parametrize("stage", STAGES)
def test_a_sparse_gradient_counts_as_a_dense_one_and_is_named_once(stage, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        "hf_zero.zero.reduce.reductions.log_rank0", lambda message, level: said.append(message)
    )
    model = seeded(Words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        (sum(model(ids_of(step, rank)) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(rank, model):
        engine = start(model, torch.optim.SGD(model.parameters(), lr=0.1), config_of(stage))
        for step in range(2):
            engine.backward(engine(ids_of(step, rank)))
            engine.step()
        return full_weights(engine)

    got = on_ranks(2, run, build=lambda: seeded(Words))[0]
    oracle.compare_tensors(
        "weights", got, {name: p.detach() for name, p in model.named_parameters()}
    )
    assert len(said) == 2, "one of each rank's engine, of which rank 0's is logged"
    assert all("words.weight" in text for text in said)


AUTOCAST_RANKS, STEPS = 2, 3


def loss_of(model, step, rank):
    out = model(features(step, 0, rank))
    return out.float().square().mean(), out.dtype


@pytest.mark.parametrize("stage", STAGES)
def test_the_forward_computes_in_fewer_bits_and_parameters_keep_theirs(stage):
    def run(rank, model):
        section = {"enabled": True, "dtype": "torch.bfloat16"}
        engine = start(model, adamw(model), config_of(stage, torch_autocast=section))
        losses = []
        for step in range(STEPS):
            loss, dtype = loss_of(engine, step, rank)
            assert dtype is torch.bfloat16
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        weights = full_weights(engine)
        assert {value.dtype for value in weights.values()} == {torch.float32}
        engine.destroy()
        return losses, weights

    got = on_ranks(AUTOCAST_RANKS, run)
    plain = stack()
    optimizer = adamw(plain)
    for step in range(STEPS):
        for rank in range(AUTOCAST_RANKS):
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = loss_of(plain, step, rank)
            assert got[rank][0][step] == pytest.approx(float(loss.detach()), rel=1e-5)
            (loss / AUTOCAST_RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    exact = dict(plain.named_parameters())
    for name, value in got[0][1].items():
        torch.testing.assert_close(value, exact[name].detach(), rtol=1e-4, atol=1e-5)


def test_autocast_in_fp16_is_refused():
    section = {"enabled": True, "dtype": "torch.float16"}
    with pytest.raises(NotBuiltError, match=r"torch_autocast\.dtype = 'fp16' .* loss scale"):
        ZeroConfig.coerce(config_of(1, torch_autocast=section))


def test_a_section_that_is_off_changes_nothing():
    model = stack()
    section = {"enabled": False, "dtype": "torch.bfloat16"}
    engine, *_ = hf_zero.initialize(model=model, config=config_of(0, torch_autocast=section))
    assert engine(features(0, 0, 0)).dtype is torch.float32
    engine.destroy()


FREQUENCIES = torch.linspace(0, 1, 4)


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("frequencies", FREQUENCIES.clone())
        self.up.register_buffer("same", self._buffers["frequencies"])
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        found: torch.Tensor = self.down(self.up(x) * self.frequencies.to(x.dtype))
        return found


@pytest.mark.parametrize("written", [None, "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_buffers_are_cast_where_it_is_asked_for(stage, written, tmp_path):
    models = [WithBuffers() for _ in range(2)]
    for p in models[1].buffers():
        p.zero_()  # rank 0's values count
    dtype = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[written]

    def run(rank):
        model: Any = models[rank]
        config = config_of(stage, Plan(precision="bf16"))
        config["data_types"] = {"buffer_dtype": written} if written else {}
        engine = hf_zero.initialize(model=model, optimizer=plain_sgd(model), config=config)[0]
        assert torch.equal(model.frequencies, FREQUENCIES.to(dtype))
        assert model.frequencies.dtype == dtype and model.up.same is model.frequencies
        assert model.count.dtype == torch.long and model.count == 3
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
        engine.step()
        engine.save_checkpoint(tmp_path / "checkpoint")
        model.frequencies.zero_()
        engine.load_checkpoint(tmp_path / "checkpoint")
        assert torch.equal(model.frequencies, FREQUENCIES.to(dtype))
        engine.destroy()

    run_ranks(2, run)

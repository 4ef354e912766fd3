"""Engines whose optimizer steps in one launch: every stage and precision against the oracle,
resumed, offloaded in part, with fp16 overflows.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.ops import dispatch
from hf_zero.optim.fused import FusedStep
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.checked_triton import checked_triton
from tests.helpers.engines import (
    STAGES,
    config_of,
    engine_opener,
    full_weights,
    start,
    train_on_threads,
)
from tests.helpers.models import ARCHITECTURES
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, on_ranks, run_steps, squared
from tests.helpers.training import ArchitectureJob, At, Plan, adamw, trainable


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Kernels run wherever they can, in the checked interpreter; the list grows by the written
    shards at each step of a rank.
    """
    written = []
    step = FusedStep.step

    def counted(self, *args):
        written.append(step(self, *args))
        return written[-1]

    monkeypatch.setattr(FusedStep, "step", counted)
    monkeypatch.setattr(dispatch, "wanted", lambda name, kernels, device: dispatch.runs_on(device))
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    with checked_triton(poison=False):
        yield written


OFTEN = {("fp32", 1), ("fp32", 3), ("bf16", 0), ("bf16", 3), ("fp16", 2), ("fp16", 3)}


@pytest.mark.parametrize(
    "precision, stage",
    fast(itertools.product(("fp32", "bf16", "fp16"), STAGES), lambda *cell: cell in OFTEN),
)
def test_against_the_oracle(stage, precision, launches):
    job = ArchitectureJob(ARCHITECTURES["bert"])
    plan = Plan(ranks=2, steps=2, precision=precision, clip=1.0)
    got = train_on_threads(job, plan, engine_opener(stage))
    oracle.accept(got, job, plan, stage)
    assert len(launches) == 4
    assert all(launches) == (precision != "fp32")


def groups(model):
    """Two groups in each unit, with a rate and a decay of their own."""
    plain = [p for p in trainable(model) if p.dim() == 1]
    decayed = [p for p in trainable(model) if p.dim() > 1]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": plain, "lr": 3e-3, "weight_decay": 0.0},
        ],
        lr=1e-3,
        eps=1e-6,
    )


@pytest.mark.parametrize(
    "ranks, stage",
    fast(itertools.product((1, 3), STAGES), lambda ranks, stage: (ranks == 3) == (stage in (1, 3))),
)
def test_groups_and_schedules(stage, ranks, launches):
    def lower(step, model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.7

    want, norms = by_hand(groups, [[(1.0, 0)]] * 3, ranks, clip=0.5, after_step=lower)

    def run(rank, model):
        optimizer = groups(model)
        engine = start(model, optimizer, config_of(stage, gradient_clipping=0.5))
        seen = []
        for step in range(3):
            run_steps(engine, rank, [step])
            lower(step, model, optimizer)
            seen.append(engine.get_global_grad_norm())
        return full_weights(engine), seen

    for weights, seen in on_ranks(ranks, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)
        assert seen == pytest.approx(norms, rel=1e-6)
    assert len(launches) == 3 * ranks


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_goes_on_with_and_without(stage, launches, tmp_path, monkeypatch):
    """Saved by one launch, resumed by torch's step on other ranks, and the other way round: the
    same weights.
    """
    want, _ = by_hand(adamw, [[(1.0, 0)]] * 3, 1)

    def run(rank, model, first, last):
        engine = start(model, adamw(model), config_of(stage))
        if first:
            engine.load_checkpoint(str(tmp_path))
        run_steps(engine, 0, range(first, last))
        engine.save_checkpoint(str(tmp_path))
        weights = full_weights(engine)
        engine.destroy()
        return weights

    on_ranks(2, run, 0, 1)
    assert len(launches) == 2
    with monkeypatch.context() as unwanted:
        unwanted.setattr(dispatch, "wanted", lambda *_: False)
        on_ranks(1, run, 1, 2)
    assert len(launches) == 2
    oracle.compare_tensors("weights", on_ranks(2, run, 2, 3)[1], want, floor=oracle.ADAM_ROUNDING)
    assert len(launches) == 4


def test_an_fp16_overflow_is_skipped_and_not_counted(launches):
    def run(rank, model):
        engine = start(
            model,
            adamw(model),
            config_of(2, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}),
        )
        before = full_weights(engine)
        engine.backward(squared(engine, At(0, 0, rank), torch.float16) * 1e8)
        engine.step()
        after = full_weights(engine)
        run_steps(engine, rank, [1])
        return before, after, engine.bound.scalars()[0]["step"], engine.skipped_steps

    for before, after, steps, skipped in on_ranks(2, run):
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        assert (steps, skipped) == (1.0, 1)
    assert len(launches) == 2


def test_what_is_offloaded_is_not_in_the_launch(launches):
    """Half of the state in host memory, half updated by the kernel, in one step: the weights of
    the oracle.
    """
    want, _ = by_hand(adamw, [[(1.0, 0)]] * 2, 2)

    def run(rank, model):
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
        engine = start(model, adamw(model), config_of(2, zero_optimization=zero))
        run_steps(engine, rank, range(2))
        return (
            full_weights(engine),
            sum(flat.optimizer_shard.offloaded for flat in engine.flats),
            len(engine.flats),
        )

    for weights, away, flats in on_ranks(2, run):
        assert 0 < away < flats
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)
    assert len(launches) == 4


def windows_of(rank, models, section):
    """(dtypes of the whole gradients, their bytes, weights) after two steps."""
    model = models[rank]
    engine = start(
        model,
        adamw(model),
        config_of(1, Plan(ranks=len(models), precision="bf16", clip=1.0), **section),
    )
    for step in range(2):
        engine.backward(engine(**ARCHITECTURES["gpt2"].batch(step, 0, rank)).loss)
        engine.step()
    windows = [flat.gradient.accumulated_grad for flat in engine.flats]
    found = {window.dtype for window in windows}, sum(window.nbytes for window in windows)
    weights = full_weights(engine)
    engine.destroy()
    return *found, weights


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_16_bit_gradients_of_one_backward_are_kept_in_16_bits(ranks):
    """Nothing is added to them, and the update reads them as they are: the same bits in half the
    memory.
    """

    def run(section):
        return run_ranks(
            ranks, windows_of, [ARCHITECTURES["gpt2"].build() for _ in range(ranks)], section
        )

    wide = run({"data_types": {"grad_accum_dtype": "fp32"}})
    for (dtypes, nbytes, weights), (before, twice, expected) in zip(run({}), wide):
        assert dtypes == {torch.bfloat16} and before == {torch.float32} and twice == 2 * nbytes
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_gradients_that_are_added_up_stay_wide():
    [(dtypes, _, _)] = run_ranks(
        1, windows_of, [ARCHITECTURES["gpt2"].build()], {"gradient_accumulation_steps": 2}
    )
    assert dtypes == {torch.float32}


def storages_of(tensors):
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def added_up(rank, models, section, announced):
    """(for each step of two backwards: dtype after the first, storages of whole and of own
    gradients, launches of the update; weights).
    """
    engine = start(
        models[rank],
        adamw(models[rank]),
        config_of(1, Plan(ranks=len(models), precision="bf16", clip=1.0), **section),
    )
    found = []
    for step in range(2):
        with engine.no_sync() if announced else nullcontext():
            engine.backward(engine(**ARCHITECTURES["gpt2"].batch(step, 0, rank)).loss)
        dtype = engine.flats[0].gradient.accumulated_grad.dtype
        engine.backward(engine(**ARCHITECTURES["gpt2"].batch(step, 1, rank)).loss)
        engine.step()
        storages = [
            len(storages_of(getattr(flat.gradient, each) for flat in engine.flats))
            for each in ("accumulated_grad", "shard")
        ]
        found.append((dtype, *storages, len(engine.bound._fused._launches)))
    weights = full_weights(engine)
    engine.destroy()
    return found, weights


@pytest.mark.parametrize("ranks, announced", [(1, False), (2, True)])
def test_sums_that_the_config_does_not_announce_are_widened_in_one_allocation(ranks, announced):
    """One launch for all of them, for the norm takes one a storage too; and the bits of
    gradients that were wide from the start.
    """

    def run(section):
        return run_ranks(
            ranks,
            added_up,
            [ARCHITECTURES["gpt2"].build() for _ in range(ranks)],
            section,
            announced,
        )

    wide = run({"data_types": {"grad_accum_dtype": "fp32"}})
    for (found, weights), (_, expected) in zip(run({}), wide):
        # ``no_sync`` tells before there is anything to copy
        first = torch.float32 if announced else torch.bfloat16
        assert found == [(first, 1, 1, 1), (torch.float32, 1, 1, 1)]
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


class Living(TorchDispatchMode):
    """Bytes of the storages that operations make, and of those of ``tensors``, at most alive at
    once.
    """

    def __init__(self, tensors):
        super().__init__()
        self._alive = {}
        self.peak = 0
        self._note(tensors)

    def _note(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now)

    @property
    def now(self):
        return sum(nbytes for reference, nbytes in self._alive.values() if not reference.expired())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._note(tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor))
        return out


@pytest.mark.parametrize("filled", [False, True])
def test_the_memory_that_widening_takes(filled):
    """Narrow memory is free when the first flat is wide, and before there is any wide memory if
    nothing is in it.
    """

    def run(rank, model):
        engine = start(model, adamw(model), config_of(0, Plan(ranks=1, precision="bf16")))
        flats = engine.flats
        for flat in flats:
            flat.gradient.accumulated_grad.normal_()
            if filled and flat is not flats[0]:
                flat.gradient.mark_accumulated()
            else:
                flat.gradient.clear()
        values = [flat.gradient.accumulated_grad.float() for flat in flats]
        narrow = sum(flat.gradient.accumulated_grad.nbytes for flat in flats)
        with Living([flat.gradient.accumulated_grad for flat in flats]) as living:
            flats[-1].gradient.upcast()
            first = living.now
            for flat in flats:
                flat.gradient.upcast()
        assert (
            len(flats) > 2
            and first == living.now == 2 * narrow
            and living.peak == (3 if filled else 2) * narrow
        )
        assert len(storages_of(flat.gradient.shard for flat in flats)) == 1
        return all(
            torch.equal(flat.gradient.accumulated_grad, value)
            for flat, value in zip(flats, values)
            if filled
        )

    assert run_ranks(1, run, ARCHITECTURES["gpt2"].build()) == [True]

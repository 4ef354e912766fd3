"""Engines whose optimizer steps in one launch: every stage and precision against the oracle,
resumed, offloaded in part, with fp16 overflows.
"""

from contextlib import nullcontext

import pytest
import torch

from hf_zero.ops import dispatch
from hf_zero.optim.fused import FusedStep
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.checked_triton import checked_triton
from tests.helpers.engines import config_of, engine_opener, full_weights, start, train_on_threads
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, Plan, Way, adamw, trainable


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Written shards of each step of a rank; kernels run in the checked interpreter."""
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


def short():
    return seeded(lambda: Stack(1))


@in_turn("stage, precision", [(3, "bf16"), (2, "fp16")])
def test_against_the_oracle(stage, precision, launches):
    del launches[:]
    job, plan = Way("one block", short), Plan(ranks=2, steps=2, precision=precision, clip=1.0)
    got = train_on_threads(job, plan, engine_opener(stage))
    oracle.accept(got, job, plan, stage)
    # at stage 3 a gather casts the master weights
    assert len(launches) == 4 and all(launches) is (stage == 2)


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


def storages_of(tensors):
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def windows(micros, announced=False, stage=1, **keys):
    """Of each of two steps: dtypes after a backward, bytes, storages, launches; and the weights."""

    def run(rank, model):
        plan = Plan(precision="bf16", clip=1.0)
        engine, found = start(model, adamw(model), config_of(stage, plan, **keys)), []
        kept = "accumulated_grad" if stage < 2 else "shard"
        whole = [flat.gradient for flat in engine.flats]
        for step in range(2):
            for micro in range(micros):
                with engine.no_sync() if announced and not micro else nullcontext():
                    engine.backward(squared(engine, At(step, micro, rank), plan.dtype))
                if micro == 0:
                    dtypes = {getattr(each, kept).dtype for each in whole}
            engine.step()
            storages = [
                len(storages_of(getattr(each, name) for each in whole)) for name in (kept, "shard")
            ]
            nbytes = sum(getattr(each, kept).nbytes for each in whole)
            found.append(
                (
                    dtypes,
                    nbytes,
                    *storages,
                    sum(len(each.launches) for each in engine.bound._fused._tables.values()),
                )
            )
        weights = full_weights(engine)
        engine.destroy()
        return found, weights

    return on_ranks(1, run, build=short)


WIDE = {"data_types": {"grad_accum_dtype": "fp32"}}


@in_turn("stage", [1, 2, 3])
def test_16_bit_gradients_of_one_backward_are_kept_in_16_bits(stage):
    """Nothing is added to them: the same bits in half the memory."""
    for (found, weights), (wide, expected) in zip(
        windows(1, stage=stage), windows(1, stage=stage, **WIDE)
    ):
        for (dtypes, nbytes, *_), (before, twice, *_) in zip(found, wide):
            assert dtypes == {torch.bfloat16} and before == {torch.float32} and twice == 2 * nbytes
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    [(found, _)] = windows(1, stage=stage, gradient_accumulation_steps=2)
    assert found[0][0] == {torch.float32}, "what is added up is wide"


@in_turn("stage, announced", [(1, False), (1, True), (2, False), (3, False)])
def test_sums_that_the_config_does_not_announce_are_widened_in_one_allocation(stage, announced):
    """One launch for all, and the bits of gradients that were wide from the start."""
    wide = windows(2, announced, stage, **WIDE)
    for (found, weights), (_, expected) in zip(windows(2, announced, stage), wide):
        # ``no_sync`` tells before there is anything to copy
        first = torch.float32 if announced else torch.bfloat16
        assert [each[0] for each in found] == [{first}, {torch.float32}]
        assert [each[2:] for each in found] == [(1, 1, 1)] * 2
        assert all(torch.equal(weights[name], value) for name, value in expected.items())

"""Memory of gradients and of their messages: freed after a step, allocated by the next backward,
without an effect on any number.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from hf_zero.device.streams import TensorPool
from hf_zero.zero.layout import training_state
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, Plan, adamw

RANKS = 2


def build():
    return seeded(lambda: Stack(4, 32))


def engine_of(model, stage, precision, keeps=False, **keys):
    zero = {"stage": stage, "keep_step_buffers": keeps, "stage3_param_persistence_threshold": 100}
    plan = Plan(precision=precision, accumulation=2)
    return start(model, adamw(model), config_of(stage, plan, zero_optimization=zero, **keys)), plan


def gradient_bytes(engine):
    """Allocated bytes of gradients."""
    memories = {flat.gradient.memory for flat in engine.flats if flat.trainable}
    return sum(memory.nbytes for memory in memories)


def pooled(engine):
    """Number of buffers kept for messages."""
    axes = [axis for flat in engine.flats for axis in (flat.mesh.shard, flat.mesh.replicate)]
    pools = [engine.backward_pass.reducer._buffers, *(axis.spare for axis in axes)]
    assert all(type(pool) is TensorPool for pool in pools)
    return sum(len(free) for pool in pools for free in pool._free.values())


@in_turn("stage, precision", [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp16")])
def test_memory_of_a_step_is_freed_after_it(stage, precision):
    def run(rank, model):
        engine, plan = engine_of(model, stage, precision)
        whole = sum(
            flat.gradient.shard.nbytes
            if flat.gradient.accumulated_grad is None
            else flat.gradient.accumulated_grad.nbytes
            for flat in engine.flats
        )
        assert gradient_bytes(engine) == 0
        for step in range(2):
            for micro in range(2):
                engine.backward(squared(engine, At(step, micro, rank), plan.dtype))
                assert gradient_bytes(engine) >= whole
                # the last backward of a window leaves no buffer of a message to the update
                assert not micro or pooled(engine) == 0
                engine.step()
            assert gradient_bytes(engine) == pooled(engine) == 0
        engine.backward(squared(engine, At(2, 0, rank), plan.dtype))
        engine.zero_grad()
        assert gradient_bytes(engine) == 0

    on_ranks(RANKS, run, build=build)


def test_a_key_keeps_it():
    def run(rank, model):
        engine, plan = engine_of(model, 2, "bf16", keeps=True)
        before = gradient_bytes(engine)
        for micro in range(2):
            engine.backward(squared(engine, At(0, micro, rank), plan.dtype))
            engine.step()
        return 0 < before == gradient_bytes(engine) and pooled(engine) > 0

    assert on_ranks(RANKS, run, build=build) == [True] * RANKS


@in_turn(
    "stage, precision, in_no_sync",
    [(0, "bf16", True), (1, "bf16", True), (2, "fp32", False), (3, "bf16", True)],
)
def test_no_number_depends_on_it(monkeypatch, stage, precision, in_no_sync):
    """Weights and gradients have the bits of a run that keeps the memory, where freed memory comes
    back as NaN, and in several allocations.
    """
    allocate = training_state.GradientMemory.set_allocated

    def poisoned(memory, allocated):
        fresh = allocated and memory.nbytes == 0
        allocate(memory, allocated)
        if fresh:
            memory._whole.fill_(float("nan"))

    def run(keeps):
        def on_rank(rank, model):
            engine, plan = engine_of(model, stage, precision, keeps, gradient_clipping=0.1)
            grads = []
            for step in range(3):
                for micro in range(2):
                    with ExitStack() as context:
                        if in_no_sync and not micro:
                            context.enter_context(engine.no_sync())
                        engine.backward(squared(engine, At(step, micro, rank), plan.dtype))
                    if not micro:
                        engine.step()
                grads += [
                    flat.gradient.shard.clone() for flat in engine.flats if flat.gradient.ready
                ]
                engine.step()
            state = {name: p.clone() for name, p in engine.consolidated()}
            count = len({flat.gradient.memory for flat in engine.flats if flat.trainable})
            return grads, state, count

        return on_ranks(RANKS, on_rank, build=build)

    monkeypatch.setattr(training_state, "LARGEST", 20_000)
    kept = run(True)
    monkeypatch.setattr(training_state.GradientMemory, "set_allocated", poisoned)
    for (grads, state, count), (own_grads, own_state, own_count) in zip(kept, run(False)):
        assert count == own_count > 1 and len(grads) == len(own_grads) > 3
        assert all(torch.equal(a, b) for a, b in zip(grads, own_grads))
        assert all(torch.equal(state[name], own_state[name]) for name in state)
        assert not any(torch.isnan(value).any() for value in own_state.values())


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="the system has no huge pages")
def test_large_memory_on_the_host_has_huge_pages():
    """The system has the advice for the mapping of an allocation, each time it is made."""
    memory = training_state.GradientMemory([40 << 20], torch.uint8, torch.device("cpu"))
    for _ in range(2):
        memory.set_allocated(False)
        memory.set_allocated(True)
        inside = memory._whole.data_ptr() + (16 << 20)
        flags, here = "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            start, dash, end = line.split(" ")[0].partition("-")
            if dash and ":" not in start:
                here = int(start, 16) <= inside < int(end, 16)
            elif here and line.startswith("VmFlags"):
                flags = line
        assert " hg" in flags, flags

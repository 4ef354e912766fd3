"""Bytes measured on living tensors and on the wire equal those foreseen: state per rank, the most
that is gathered at once, the traffic of a step; memory of gradients and messages, freed after one.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.device.streams import TensorPool
from hf_zero.errors import ConfigError
from hf_zero.logging import parse_rate, rate_in_units
from hf_zero.planning.estimate import traffic
from hf_zero.planning.needs import gathered_bytes
from hf_zero.zero.layout import gradients
from hf_zero.zero.layout.parameter import raw_grad
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.paper import bytes_by_kind
from tests.helpers.plans import planned
from tests.helpers.stacks import on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd, sgd

RANKS = 2


def deep():
    return seeded(lambda: Stack(depth=12, width=64))


def living():
    """Bytes behind living tensors that are younger than ``gc.freeze()``, and their gradients."""
    gc.collect()
    found: dict[int, int] = {}
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            for each in (tensor, raw_grad(tensor) if tensor.is_leaf else None):
                if each is not None and each.device.type == "cpu" and each.layout == torch.strided:
                    storage = each.untyped_storage()
                    if storage.nbytes():
                        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def measured(build, optimizer_of, stage, plan):
    """Bytes per rank between a backward and its step: living ones, and as the engine counts."""

    def run(rank, model):
        engine = start(model, optimizer_of(model), config_of(stage, plan))
        for number in range(3):
            loss = squared(engine, At(number, 0, rank), plan.dtype)
            engine.backward(loss)
            del loss
            if number < 2:
                engine.step()
        dist.barrier()
        total = living() / RANKS if rank == 0 else 0.0
        dist.barrier()
        return total, sum(engine.state_bytes().values())

    gc.collect()
    gc.freeze()
    answers = on_ranks(RANKS, run, build=build)
    assert len({state for _, state in answers}) == 1
    return answers[0]


@in_turn(
    "stage, precision, optimizer_of, moments, frozen",
    [
        (0, "bf16", plain_sgd, 0, 0),
        (1, "fp32", adamw, 2, 11),
        (2, "fp16", sgd, 1, 0),
        (3, "bf16", adamw, 2, 0),
        (3, "fp32", adamw, 2, 11),
    ],
)
def test_state_between_backward_and_step(stage, precision, optimizer_of, moments, frozen):
    """State is what the formula says; what else lives is a few buffers, however deep the model."""

    def build():
        model = deep()
        model.blocks[len(model.blocks) - frozen :].requires_grad_(False)
        return model

    total, state = measured(build, optimizer_of, stage, Plan(precision=precision))
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    model = build()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rest = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    predicted = sum(bytes_by_kind(stage, RANKS, names[precision], moments).values()) * trained
    predicted += rest * 4 / (RANKS if stage == 3 else 1)
    assert state == pytest.approx(predicted, rel=0.05), (
        f"{state / trained:.3f} bytes a parameter, predicted {predicted / trained:.3f}"
    )
    unit = max(sum(p.numel() for p in block.parameters()) for block in model.blocks) * 4
    assert state <= total <= state + 4 * unit, (
        f"{(total - state) / unit:.1f} units' worth of other tensors"
    )


WIDTH, DEPTH = 48, 6
BLOCK = 18912  # bytes of a block of that width, in bf16


def deeper():
    return seeded(lambda: Stack(depth=DEPTH, width=WIDTH))


@in_turn("ranks, prefetch, ahead", [(1, 0, 0), (2, BLOCK // 2, 1), (2, 50_000_000, 2)])
def test_the_most_that_is_gathered_at_once(ranks, prefetch, ahead):
    zero = {"stage": 3, "stage3_prefetch_bucket_size": prefetch}

    def run(rank, model):
        engine = start(
            model, adamw(model), config_of(3, Plan(precision="bf16"), zero_optimization=zero)
        )
        held: list[int] = []
        for unit in engine.units:

            def launch(*how, gather=unit.launch_gather, **named):
                gather(*how, **named)
                held.append(
                    sum(
                        flat.full.untyped_storage().nbytes()
                        for flat in engine.flats
                        if flat.sharded
                    )
                )

            unit.launch_gather = launch
        run_steps(engine, rank, range(3))
        with torch.no_grad():
            squared(engine, At(0, 0, rank), torch.bfloat16)
        assert not any(flat.full.untyped_storage().size() for flat in engine.flats if flat.sharded)
        return max(held)

    plan = planned(deeper(), config_of(3, Plan(precision="bf16"), zero_optimization=zero), ranks)
    predicted = gathered_bytes(plan)
    assert on_ranks(ranks, run, build=deeper) == [predicted] * ranks
    root = sum(flat.spec.layout.numel for flat in plan.flats if not flat.unit.name) * 2
    assert predicted == pytest.approx(root + (1 + ahead) * BLOCK, rel=0.1)


FOUR: dict[str, Any] = {"compressed_communication": {"bits": 4}}
PLUS: dict[str, Any] = {"zero_quantized_gradients": True, "zero_quantized_weights": True}
MICRO = 2


def model():
    return seeded(lambda: Stack(4, 64))


@in_turn(
    ("stage", "precision", "zero", "more", "way"),
    [
        (0, "bf16", {}, {}, "dense"),
        (1, "bf16", {}, {"replicate_size": 2}, "dense"),
        (3, "bf16", {}, {}, "dense"),
        (2, "fp32", {}, FOUR, "4 bits both ways"),
        (3, "bf16", PLUS, {}, "ZeRO++: int4 gradients, int8 weights"),
    ],
)
def test_bytes_are_those_that_are_sent(stage, precision, zero, more, way):
    ranks = 4 if more.get("replicate_size") else 2
    plan = Plan(precision=precision, accumulation=MICRO)
    config = config_of(stage, plan, **more)
    config["zero_optimization"].update(stage3_param_persistence_threshold=0, **zero)

    def run(rank, module):
        engine = start(module, adamw(module), config)
        for step in range(2):
            engine.mesh.stats.keep_log = True
            engine.mesh.stats.log.clear()
            for micro in range(MICRO):
                engine.backward(squared(engine, At(step, micro, rank), plan.dtype))
                engine.step()
        twice = {"all_reduce": 2}
        sizes = [
            twice.get(operation, 1) * size
            for operation, key, size in engine.mesh.stats.log
            if "norm" not in key and "used" not in key
        ]
        return sum(sizes) / 2  # each axis has two ranks

    sent = on_ranks(ranks, run, build=model)[0]
    ways = traffic(model(), ranks, stage=stage, config=config)[stage]
    foreseen = {each.name: each.nbytes for each in ways}[way]
    # at stage 3 units that are still whole are not gathered
    assert 0.98 < foreseen / sent < (1.25 if stage == 3 else 1.06)


def test_speeds_of_links():
    for text, bits, shown in (
        ("100Mbit", 1e8, "100 Mbit/s"),
        ("1Gbit/s", 1e9, "1 Gbit/s"),
        ("2.5 gbps", 2.5e9, "2.5 Gbit/s"),
        ("800b", 800.0, "800 bit/s"),
        ("1Tbit", 1e12, "1 Tbit/s"),
        ("999.9Mbit", 999.9e6, "1 Gbit/s"),
        ("1234Tbit", 1234e12, "1,230 Tbit/s"),
    ):
        assert parse_rate(text) == bits and rate_in_units(bits) == shown
    for text in ("fast", "0Gbit", "1GB", "-1Mbit", f"{'9' * 308}Gbit"):
        with pytest.raises(ConfigError, match=text):
            parse_rate(text)


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
    dims = [dim for flat in engine.flats for dim in (flat.mesh.shard, flat.mesh.replicate)]
    pools = [engine.pass_runner.reducer._buffers, *(dim.spare for dim in dims)]
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
    allocate = gradients.GradientMemory.set_allocated

    def poisoned(memory, allocated):
        fresh = allocated and memory.nbytes == 0
        allocate(memory, allocated)
        if fresh:
            memory._elements.fill_(float("nan"))

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

    monkeypatch.setattr(gradients, "LARGEST", 20_000)
    kept = run(True)
    monkeypatch.setattr(gradients.GradientMemory, "set_allocated", poisoned)
    for (grads, state, count), (own_grads, own_state, own_count) in zip(kept, run(False)):
        assert count == own_count > 1 and len(grads) == len(own_grads) > 3
        assert all(torch.equal(a, b) for a, b in zip(grads, own_grads))
        assert all(torch.equal(state[name], own_state[name]) for name in state)
        assert not any(torch.isnan(value).any() for value in own_state.values())


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="the system has no huge pages")
def test_large_memory_on_the_host_has_huge_pages():
    """The system has the advice for the mapping of an allocation, each time it is made."""
    memory = gradients.GradientMemory([40 << 20], torch.uint8, torch.device("cpu"))
    for _ in range(2):
        memory.set_allocated(False)
        memory.set_allocated(True)
        inside = memory._elements.data_ptr() + (16 << 20)
        flags, here = "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            start, dash, end = line.split(" ")[0].partition("-")
            if dash and ":" not in start:
                here = int(start, 16) <= inside < int(end, 16)
            elif here and line.startswith("VmFlags"):
                flags = line
        assert " hg" in flags, flags


@pytest.mark.parametrize("keys", [{}, {"replicate_size": 2}])
def test_a_run_warns_of_the_experimental_keys_that_it_uses(keys, heard):
    def run(rank, model):
        start(model, adamw(model), {**config_of(1), **keys}).destroy()

    on_ranks(RANKS, run)
    warned = [line for line in heard if "experimental" in line]
    assert len(warned) == len(keys) and all("replicate_size" in line for line in warned)

"""Bytes of state per rank, measured on living tensors, equal the policy's formula within 5 %."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from hf_zero.zero.layout.parameter import raw_grad
from hf_zero.zero.layout.stage_policy import bytes_per_parameter
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import on_each_rank, on_ranks, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd, sgd

RANKS = 4


def deep():
    return seeded(lambda: Stack(depth=12, width=48))


def living() -> int:
    """Bytes of the storages behind living tensors that are younger than ``gc.freeze()``,
    gradients that only autograd knows included.
    """
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


def measured(build, optimizer_of, stage, plan) -> tuple[float, int]:
    """Bytes per rank between a backward and its step: of all living tensors, and of state as the
    engine counts it.
    """

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


SETTINGS = [
    ("fp32", adamw, 2),
    ("bf16", adamw, 2),
    ("fp16", adamw, 2),
    ("fp32", sgd, 1),
    ("bf16", plain_sgd, 0),
]
OFTEN = [("fp32", adamw, stage) for stage in STAGES] + [("bf16", adamw, 2), ("bf16", adamw, 3)]


@pytest.mark.parametrize(
    "precision, optimizer_of, moments, stage",
    fast(
        ((*each, stage) for each in SETTINGS for stage in STAGES),
        lambda precision, make, _, stage: (precision, make, stage) in OFTEN,
    ),
)
def test_state_between_backward_and_step(stage, precision, optimizer_of, moments):
    """State is what the formula says; whatever else lives is a few communication buffers,
    however deep the model.
    """
    total, state = measured(deep, optimizer_of, stage, Plan(precision=precision))
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    model = deep()
    trained = sum(p.numel() for p in model.parameters())
    predicted = bytes_per_parameter(stage, RANKS, names[precision], moments) * trained
    assert state == pytest.approx(predicted, rel=0.05), (
        f"{state / trained:.3f} bytes a parameter, predicted {predicted / trained:.3f}"
    )
    unit = max(sum(p.numel() for p in block.parameters()) for block in model.blocks) * 4
    assert state <= total <= state + 4 * unit, (
        f"{(total - state) / unit:.1f} units' worth of other tensors"
    )


@pytest.mark.parametrize("stage", fast(STAGES, lambda stage: stage in (1, 3)))
def test_frozen_parameters_cost_their_own_bytes_alone(stage):
    def frozen():
        model = deep()
        model.blocks[1:].requires_grad_(False)
        return model

    total, state = measured(frozen, adamw, stage, Plan())
    model = frozen()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rest = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    predicted = bytes_per_parameter(stage, RANKS, "float32", 2) * trained + rest * 4 / (
        RANKS if stage == 3 else 1
    )
    assert state == pytest.approx(predicted, rel=0.05)
    unit = max(sum(p.numel() for p in block.parameters()) for block in model.blocks) * 4
    assert state <= total <= state + 4 * unit


@on_each_rank(2, build=deep)
def test_nothing_is_left_gathered_after_a_step_or_an_evaluation(rank, model):
    engine = start(model, adamw(model), config_of(3))
    for number in range(2):
        engine.backward(squared(engine, At(number, 0, rank)))
        engine.step()
        assert sum(flat.full.untyped_storage().size() for flat in engine.flats) == 0
    with torch.no_grad():
        squared(engine, At(0, 0, rank))
    assert sum(flat.full.untyped_storage().size() for flat in engine.flats) == 0


def test_dropped_engines_are_freed():
    """No cycle through hooks or patched methods outlives destroy() and the garbage collector."""
    import weakref

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        engine.backward(squared(engine, At(0, 0, rank)))
        engine.step()
        engine.destroy()
        return weakref.ref(engine)

    references = on_ranks(2, run)
    gc.collect()
    assert [reference() for reference in references] == [None, None]

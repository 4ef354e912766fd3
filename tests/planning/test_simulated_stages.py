"""Simulated pipelines: messages, waits and bytes of real ranks, and the time of a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError
from hf_zero.planning.needs import state_bytes
from hf_zero.planning.simulation import Machine
from hf_zero.planning.simulation.machine import OffloadTimes, seconds_of_stages
from hf_zero.planning.simulation.recording import (
    FORWARD,
    Arrival,
    Group,
    Message,
    Recording,
    StepPlace,
    Wait,
    Work,
)
from hf_zero.planning.simulation.shapes import ShapeCache, tensors_of
from hf_zero.planning.simulation.simulated_engines import record_plans, recorder_of
from hf_zero.planning.simulation.simulating import plans_of_stages
from hf_zero.planning.simulation.stages import record_stage
from hf_zero.zero.state_bytes import held_bytes
from tests.helpers.cells import fast, in_one_item
from tests.helpers.engines import start
from tests.helpers.models import seeded
from tests.helpers.processes import run_processes
from tests.helpers.tensor_parallel import llama, mixtral

LENGTH = 16


def model(tied: bool = False) -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 256, "num_hidden_layers": 6}
    return seeded(lambda: llama(tied=tied, **sizes))


def config_of(stage: int, micro_batches: int, **keys: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": micro_batches, **keys,
    }  # fmt: skip


RECOMPUTED = {"activation_checkpointing": {"blocks": True}}
FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 8}}
GPIPE = {"pipeline": {"schedule": "gpipe"}}
# by ranks: stages, tensor-parallel ranks, whether embeddings are tied to the head, configuration
REAL: dict[int, list[tuple[int, int, bool, dict[str, Any]]]] = {
    2: [
        (2, 1, True, config_of(0, 4, **RECOMPUTED)),
        (2, 1, False, config_of(1, 5, **GPIPE, **FP16)),
    ],
    4: [
        (4, 1, True, config_of(1, 7)),
        (2, 2, False, config_of(1, 5, **RECOMPUTED)),
        (2, 1, False, config_of(1, 1)),
    ],
}  # fmt: skip


def events(recording: Any) -> list[Any]:
    """Return the messages, arrivals and waits of a step."""
    found = []
    for each in recording.step():
        if isinstance(each, Wait):
            found.append(("wait", each.message.operation, each.message.unit))
        elif isinstance(each, Message):
            kind = "arrives" if isinstance(each, Arrival) else "sent"
            found.append((kind, each.operation, each.unit, each.group.ranks, each.nbytes))
    return found


def most(recording: Any) -> dict[str, int]:
    return {phase: held for phase, (held, _) in recording.peaks.items()}


def real_steps(rank: int, ranks: int) -> list[Any]:
    """Return, for each case, the messages of a step of a real engine, the most bytes that it holds
    besides its state, by phase, and those of its state.
    """
    found = []
    for stages, tensor, tied, config in REAL[ranks]:
        init_parallel(ParallelDims(ranks))
        whole = hf_zero.tensor_parallel(model(tied), tensor)
        module = hf_zero.pipeline_stages(whole, stages)
        engine = start(module, torch.optim.AdamW(module.parameters(), 1e-3), config)
        ids = torch.ones(2, LENGTH, dtype=torch.int64)
        window = [{"input_ids": ids, "labels": ids}] * config["gradient_accumulation_steps"]
        step = record_stage(recorder_of(engine, simulated=False), window)
        state = {key: nbytes for key, nbytes in held_bytes(engine).items() if nbytes}
        engine.destroy()
        found.append((events(step), most(step), state))
    return found


@pytest.mark.parametrize("ranks", fast(REAL, lambda ranks: ranks == 2))
def test_a_step_is_that_of_real_ranks(ranks: int) -> None:
    """Messages, arrivals and waits are equal, in order, bytes of state are equal, and the most
    bytes of each phase within 1 %.
    """
    found = run_processes(ranks, real_steps, ranks, timeout=500)
    wrong: list[Any] = []
    for place, (stages, tensor, tied, config) in enumerate(REAL[ranks]):
        for column in range(ranks // stages):
            _, plans = plans_of_stages(
                model(tied), ranks, None, config=config, pipeline_parallel=stages,
                tensor_parallel=tensor, rank=column, device=torch.device("cpu"),
            )  # fmt: skip
            for own, recording in zip(plans, record_plans(plans, LENGTH)):
                sent, held, state = found[own.rank][place]
                simulated = {
                    key: nbytes
                    for key, nbytes in state_bytes(own, between_steps=True).items()
                    if nbytes
                }
                if simulated != state:
                    wrong.append((place, own.rank, simulated, state))
                at_rest = sum(state.values())
                here = {phase: at_rest + each for phase, each in most(recording).items()}
                there = {phase: at_rest + each for phase, each in held.items()}
                if here != pytest.approx(there, rel=0.01):
                    wrong.append((place, own.rank, here, there))
                pairs = itertools.zip_longest(events(recording), sent)
                wrong += [(place, own.rank, n, *p) for n, p in enumerate(pairs) if p[0] != p[1]][:1]
    assert not wrong


HERE = StepPlace(FORWARD, "block", 0)
PAIR = Group("pipeline", (0, 1))
SLOW = Machine(flops=10, memory=10, node=10, network=10, latency=0, ranks_per_host=2)


def of_two(*first: Any) -> dict[int, Recording]:
    """Two stages: ``first``, and one that works a second on what it receives, and another."""
    arrival = Arrival(HERE, "send_activations", "stages 0 and 1", PAIR, 20)
    second = [arrival, Work(HERE, 10), Wait(HERE, arrival), Work(HERE, 10)]
    return {0: Recording(1, [*first]), 1: Recording(1, second)}


def test_a_message_begins_when_both_ends_are_ready() -> None:
    """Three seconds of work before it, two seconds of message, one second of work."""
    sent = Message(HERE, "send_activations", "stages 0 and 1", PAIR, 20)
    both = of_two(Work(HERE, 30), sent, Wait(HERE, sent))
    found = seconds_of_stages(both, SLOW, dict.fromkeys(both, OffloadTimes()))
    assert (found[0].step, found[0].exposed, found[0].messages) == (5, 2, 2)
    assert (found[1].step, found[1].exposed, found[1].messages) == (6, 4, 0)


def test_a_message_that_nobody_sends_is_refused() -> None:
    both = of_two(Work(HERE, 30))
    with pytest.raises(ConfigError, match="ranks 1 wait for each other"):
        seconds_of_stages(both, SLOW, dict.fromkeys(both, OffloadTimes()))


REFUSED: dict[str, dict[str, Any]] = {
    "4 ranks cannot be .* 3 pipeline parallel": {"pipeline_parallel": 3},
    "4 stages over 3 layers": {
        "model": llama(num_hidden_layers=1), "params": None, "pipeline_parallel": 4,
    },
    "pipeline does not go with zero_optimization.stage: 3": {"stage": 3},
    "sequence_parallel does not go with pipeline: stages pass whole": {"sequence_parallel": 2},
    "experts over 2 ranks in a pipeline of 2 stages": {"expert_parallel": 2},
    "stages_per_rank=1": {"config": {"pipeline": {"schedule": "interleaved_1f1b"}}},
    "MixtralForCausalLM": {"model": mixtral(), "params": None},
}  # fmt: skip


@in_one_item(REFUSED)
def test_refusals(said: str) -> None:
    given = {"pipeline_parallel": 2, "params": 2e6, "micro_batches": 4, "sequence_length": 16}
    with pytest.raises(ConfigError, match=said):
        hf_zero.simulate(ranks=4, **given | REFUSED[said])


CALLS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda a, b: torch.mul(a, 2),
    lambda a, b: torch.mul(a.long(), 2),
    lambda a, b: torch.mul(a.long(), 2.0),
    lambda a, b: torch.cat([a, b], -1),
    lambda a, b: torch.native_layer_norm(a, (4,), None, None, 1e-5),
    lambda a, b: torch.split(a, 2),
    lambda a, b: a.t().reshape(-1, 2),
    lambda a, b: torch.ops.aten._unsafe_view(a, (2, 6)),
    lambda a, b: a.mul_(b),
]


def test_kept_shapes_are_those_of_torch() -> None:
    """Of one cache for all calls: results of the first call, which runs, and the second are alike:
    shapes, strides, dtypes, and whether they share memory with an argument.
    """
    cache = ShapeCache()

    class Cached(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return cache(func, args, kwargs or {})

    def described(call: Any, mode: Any) -> list[Any]:
        given = [torch.zeros(3, 4, device="meta") for _ in range(2)]
        with mode:
            out = call(*given)
        held = [each.untyped_storage()._cdata for each in given]
        return [
            (each.shape, each.stride(), each.dtype, each.device.type, each.storage_offset(),
             each.untyped_storage().nbytes(), each.untyped_storage()._cdata in held)
            for each in tensors_of((out,))
        ]  # fmt: skip

    for number, call in enumerate(CALLS):
        plain = described(call, nullcontext())
        assert plain and [described(call, Cached()) for _ in range(3)] == [plain] * 3, number

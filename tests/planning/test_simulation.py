"""Simulated steps: the tables of the ZeRO paper, and what engines of real ranks hold and send."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.planning.needs import state_bytes
from hf_zero.planning.simulation.figures import model_states
from hf_zero.planning.simulation.measuring import Measured
from hf_zero.planning.simulation.recording import Message, Recorder, Wait, record
from hf_zero.planning.simulation.simulated_engines import dims_of, record_plans
from hf_zero.planning.simulation.simulating import plans_of_stages
from hf_zero.zero.layout.planner import replan
from hf_zero.zero.layout.stage_policy import POLICIES
from hf_zero.zero.state_bytes import held_bytes
from tests.helpers.cells import fast, in_one_item
from tests.helpers.engines import start
from tests.helpers.models import seeded
from tests.helpers.paper import traffic
from tests.helpers.processes import run_processes
from tests.helpers.tensor_parallel import llama, mixtral

# Table 1 of Rajbhandari et al., arXiv 1910.02054: GB of model states of a device, by parameters
# and devices, at stages 1, 2 and 3
PAPER = {
    7.5e9: {1: (120, 120, 120), 64: (31.4, 16.6, 1.88), 1024: (30.1, 15.1, 0.12)},
    1e12: {1: (16000, 16000, 16000), 64: (4187, 2218, 250), 1024: (4011, 2013, 15.6)},
}
HOST = torch.device("cpu")
CAUSAL = ["LlamaForCausalLM"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "architectures": CAUSAL,
}


def test_model_states_are_those_of_the_paper() -> None:
    """Stage 0 is the paper's baseline, of 16 bytes a parameter on each device."""
    for parameters, ranks in itertools.product(PAPER, (1, 64, 1024)):
        base = plans_of_stages(None, ranks, 0, params=parameters)[1][0]
        for stage, figure in enumerate((16e-9 * parameters, *PAPER[parameters][ranks])):
            settings = base.settings
            own = replan(
                base, settings.placed(stage, settings.offload_optimizer, settings.offload_param)
            )
            found = sum(model_states(own, narrow=True).values()) / 1e9
            digit = 0.5 * 10.0 ** -len(f"{figure}".partition(".")[2].rstrip("0"))
            figure *= 14 / 16 if stage == 3 else 1
            assert found == pytest.approx(figure, rel=0.01, abs=digit), (parameters, ranks, stage)


@pytest.mark.parametrize(("stage", "micro_batches"), [(0, 2), (1, 5), (2, 2), (3, 2)])
def test_traffic_is_that_of_the_paper(stage: int, micro_batches: int) -> None:
    """Elements that all collectives move, in multiples of the parameters: 2, 2, 2, 3."""
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True}, "gradient_accumulation_steps": micro_batches,
        "train_micro_batch_size_per_gpu": 1,
    }  # fmt: skip
    model = LlamaConfig(**SIZES, num_hidden_layers=2)
    found = hf_zero.simulate(model, 4, config=config, sequence_length=8)
    moved: Counter[str] = Counter()
    units: dict[str, list[str]] = {}
    for each in found.collectives:
        if each.phase != "step" or each.unit.startswith("updated"):
            moved[each.operation] += each.nbytes // 2 * (1 + (each.operation == "all_reduce"))
            units.setdefault(f"{each.phase} {each.operation}", []).append(each.unit)
    elements = 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 64 + 2 * 512 * 64
    assert found.parameters == elements
    kept = 0
    if stage == 3:
        still = {"(root)", units["forward all_gather"][-1]}
        assert set(units["forward all_gather"]) - set(units["backward all_gather"]) == still
        kept = sum(
            each.nbytes // 2
            for each in found.collectives
            if each.unit in still and each.phase == "forward"
        )
    paper = traffic(stage, micro_batches) * elements
    assert paper < sum(moved.values()) + kept < 1.03 * paper  # padding


def small(config: Mapping[str, Any] | None = None) -> torch.nn.Module:
    """A decoder; with expert parallelism in ``config`` a mixture whose experts get equally many
    tokens.
    """
    if "expert_parallel" not in (config or {}):
        return seeded(lambda: llama(hidden_size=64, intermediate_size=256, vocab_size=256))
    model = seeded(mixtral)
    for module in model.modules():
        if isinstance(module, MixtralExperts):
            module.register_forward_pre_hook(spread_evenly)
    return model


def spread_evenly(module: Any, given: Any) -> Any:
    states, chosen, weights = given
    at = torch.arange(chosen.numel(), device=chosen.device) % 4
    return states, at.view_as(chosen), weights


def messages(recording: Any) -> list[Any]:
    """Return the messages and waits of a step."""
    return [
        (each.operation, each.unit, each.group.ranks, each.nbytes)
        if isinstance(each, Message)
        else (each.message.operation, each.message.unit)
        for each in recording.step()
        if isinstance(each, Message | Wait)
    ]


def held(recording: Any) -> int:
    return int(max(most for most, _ in recording.peaks.values()))


def config_of(stage: int, zero: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, **(zero or {})}, "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, **keys,
    }  # fmt: skip


FEW_BITS = {"zero_quantized_gradients": True, "zero_quantized_weights": True}
STAGES = [config_of(stage) for stage in POLICIES]
SPLIT = [
    config_of(3, FEW_BITS),
    *(config_of(stage, tensor_parallel={"autotp_size": 2}) for stage in (1, 3)),
]
EXPERTS = [
    config_of(stage, expert_parallel={"enabled": True, "autoep_size": 2}) for stage in (1, 3)
]
MESHES = [
    *(config_of(stage, replicate_size=2) for stage in (1, 3)),
    config_of(3, {"zero_hpz_partition_size": 2}),
    config_of(3, {"mics_shard_size": 2}),
]
FP16 = [
    config_of(stage, bf16={"enabled": False}, fp16={"enabled": True, "loss_scale": 8})
    for stage in (1, 3)
]
REAL = {  # experts last: they stay spread for the life of the processes
    2: [STAGES[0], FP16[0], SPLIT[2], EXPERTS[1]],
    4: [*STAGES, *FP16, *SPLIT, *MESHES, *EXPERTS],
}


def real_steps(rank: int, configs: list[Any]) -> list[tuple[list[Any], int, dict[Any, int]]]:
    """Return, for each of ``configs``, the messages of a step of a real engine, the most bytes that
    it holds besides its state, and those of its state.
    """
    found = []
    for config in configs:
        model = small(config)
        if "tensor_parallel" in config:
            hf_zero.tensor_parallel(model, 2)
        engine = start(model, torch.optim.AdamW(model.parameters(), 1e-3), config)
        ids = torch.ones(2, 16, dtype=torch.int64)
        recorder = Recorder(engine, dims_of(engine))
        step = record(recorder, lambda: engine(ids, labels=ids, return_dict=False)[0], 2)  # noqa: B023
        state = {key: nbytes for key, nbytes in held_bytes(engine).items() if nbytes}
        engine.destroy()
        found.append((messages(step), held(step), state))
    return found


@pytest.mark.parametrize("ranks", fast(REAL, lambda ranks: ranks == 2))
def test_a_step_is_that_of_real_ranks(ranks: int) -> None:
    """Messages and waits are equal, in order, bytes of state are equal, and the most bytes of a
    step within 1 %, except where kernels that do not run without memory replace torch's operations.
    """
    found = run_processes(ranks, real_steps, REAL[ranks], timeout=500)
    wrong = []
    for (place, config), rank in itertools.product(enumerate(REAL[ranks]), (0, ranks - 1)):
        own = plans_of_stages(small(config), ranks, None, config=config, rank=rank, device=HOST)[1][
            0
        ]
        recording = record_plans([own], 16)[0]
        sent, most, state = found[rank][place]
        at_rest = sum(state.values())
        in_kernels = "zero_quantized_weights" in config["zero_optimization"]
        if not in_kernels and held(recording) + at_rest != pytest.approx(most + at_rest, rel=0.01):
            wrong.append((config, rank, held(recording) + at_rest, most + at_rest))
        if messages(recording) != sent:
            first = next(
                pair for pair in itertools.zip_longest(messages(recording), sent)
                if pair[0] != pair[1]
            )  # fmt: skip
            wrong.append((config, rank, *first))
        if {
            key: nbytes for key, nbytes in state_bytes(own, between_steps=True).items() if nbytes
        } != state:
            wrong.append((config, rank, state_bytes(own, between_steps=True), state))
    assert not wrong


def test_gathers_in_float8_have_half_the_bytes() -> None:
    sent = {}
    for on in (False, True):
        section = {"recipe": "tensorwise", "emulate": True, "gather_weights": on}
        config = config_of(3, {"stage3_param_persistence_threshold": 500}, float8_training=section)
        own = plans_of_stages(small(), 2, None, config=config, rank=0, device=HOST)[1][0]
        sent[on] = [
            (message[1], message[3])
            for message in messages(record_plans([own], 16)[0])
            if message[0] == "all_gather" and len(message) > 2
        ]
    scales = "scales of float8 weights", 2 * 4 * 2 * 7  # ranks, bytes, weights of two layers
    assert sent[True].count(scales) == 1
    sent[True].remove(scales)
    matrices = 3 * 64 * 256 + 2 * 64 * 64 + 2 * 64 * 32  # of a layer, whose norms stay whole
    halves = {f"model.layers.{n}": matrices for n in range(2)}
    assert [(unit, halves.get(unit, nbytes)) for unit, nbytes in sent[False]] == sent[True]
    assert all(nbytes == 2 * halves.get(unit, nbytes / 2) for unit, nbytes in sent[False])


def test_parameters_without_a_gradient_leave_the_others_to_be_updated() -> None:
    """They are in a flat buffer with others, which is sent after the update."""

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"rows": rows, "loss": self.used(rows).sum()}

    found = hf_zero.simulate(
        Named(), 4, 1, batch=lambda rows, _: {"rows": torch.zeros(rows, 64, device="meta")}
    )
    sent = {each.unit.partition(" ")[0]: each.nbytes for each in found.collectives}
    assert sent["updated"] == 2 * 9 * 4 * 256  # 2 × (64 × 64 + 64), whole blocks on each rank
    assert found.flops == 2 * 2 * 64 * 64  # the product of the forward, that of the weight


def test_a_process_in_a_job_simulates_nothing() -> None:
    own = plans_of_stages(None, 2, 3, params=1e6)[1][0]
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        with pytest.raises(ConfigError, match="this one is in a job of 3 ranks"):
            record_plans([own], 8)[0]
    finally:
        dist.destroy_process_group()
    assert record_plans([own], 8)[0].events


MEASURED = Measured("model.layers.0", 2.0, 1e9, 1e-5, 2, 1e-3, 1e8, 0.25, False)
REFUSED: dict[str, dict[str, Any]] = {
    "stage 7 is unknown; choose one of 0, 1, 2, 3$": {"stage": 7},
    "stage True is unknown": {"stage": True},
    "params = inf is no size": {"params": float("inf")},
    r"params = 1e\+30 is no size": {"params": 1e30},
    "params = 10 is no size": {"params": 10},
    "params = '7B' is no size": {"params": "7B"},
    "4 ranks": {"expert_parallel": 3},
    "rank 4 is none of 4 ranks": {"rank": 4},
    "rank '1' is none of 4 ranks": {"rank": "1"},
    "length of '8' is not a number of tokens": {"sequence_length": "8"},
    f"length of {10**30} is not .* from 1 to": {"sequence_length": 10**30},
    "machine = 'dgx'": {"machine": "dgx"},
    "measured = 3": {"measured": 3},
    "measured rates are of whole blocks": {"measured": MEASURED, "tensor_parallel": 2},
    "whole blocks, .* measure without it": {"measured": MEASURED, "context_parallel": 2},
    "is of the block h.0, which the simulated model does not run": {
        "measured": replace(MEASURED, block="h.0"),
        "sequence_length": 8,
    },
    "batch = 3": {"batch": 3},
    "batch= gives a list": {"batch": lambda rows, length: [torch.empty(rows, length)]},
    "Linear cannot be trained without memory": {"model": torch.nn.Linear(4, 4), "params": None},
}


def test_a_number_of_numpy_is_a_rank_and_a_name_a_device() -> None:
    given: dict[str, Any] = {"rank": np.int64(1), "device": "cpu"}
    assert hf_zero.simulate(params=2e6, ranks=4, **given).rank == 1


@in_one_item(REFUSED)
def test_refusals(said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hf_zero.simulate(ranks=4, **{"params": 2e6} | REFUSED[said])


@in_one_item([{"context_parallel": 2}, {"context_parallel": 2, "sequence_parallel": 2}])
def test_keys_and_values_go_around_a_ring(sizes: dict[str, int]) -> None:
    """Once a forward; in a backward once more, with their gradients in fp32."""
    found = hf_zero.simulate(small(), 4, 2, sequence_length=16, **sizes)
    whole = hf_zero.simulate(small(), 4, 2, sequence_length=16)
    sent = [each for each in found.collectives if each.operation == "send_to_next"]
    assert [each.phase for each in sent] == ["forward", "backward", "backward"]
    assert {each.ranks for each in sent} == {2}
    forward, again, gradients = (each.nbytes for each in sent)
    assert forward == again == gradients / 2 and all(
        each.wire_bytes == each.nbytes for each in sent
    )
    assert found.flops == whole.flops / math.prod(sizes.values())
    assert found.phases[0].device < whole.phases[0].device

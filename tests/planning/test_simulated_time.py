"""The time of a recorded step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.integrations.transformers.meta_model import sized_model
from hf_zero.planning.simulation import Machine, Measured, measure
from hf_zero.planning.simulation.machine import (
    RATES,
    OffloadTimes,
    Seconds,
    offload_times,
    seconds_of_stages,
)
from hf_zero.planning.simulation.recording import (
    BACKWARD,
    FORWARD,
    STEP,
    Group,
    Message,
    Recording,
    StepPlace,
    Wait,
    Work,
)
from hf_zero.planning.simulation.simulated_engines import record_plans
from hf_zero.planning.simulation.simulating import plans_of_stages
from tests.helpers.cells import in_one_item
from tests.helpers.processes import run_processes

HOST = torch.device("cpu")
HERE = StepPlace(FORWARD, "block", 0)
PAIR = Group("two", (0, 1))
# a second for 10 FLOPs, 10 bytes of memory, 10 bytes on the link of a host of two ranks
SLOW = Machine(flops=10, memory=10, node=10, network=10, latency=0, ranks_per_host=2)


def seconds(recording: Recording, machine: Machine, away: OffloadTimes | None = None) -> Seconds:
    """The time of one rank."""
    return seconds_of_stages({0: recording}, machine, {0: away or OffloadTimes()})[0]


def gather(nbytes: int, group: Group = PAIR) -> Message:
    return Message(HERE, "all_gather", "block", group, nbytes)


def work(flops: float = 0, nbytes: int = 0, operations: int = 0) -> Work:
    return Work(HERE, flops, nbytes, operations)


def test_a_message_beside_computation_costs_what_is_left_of_it() -> None:
    sent = gather(60)  # 30 bytes of each: 3 seconds
    found = seconds(Recording(1, [sent, work(10), Wait(HERE, sent), work(20)]), SLOW)
    assert (found.step, found.compute, found.messages, found.exposed) == (5, 3, 3, 2)
    assert found.phases == {FORWARD: 5}


def test_gathers_of_updated_parameters_run_beside_the_next_forward() -> None:
    """On a device: a step begins with them, and each unit waits for its own."""
    names = ("one", "two")
    blocks = [Work(StepPlace(FORWARD, name, 0), 30) for name in names]
    step = StepPlace(STEP, "", 0)
    sent = [Message(step, "all_gather", f"updated {name}|trainable", PAIR, 40) for name in names]
    events = [*blocks, *sent, *(Wait(step, each) for each in sent)]
    found = seconds(Recording(1, [*events]), SLOW)
    # two seconds each: the first block waits for its own, the second one for none
    assert (found.step, found.compute, found.messages, found.exposed) == (8, 6, 4, 2)
    assert found.phases[FORWARD] == 8
    on_host = dataclasses.replace(SLOW, asynchronous=False)
    assert seconds(Recording(1, [*events]), on_host).exposed == 4
    whole = dataclasses.replace(sent[0], unit=f"{sent[0].unit}|whole")
    kept = Recording(1, [*blocks, whole, Wait(step, whole)])
    assert seconds(kept, SLOW).exposed == 2 and seconds(kept, SLOW).phases[STEP] == 2


def test_time_on_a_link() -> None:
    """Groups share the network of a host, latency grows with the doublings of ranks, and an
    all-reduce sends twice as much as a gather.
    """
    for ranks, rate in (((0, 1), 10), ((0, 1, 2, 3), 10), ((0, 2), 5), ((1, 3, 5, 7), 5)):
        assert SLOW.bandwidth(Group("some", ranks)) == rate
    late = dataclasses.replace(SLOW, latency=1)
    assert late.sending(gather(0)) == 1
    assert late.sending(gather(0, Group("eight", tuple(range(8))))) == 3
    reduced = Message(HERE, "all_reduce", "block", PAIR, 20)
    assert SLOW.sending(reduced) == 2 * SLOW.sending(gather(20))


def test_offload_runs_beside_a_step() -> None:
    """The first block waits for its own update, and computes beside that of the second; a gather
    begins when its shard has come; gradients leave beside the backward.
    """
    blocks = [Work(StepPlace(FORWARD, name, 0), 20) for name in ("one", "two.mlp")]
    away = OffloadTimes(update={"one": 3.0, "two": 4.0})
    found = seconds(Recording(1, [*blocks]), SLOW, away)
    assert (found.step, found.compute, found.exposed) == (9, 4, 5)
    sent = gather(20)  # one second
    away = OffloadTimes(fetch={"block": 2.0})
    found = seconds(Recording(1, [sent, work(10), Wait(HERE, sent)]), SLOW, away)
    assert (found.step, found.compute, found.exposed) == (3, 1, 2)
    place = StepPlace(BACKWARD, "block", 0)
    sent = Message(place, "reduce_scatter", "block|trainable|bfloat16", PAIR, 20)
    away = OffloadTimes(gradient={"block": 5.0})
    events = [sent, Wait(place, sent), Work(place, 30)]
    assert seconds(Recording(1, events), SLOW, away).step == 6


def test_offload_takes_the_time_of_its_bytes() -> None:
    """On one rank of a host: state read and written, parameters and gradients over the link."""
    cpu = {"device": "cpu"}
    own = plans_of_stages(None, 1, 3, params=2e6, offload_optimizer=cpu)[1][0]
    machine = Machine(host_memory=1e6, host_link=1e6, ranks_per_host=1)
    found = offload_times(own, machine)
    away = [flat for flat in own.flats if flat.sub_groups is not None]
    numel = sum(flat.spec.owned_numel for flat in away)
    assert sum(found.update.values()) == pytest.approx((2 * 12 + 2) * numel / 1e6, rel=1e-3)
    assert sum(found.gradient.values()) == pytest.approx(2 * numel / 1e6)
    assert not found.fetch
    both = plans_of_stages(None, 1, 3, params=2e6, offload_optimizer=cpu, offload_param=cpu)[1][0]
    assert sum(offload_times(both, machine).fetch.values()) == pytest.approx(2 * numel / 1e6)
    slower = hf_zero.simulate(
        params=2e6, offload_optimizer=cpu, machine=machine, sequence_length=8
    ).seconds.step
    assert slower > sum(found.update.values())


@in_one_item(RATES)
def test_a_rate_is_above_zero(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"{name} = 0 is no rate"):
        Machine(**values)


@in_one_item(
    [
        ("flops", "fast", "no rate"),
        ("memory", None, "no rate"),
        ("network", float("inf"), "no rate"),
        ("latency", float("inf"), "no time"),
        ("latency", -1e-6, "no time"),
        ("operation", None, "no time"),
        ("first_write", -1.0, "no time"),
        ("overlap", 1.5, "no share"),
    ]
)
def test_numbers_that_no_machine_has(case: tuple[str, Any, str]) -> None:
    name, value, said = case
    with pytest.raises(ConfigError, match=f"{name} = .* is {said} of"):
        Machine(**{name: value})


def test_a_measured_block_takes_its_time() -> None:
    """The rate of matrix products is solved for, so that the block takes as long as measured."""
    own = plans_of_stages(None, 2, 3, params=2e6)[1][0]
    recording = record_plans([own], 8)[0]
    measured = Measured("model.layers.0", 2.0, 1e9, 1e-5, 2, 1e-3, 1e8, 0.25, False)
    machine = measured.machine(recording, Machine(latency=7.0, sources={"latency": "given"}))
    assert (machine.node, machine.network, machine.latency) == (1e8, 2e8, 7.0)
    assert machine.sources["flops"] == "measured" and machine.sources["latency"] == "given"
    spent = sum(
        machine.computing(each)
        for each in recording.events
        if isinstance(each, Work)
        and each.place.block == "model.layers.0"
        and each.place.phase in (FORWARD, BACKWARD)
    )
    assert spent == pytest.approx(2.0)


def test_this_process_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_zero.planning.simulation.measuring.SECONDS", 0)
    found = measure(sized_model(1e6), 1, 8, torch.float32)
    assert found.block == "model.layers.0" and found.link is None and found.overlap == 1.0
    assert found.block_seconds > 0 and found.memory > 0 and found.operation > 0
    simulated = hf_zero.simulate(params=1e6, ranks=4, sequence_length=8, measured=found)
    assert simulated.machine.sources["memory"] == "measured"
    assert simulated.machine.node == Machine().node


def _measured_on(rank: int) -> Measured:
    return measure(sized_model(1e6), 1, 8, torch.float32)


def test_two_ranks_measure_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have the same rates, those of the slowest, and simulate the same step."""
    monkeypatch.setattr("hf_zero.planning.simulation.measuring.SECONDS", 0)
    first, second = run_processes(2, _measured_on)
    assert first == second and (first.ranks, first.asynchronous) == (2, False)
    assert first.latency and first.link and 0 <= first.overlap <= 1 and first.first_write >= 0
    found = hf_zero.simulate(params=1e6, ranks=2, sequence_length=8, measured=first, device=HOST)
    assert found.machine.sources["first_write"] == "measured"
    assert found.machine.node == first.link and found.seconds.step > 0


class Unused(nn.Module):
    """A model whose blocks no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


def test_what_cannot_be_timed_is_refused() -> None:
    for model, says in ((nn.Identity(), "no repeated block"), (Unused(), "does not call")):
        with pytest.raises(ConfigError, match=says):
            measure(model, 1, 8, torch.float32)

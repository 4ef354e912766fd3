"""Messages between background threads of ranks: the outcomes of a save, and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from hf_zero.distributed.store import StoreMessages
from hf_zero.errors import RankMismatchError
from tests.protocols.explore import Judge, explore, find, seed_fault
from tests.protocols.ranks import CollectiveFailed, World
from tests.protocols.simulation import Simulation

TIMEOUT, SAVES = 20.0, 2
SETTINGS = {"delays": (0.3, 2.0, 50.0), "deaths": 1, "seconds": 600.0}
SIZES = (2, 3)


def messages(size: int, simulation: Simulation) -> Judge:
    """Each rank sends its outcome of two saves to rank 0, which tells the verdict to all."""

    def exchange(world: World, rank: int) -> None:
        def gone(ranks: Sequence[int]) -> dict[int, str]:
            dead = [process.rank for process in world.processes if not process.alive]
            return {each: "it died" for each in ranks if each in dead}

        mail = StoreMessages(world.store(), rank, TIMEOUT, gone)
        for save in range(1, SAVES + 1):
            if rank:
                mail.send("wrote", save, f"{rank} wrote {save}")
                verdict = mail.receive("verdict", save, 0)
            else:
                others = range(1, size)
                outcomes = mail.receive_all("wrote", save, others)
                mail.forget("wrote", save)
                for each, outcome in outcomes.items():
                    if isinstance(outcome, RankMismatchError):
                        if each in gone(others) or simulation.delayed > TIMEOUT / 2:
                            continue
                        world.fault = f"no outcome of rank {each}, which lives"
                    elif outcome != f"{each} wrote {save}":
                        world.fault = f"{outcome!r} instead of the outcome of {each} in {save}"
                verdict = f"verdict {save}"
                mail.send("verdict", save, verdict)
            if verdict != f"verdict {save}":  # receive() raises if it was replaced
                world.fault = f"{verdict!r} instead of verdict {save}"

    def run(world: World, rank: int) -> None:
        try:
            exchange(world, rank)
        except RuntimeError as error:  # a store that does not answer for a minute counts as gone
            raise CollectiveFailed(f"{error}, says rank {rank} to ranks 0, 1") from error

    return World(simulation, size, run, TIMEOUT).judge


@pytest.mark.parametrize("size", SIZES)
def test_messages_arrive(size: int, schedules: Callable[..., int]) -> None:
    explore(partial(messages, size), schedules(150, len(SIZES)), **SETTINGS)


def test_a_later_message_is_taken_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(monkeypatch, StoreMessages, "receive_all", ("if sent != str(number):", "if False:"))
    assert "instead of" in find(partial(messages, 2), 1000, **SETTINGS).text

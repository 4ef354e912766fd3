"""Requests that the ranks of a job send to its one store, and the seconds that it takes for them.

Tests compare the constants with the requests of real ranks, on 2 and 4 at a start and in a load
(tests/gloo/test_connections.py), on 64 in a save (tests/distributed/test_store_requests.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.distributed.store import AT_ONCE

START = 3  # of a rank as the job begins
ENGINE = 1  # of the first rank as its first engine is made
LOAD = 0  # of a rank, as of a blocking save
COMMIT = 4  # of a rank for a save in the background
FIRST_COMMIT = 5  # of the first rank for it, and one for each AT_ONCE outcomes


@dataclass(frozen=True)
class StoreLoad:
    """Requests of all training threads to the store as a job begins, as one is restarted and loads
    a checkpoint, and in a save in the background; seconds that the store takes for each, None
    without a rate. Requests of a launcher, of other threads and of waits come on top.
    """

    start: int
    restart: int
    save: int
    start_seconds: float | None = None
    restart_seconds: float | None = None
    save_seconds: float | None = None


def store_load(ranks: int, rate: float | None) -> StoreLoad:
    """Return the load of ``ranks`` ranks on a store that answers ``rate`` requests a second."""
    start, others = START * ranks + ENGINE, ranks - 1
    restart = start + LOAD * ranks
    save = FIRST_COMMIT - (-others // AT_ONCE) + COMMIT * others if others else 0
    if rate is None:
        return StoreLoad(start, restart, save)
    return StoreLoad(start, restart, save, start / rate, restart / rate, save / rate)

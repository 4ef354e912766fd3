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
    a checkpoint, and in a save in the background; ``rate``: requests that the store answers in a
    second, None if that is not known. Requests of a launcher, of other threads and of waits come on
    top.
    """

    start: int
    restart: int
    save: int
    rate: float | None

    @property
    def start_seconds(self) -> float | None:
        return self._seconds(self.start)

    @property
    def restart_seconds(self) -> float | None:
        return self._seconds(self.restart)

    @property
    def save_seconds(self) -> float | None:
        return self._seconds(self.save)

    def _seconds(self, requests: int) -> float | None:
        return None if self.rate is None else requests / self.rate

    def to_dict(self) -> dict[str, float | None]:
        """Return the requests and the seconds as values for JSON."""
        requests = {name: getattr(self, name) for name in ("start", "restart", "save")}
        return requests | {f"{name}_seconds": self._seconds(n) for name, n in requests.items()}


def store_load(ranks: int, rate: float | None) -> StoreLoad:
    """Return the load of ``ranks`` ranks on a store that answers ``rate`` requests a second."""
    start, others = START * ranks + ENGINE, ranks - 1
    restart = start + LOAD * ranks
    save = FIRST_COMMIT - (-others // AT_ONCE) + COMMIT * others if others else 0
    return StoreLoad(start, restart, save, rate)

"""Agreement among the ranks of one engine through the key-value store of the process group.

[Note: gathers out of order]
While an order of gathers is recorded, the ranks agree before every gather
(:class:`GatherAgreement`), and all of them issue the agreed one. Later a rank may need a unit that
is missing from the recorded order while the others follow it. It must not issue a collective that
no rank joins: it fetches the others' shards through the store, served by a thread on each rank
(:class:`ShardFetches`). Such a fetch is slow; its values equal those of the gather. A rank that
asks outside passes for what no other rank asks for fetches in the same way: rank 0 alone calls
``state_dict``, while the others are in a pass, wait for it in a collective, or have ended their
scripts and wait for every rank to arrive (:meth:`GatherAgreement.agree_or_leave`). The orders are
recorded anew after a step that is the same for all ranks (:class:`StepEvents`). The same mechanism
tells all ranks that one of them was asked to stop, and that a save of rank 0 in the background has
failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.gather_agreement import GatherAgreement
from hf_zero.distributed.shard_fetches import ShardFetches
from hf_zero.distributed.step_events import StepEvents
from hf_zero.distributed.store_wait import ENDED, StoreWait
from hf_zero.distributed.watchdog import Watchdog


class Consensus:
    """One rank's side of the agreements of one engine.

    ``store`` is a torch.distributed store shared by all its ``ranks`` (global).
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        watchdog: Watchdog | None = None,
        log: CollectiveLog | None = None,
    ):
        waits = StoreWait(store, rank, timeout, watchdog or Watchdog(enabled=False))
        log = log or CollectiveLog("agreements", ranks, timeout, native=False)
        self.gathers = GatherAgreement(store, rank, ranks, waits, log)
        self.steps = StepEvents(store, rank, ranks, waits)
        awaited = self.gathers.is_awaited_by
        self.fetches = ShardFetches(store, rank, ranks, self.steps, waits, awaited)

    def close(self, why: str = ENDED) -> None:
        """Stop answering other ranks; those that ask read ``why``."""
        self.fetches.close(why)

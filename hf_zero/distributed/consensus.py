"""Agreement of ranks outside collectives, through the key-value store of the process group: on
gathers that no order has yet, on events of a step, and fetches of shards.

[Note: gathers out of order]
While an order of gathers is recorded, the ranks agree before every gather
(:class:`GatherAgreement`), and all of them issue the agreed one. Later a rank may need a unit that
is missing from the recorded order while the others follow it. It must not issue a collective that
no rank joins: it fetches the others' shards through the store, served by a thread on each rank
(:class:`ShardFetches`). Such a fetch is slow; its values equal those of the gather. A rank that
alone requests parameters outside forward and backward (such as ``state_dict`` on rank 0) fetches
them the same way, while the others are in a pass, wait for it in a collective, or have ended their
scripts and wait for every rank to arrive (:meth:`GatherAgreement.agree_or_leave`). The orders are
recorded anew after a step that is the same for all ranks (:class:`StepEvents`). The same mechanism
tells all ranks that one of them was asked to stop, and that a save of rank 0 in the background has
failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.distributed as dist

from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.rank_requests import StepEvents
from hf_zero.distributed.shard_fetches import ShardFetches, refuse_destroyed
from hf_zero.distributed.store import ENDED, RollCall, StoreWait
from hf_zero.errors import RankMismatchError

Proposal = tuple[int, int]
APART = "apart"  # the outcome if some ranks gather for a script while the others are in a pass


class GatherAgreement:
    """One rank's side of the agreement, through ``store``; ``log`` numbers the agreements."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        waits: StoreWait,
        log: CollectiveLog,
    ):
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._waits = waits
        self._log = log
        self._sequence = 0
        self.closed = False  # this rank has destroyed the engine
        self._left = False  # the last gather for a script was given up
        self._asking = False  # a lone fetch of this rank is under way
        self._askers = RollCall(store, "asking", 0)
        self.all_launched = 0  # reductions that every rank had launched at the last agreement

    def agree(
        self, where: str, proposal: Proposal, name: Callable[[Proposal], str], launched: int = 0
    ) -> Proposal:
        """Return the largest proposal of all ranks, each a pair ``(kind, unit)``, for the next
        gather (collective).

        ``name`` describes a proposal in messages. ``launched``: number of reductions that this rank
        has launched; :attr:`all_launched` is set to the least of all ranks. Ranks in different
        passes (``where``) can never match: RankMismatchError on all of them. A missing rank is
        named in a warning every minute and in the error at the timeout.
        """
        while True:
            agreed = self._agree(where, proposal, name, launched, may_leave=False)
            if agreed is not None:
                return agreed

    def agree_or_leave(
        self, where: str, proposal: Proposal, name: Callable[[Proposal], str]
    ) -> Proposal | None:
        """Agree like :meth:`agree` on a gather outside passes, which one rank alone may ask for.
        Return None if this rank is alone: the others are in a pass, have ended, or wait for
        something that needs this rank.
        """
        if not (self._asking or self.closed):
            self._asking = True
            self._askers.enter(self._rank)
        agreed = self._agree(where, proposal, name, 0, may_leave=True)
        self._left = agreed is None
        if agreed is not None:
            self.end_asking()
        return agreed

    def end_asking(self) -> None:
        """Withdraw this rank's lone request: it is complete. Idempotent."""
        if self._asking:
            self._asking = False
            self._askers.leave(self._rank)

    def askers(self) -> list[int]:
        """Return the other ranks that wait for a gather which they may leave, or fetch values."""
        if not self._askers.entered():
            return []
        return [rank for rank in self._askers.entries() if rank != self._rank]

    def _agree(
        self,
        where: str,
        proposal: Proposal,
        name: Callable[[Proposal], str],
        launched: int,
        may_leave: bool,
    ) -> Proposal | None:
        """Run one agreement; return None if ranks that may leave are on their own."""
        if self.closed:  # the last rank to leave the engine deletes its keys
            refuse_destroyed(self._rank, f"the {name(proposal)}")
        step, self._sequence = self._sequence, self._sequence + 1
        what = f"join the {name(proposal)} in {where}"
        pending = self._log.issue("agreement on the next gather")._replace(
            what=f"all ranks to {what}", warns=True
        )
        call = self._call(step)
        publish = partial(self._publish, step, call, name)
        if call.enter(self._rank, f"{where}|{proposal[0]}|{proposal[1]}|{launched}|{may_leave:d}"):
            publish()
        outcome = None
        while outcome is None:
            outcome = self._waits.wait_or_leave(
                f"{step}/go",
                partial(call.missing, self._ranks, self._rank),
                what,
                # while this rank may leave, others cannot be proved to block it
                pending._replace(log=None) if may_leave else pending,
                may_leave,
                at_once=self._left,
            )
            if outcome is None and self._withdraw(step, publish):
                return None
            may_leave = False  # all ranks have entered: the outcome binds this one, too
        if outcome == APART:
            return None
        if outcome.startswith("!"):
            raise RankMismatchError(
                f"ranks ask for different collectives ({outcome[1:]}). Every rank must run the "
                "same parts of the model in the same order; "
                "look for a forward, backward or state_dict that only some ranks call"
            )
        kind, unit, self.all_launched = map(int, outcome.split("|"))
        return kind, unit

    def _call(self, step: int) -> RollCall:
        return RollCall(self._store, str(step), len(self._ranks))

    def _publish(self, step: int, call: RollCall, name: Callable[[Proposal], str]) -> None:
        """Publish the outcome of agreement ``step``, whose ``call`` is complete."""
        self._store.set(f"{step}/go", self._outcome(call.entries(), name))
        if step:  # every rank has arrived here, hence has read the last outcome
            self._store.delete_key(f"{step - 1}/go")
            self._call(step - 1).delete()

    def _withdraw(self, step: int, publish: Callable[[], None]) -> bool:
        """Leave agreement ``step``; return False if all ranks have arrived by now."""
        if not self._call(step).leave(self._rank, publish):
            return False
        self._sequence = step
        self._log.withdraw()
        return True

    def _outcome(self, entries: Mapping[int, str], name: Callable[[Proposal], str]) -> str:
        """Return the outcome of the ``entries`` of all ranks: ``kind|unit|launched``;
        :data:`APART` if ranks that may leave meet others; or an exclamation mark and the ranks'
        proposals if they are in different passes.
        """
        split = [entries[rank].rsplit("|", 4) for rank in self._ranks]
        if len({where for where, *_ in split}) > 1:
            if len({where for where, *_, may_leave in split if may_leave == "0"}) == 1:
                return APART
            proposals = [
                f"{where}: {name((int(kind), int(unit)))}" for where, kind, unit, *_ in split
            ]
            return "!" + "; ".join(
                f"rank {rank}: {proposal}" for rank, proposal in zip(self._ranks, proposals)
            )
        kind, unit = max((int(kind), int(unit)) for _, kind, unit, *_ in split)
        return f"{kind}|{unit}|{min(int(count) for *_, count, _ in split)}"


class Consensus:
    """One rank's side of the agreements of one engine.

    ``store`` is a torch.distributed store shared by all its ``ranks`` (global).
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        watchdog: Watchdog | None = None,
        log: CollectiveLog | None = None,
    ):
        waits = StoreWait(store, rank, timeout, watchdog or Watchdog())
        log = log or CollectiveLog("agreements", ranks, timeout, reports_dead_peers=False)
        self.gathers = GatherAgreement(store, rank, ranks, waits, log)
        self.steps = StepEvents(store, rank, ranks, waits)
        self.fetches = ShardFetches(store, rank, ranks, self.steps, waits, self.gathers.askers)

    def close(self, why: str = ENDED) -> None:
        """Stop asking and answering other ranks; those that ask read ``why``. This rank writes no
        key of the engine any more.
        """
        self.gathers.closed = True
        self.fetches.close(why)

"""When units are gathered and released: recorded orders, prefetching, agreement on what is not in
an order yet.

[Note: passes]
Gathers happen in passes: a forward from the outermost module called, a backward from its first hook
to its end. Each kind of pass (see :meth:`Schedule.begin`) has a plan, the order of its gathers, and
all ranks issue exactly that order, units that this rank happens not to use included. The first pass
of a kind is recorded: before every gather the ranks agree, so that a block used on one rank only
enters everybody's plan. A gather that is not in the rest of a plan departs from it: see the note in
consensus.py.

A unit is released one step late, when the next unit is needed: a block called twice in a row is not
gathered twice, and the unit that ends a forward is still there when its backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn

from hf_zero.device import kinds, streams
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.gradients.order import merged
from hf_zero.units.unit import State, Unit

GATHER, END = 1, 0
EVENTS = 256  # writes whose events are kept; a GPU's queue of launches holds fewer
AHEAD = 2  # units prefetched at most; the byte limit comes from the config


class Schedule:
    """The gathers and releases of one engine."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh, ahead_bytes: int, reads_ahead: int = 0):
        """``ahead_bytes`` may be gathered ahead; the shards of ``reads_ahead`` units are read
        from files before their gather.
        """
        self._units = list(units)
        self._mesh = mesh
        self._ahead_bytes = ahead_bytes
        self._reads_ahead = reads_ahead
        self._plans: dict[Hashable, list[Unit]] = {}
        self._before: dict[Hashable, list[Unit]] = {}  # plans that are being recorded anew
        self._plan: list[Unit] | None = None  # of the pass under way; None while recording
        self._record: list[Unit] = []
        self._cursor = 0
        self.plan: Sequence[Unit] = ()  # of the pass whose gathers were all issued last
        # where in it the gathers stand that were recorded: after none of them, one, and so on
        self.places: Sequence[int] = (0,)
        self._key: Hashable = None
        self._backward = False
        self._to_reshard: list[Unit] = []
        self._ahead: list[Unit] = []
        # units gathered for other ranks' sake so far, and their places in the plan
        self._passed: list[tuple[int, Unit]] = []
        self._kept: list[Unit] = []  # for the backward that may follow
        # on a GPU: when the shards were written, by epoch
        self._written: dict[int, streams.Event] = {}
        self.gathers = any(unit.sharded for unit in units)
        self.on_use: Callable[[Unit], None] | None = None  # told of each unit that a forward needs
        # reductions that this rank has launched in the backward under way
        self.launched: Callable[[], int] = lambda: 0
        # told how many of them all ranks have launched
        self.on_launched: Callable[[int], None] | None = None

    @property
    def gathered(self) -> tuple[int, ...]:
        """Indices of the sharded units that are whole now."""
        return tuple(
            unit.index for unit in self._units if unit.sharded and unit.state is not State.RELEASED
        )

    @property
    def resident(self) -> tuple[int, ...]:
        """Indices of the units that every rank expects to be whole at the start of a pass: pinned,
        or kept by the pass before.

        A rank that has left an order may hold others; that must not choose its plan.
        """
        return tuple(
            unit.index for unit in self._units if unit.sharded and (unit.pins or unit in self._kept)
        )

    def begin(self, kind: tuple[Hashable, ...], backward: bool = False) -> None:
        """Start a pass.

        ``kind`` must be the same on all ranks; with what is gathered already it selects the plan.
        """
        if not self.gathers:
            return
        if not backward:
            self._kept = []
            self._release_unused()
            if all(unit.pins for unit in self._units if unit.sharded):
                # Nothing to gather and so nothing to agree on: ranks may run different numbers of
                # such forwards.
                self._key, self._plan = None, None
                return
        self._key = (*kind, self.resident)
        self._plan = self._plans.get(self._key)
        self._record, self._cursor, self._backward = [], 0, backward
        if not backward:
            self._mesh.passes.begin("forward", self._key)

    def issue_rest(self) -> None:
        """The pass is over on this rank: issue the gathers that others may still need, and wait
        for none of them.
        """
        if not self.gathers or self._key is None:
            return
        if self._plan is None:
            while self._agree_on_gather(END, None):
                pass
            # What nobody used this time may be used again: a unit that no plan holds is slow to
            # get.
            self._plan = merged([self._record, self._before.get(self._key, ())])
            self._plans[self._key], self._cursor = self._plan, len(self._plan)
            self.plan, self.places = self._plan, _places(self._record, self._plan)
            if self._mesh.consensus is not None and self._mesh.shard.size > 1:
                self._mesh.consensus.serve_out_of_order_gathers(
                    self.read, partial(kinds.set_device, self._mesh.device)
                )
        else:
            self.issue_through(len(self._plan))

    def end(self, keep_last: bool) -> None:
        """Finish the pass: issue what the plan still holds, then release.

        ``keep_last``: its backward may follow.
        """
        if not self.gathers or self._key is None:
            self._mesh.passes.end()
            return
        self.issue_rest()
        self._mesh.passes.end()
        assert self._plan is not None
        self._kept = [self._units[0], *self._plan[-1:]] if keep_last else []
        self._key, self._plan, self._record = None, None, []
        self._release_unused()

    def issue_through(self, count: int) -> None:
        """Issue the first ``count`` gathers of the plan, if there is one."""
        while self._plan is not None and self._cursor < count:
            unit = self._plan[self._cursor]
            self._passed.append((self._cursor, unit))
            self._cursor += 1
            unit.launch_gather()

    def let_go(self, through: int, awaits: Callable[[Unit], bool]) -> None:
        """Release units that were gathered for others' sake among the first ``through`` of the
        plan, if this backward needs them no more.
        """
        if not self._passed:
            return
        kept = []
        for place, unit in self._passed:
            if place >= through or awaits(unit):
                kept.append((place, unit))
            elif unit.state is State.GATHERING and not unit.in_use and unit not in self._kept:
                unit.release()
        self._passed = kept

    @property
    def recorded(self) -> int:
        """How many gathers the pass under way, which is being recorded, has issued."""
        return len(self._record)

    @property
    def recording(self) -> bool:
        """Whether the pass under way settles every gather with the other ranks."""
        return self._key is not None and self._plan is None and self._mesh.world > 1

    def note(self, error: BaseException | None) -> None:
        """Remember, for the other ranks, the exception that a forward has raised, as long as
        none has gone well since.
        """
        self._mesh.record_last_error(error)

    def abandon(self) -> None:
        """Forget the pass under way, which an exception has broken, and release what nobody
        uses.
        """
        self._mesh.passes.broke()
        self._key, self._plan, self._record, self._kept = None, None, [], []
        self._release_unused()

    def ensure_gathered(self, unit: Unit, module: nn.Module | None = None) -> None:
        """Return when ``unit`` is whole on this rank, with the values of the last step, for
        ``module``, which is at work.
        """
        if self.on_use is not None:
            self.on_use(unit)
        unit.wait_for_update()
        if not unit.sharded:
            return
        if unit in self._to_reshard:
            self._to_reshard.remove(unit)
        if unit.state is not State.GATHERED:
            for other in self._to_reshard:
                if not other.in_use:
                    other.release()
            self._to_reshard = []
        if unit.state is State.RELEASED:
            self._acquire(unit)
        unit.finish_gather()
        unit.unguard(module)
        if unit in self._ahead:  # what was gathered before it is not needed, or not in this order
            at = self._ahead.index(unit)
            self._pass_by(self._ahead[:at])
            del self._ahead[: at + 1]
        self._prefetch()

    def reshard_later(self, unit: Unit) -> None:
        """Say that ``unit`` is not needed for now; it goes when the next one is needed."""
        if unit.sharded and not unit.in_forward and not unit.in_backward:
            unit.guard()
            if not unit.in_use and unit not in self._to_reshard:
                self._to_reshard.append(unit)

    def pin(self, unit: Unit) -> None:
        """Keep ``unit`` whole until :meth:`unpin`. All ranks must pin together."""
        unit.pins += 1
        if (
            self._key is None
            and unit.sharded
            and unit.pins == 1
            and unit not in self._kept
            and unit.state is not State.RELEASED
        ):
            # It is here by chance (a graph that lives on, say), which other ranks may not share:
            # they need this one to join.
            self._agree_on_gather(GATHER, unit)
        self.ensure_gathered(unit)

    def unpin(self, unit: Unit) -> None:
        unit.pins -= 1
        if unit.sharded and not unit.in_use:
            unit.release()

    @property
    def between_passes(self) -> bool:
        return self._key is None

    def agree(self, what: str, value: int) -> int:
        """The largest ``value`` of all ranks, which meet here for ``what`` (collective, outside
        passes).
        """
        if self._mesh.consensus is None:
            return value
        return self._mesh.consensus.agree(what, (0, value), lambda wish: "agreement")[1]

    def _acquire(self, unit: Unit) -> None:
        if self._plan is not None and unit in self._plan[self._cursor :]:
            self._pass_by(self._ahead)
            self._ahead = []
            self.issue_through(self._plan.index(unit, self._cursor))
            self._cursor += 1
            unit.launch_gather()
        elif self._plan is not None and self._mesh.consensus is not None:
            self._fetch(unit)
        else:
            while unit.state is State.RELEASED:
                self._agree_on_gather(GATHER, unit)

    def _pass_by(self, units: Sequence[Unit]) -> None:
        """Units gathered ahead have not been needed when their turn came."""
        if self._plan is not None:
            issued = self._plan[: self._cursor]
            self._passed += [(len(issued) - 1 - issued[::-1].index(unit), unit) for unit in units]

    def _fetch(self, unit: Unit) -> None:
        """Get ``unit`` although the others follow an order that does not hold it."""
        consensus, axis = self._mesh.consensus, self._mesh.shard
        assert consensus is not None
        peers = [rank for rank in axis.ranks if rank != self._mesh.rank]
        size = sum(flat.layout.chunk * flat.dtype.itemsize for flat in unit.sharded)
        unit.fill(
            {
                axis.ranks.index(rank): data
                for rank, data in consensus.fetch(unit.index, unit.label, peers, size).items()
            }
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around every change of this rank's shards: other ranks may be fetching them."""
        consensus = self._mesh.consensus
        if consensus is None:
            yield
            return
        with consensus.writing():
            yield
            if not self._mesh.blocks:
                here = streams.current_stream(self._mesh.device)
                self._written[consensus.epoch + 1] = streams.record_event(here)
                self._written.pop(consensus.epoch + 1 - EVENTS, None)

    def read(self, index: int, epoch: int) -> bytes:
        """This rank's chunks of a unit as they are after ``epoch`` writes, for another rank's
        fetch.
        """
        written = self._written.get(epoch)
        if written is None:
            assert self._mesh.consensus is not None
            if not self._mesh.blocks or epoch != self._mesh.consensus.epoch:
                raise PartitionError(
                    "the values asked for have been overwritten since; keep the ranks together "
                    "around writes to parameters"
                )
            return self._units[index].chunk_bytes()
        # Not in the stream that computes: what this host has put there already may wait for the
        # rank that asks.
        stream = streams.new_stream(self._units[index].sharded[0].full.device)
        with streams.on_stream(stream):
            stream.wait_event(written)
            return self._units[index].chunk_bytes()

    def meet(self) -> None:
        """A step is over: if a rank has left a recorded order, record all of them anew."""
        if self._mesh.consensus is not None and self._mesh.consensus.end_step():
            self._before.update(self._plans)
            self._plans.clear()

    def _agree_on_gather(self, kind: int, unit: Unit | None) -> bool:
        """Agree with the other ranks on the next gather and issue it; False when all of them are
        at the end.
        """
        sign = 1 if self._backward else -1
        wish = (kind, sign * unit.index if unit is not None else -len(self._units) - 1)
        consensus, agreed = self._mesh.consensus, wish
        if consensus is not None:
            agreed = consensus.agree(self._where(), wish, self._say, self.launched())
            if self.on_launched is not None:
                self.on_launched(consensus.all_launched)
        if agreed[0] == END:
            return False
        chosen = self._units[abs(agreed[1])]
        chosen.launch_gather()
        if self._key is not None:
            self._record.append(chosen)
        return True

    def _where(self) -> str:
        if self._key is None:
            return "a gather outside forward and backward"
        return f"{'backward' if self._backward else 'forward'} {self._key!r}"

    def _say(self, wish: tuple[int, int]) -> str:
        return (
            f"gather of {self._units[abs(wish[1])].label}"
            if wish[0] == GATHER
            else "end of the pass"
        )

    def _prefetch(self) -> None:
        if self._plan is None:
            return
        for unit in self._plan[self._cursor : self._cursor + self._reads_ahead]:
            if unit.state is State.RELEASED:
                for flat in unit.sharded:
                    flat.prefetch()
        if not self._ahead_bytes:
            return
        waiting = sum(unit.nbytes for unit in self._ahead)
        while self._cursor < len(self._plan) and len(self._ahead) < AHEAD:
            unit = self._plan[self._cursor]
            if unit.state is not State.RELEASED or (
                self._ahead and waiting + unit.nbytes > self._ahead_bytes
            ):
                return
            self._cursor += 1
            unit.launch_gather()
            self._ahead.append(unit)
            waiting += unit.nbytes

    def _release_unused(self) -> None:
        for unit in self._units:
            if (
                unit.sharded
                and unit.state is not State.RELEASED
                and not unit.in_use
                and unit not in self._kept
            ):
                unit.release()
        self._to_reshard, self._ahead, self._passed = [], [], []

    def check_all_released(self) -> None:
        """Raise PartitionError if a unit is still gathered: for tests and for saving."""
        held = [self._units[index].label for index in self.gathered]
        if held:
            raise PartitionError(
                f"units {held} are still gathered; leave the GatheredParameters "
                "blocks around this call"
            )


def _places(record: Sequence[Unit], plan: Sequence[Unit]) -> list[int]:
    """After how many gathers of ``plan`` the first 0, 1, 2... of ``record``, which is part of it
    in this order, are issued.
    """
    places = [0]
    for unit in record:
        places.append(plan.index(unit, places[-1]) + 1)
    return places

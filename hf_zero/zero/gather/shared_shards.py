"""Access of other ranks to this rank's shards outside the recorded orders, through the store
(``distributed/consensus.py``, the note).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hf_zero.device import kinds, streams
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.zero.layout.unit import Unit

EVENTS = 256  # writes whose events are kept; a GPU's queue of launches holds fewer


class SharedShards:
    """The shards of ``units``, numbered by their writes: all ranks write in the same order."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh):
        self._units = list(units)
        self._mesh = mesh
        # on a GPU: when the shards were written, by epoch
        self._written: dict[int, streams.Event] = {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context around every change of this rank's shards: other ranks may be fetching them."""
        consensus = self._mesh.consensus
        if consensus is None:
            yield
            return
        with consensus.fetches.writing():
            yield
            if not self._mesh.blocks:
                here = streams.current_stream(self._mesh.device)
                self._written[consensus.fetches.epoch + 1] = streams.record_event(here)
                self._written.pop(consensus.fetches.epoch + 1 - EVENTS, None)

    def serve(self) -> None:
        """Answer other ranks' fetches from now on, on a thread of its own. Idempotent."""
        if self._mesh.consensus is not None:
            self._mesh.consensus.fetches.serve(
                self.read, partial(kinds.set_device, self._mesh.device)
            )

    def read(self, index: int, epoch: int) -> bytes:
        """Return this rank's chunks of a unit after ``epoch`` writes, for another rank's fetch.

        Raises PartitionError if they have been overwritten since.
        """
        written = self._written.get(epoch)
        if written is None:
            assert self._mesh.consensus is not None
            if not self._mesh.blocks or epoch != self._mesh.consensus.fetches.epoch:
                raise PartitionError(
                    "the values asked for have been overwritten since; keep the ranks together "
                    "around writes to parameters"
                )
            return self._units[index].chunk_bytes()
        # On a side stream: work that this host has queued on the compute stream may wait for the
        # rank that asks.
        device = self._units[index].sharded[0].full.device
        stream = streams.side_stream(device, streams.Use.FETCHES)
        with streams.on_stream(stream):
            stream.wait_event(written)
            return self._units[index].chunk_bytes()

    def fetch(self, unit: Unit, alone: bool = False) -> None:
        """Gather ``unit`` without the other ranks, whose order does not contain it; ``alone``:
        outside passes, where no other rank asks for it, with exact values.
        """
        consensus = self._mesh.consensus
        assert consensus is not None
        peers = sorted({rank for flat in unit.sharded for rank in flat.axis.peers})
        size = sum(flat.layout.chunk * flat.dtype.itemsize for flat in unit.sharded)
        fetches = consensus.fetches
        fetch = fetches.fetch_alone if alone else fetches.fetch
        unit.fill(fetch(unit.index, unit.label, peers, size), exact=alone)

    def end_asking(self) -> None:
        """Tell the other ranks, once this rank's fetches are complete, that they may end."""
        if self._mesh.consensus is not None:
            self._mesh.consensus.gathers.end_asking()

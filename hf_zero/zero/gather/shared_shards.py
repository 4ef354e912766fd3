"""The access of other ranks to the shards of units, through the store (consensus.py, the note)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from hf_zero.device import kinds, streams
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.unit import Unit
from hf_zero.zero.layout.training_state import CopyGate

EVENTS = 256  # writes whose events are kept; a GPU's queue of launches holds fewer


class SharedShards(CopyGate):
    """The shards of ``units``, numbered by their writes: all ranks write in the same order. The
    gate of copies of the training state of ``units`` that is not offloaded.
    """

    def __init__(self, units: Sequence[Unit], mesh: Mesh):
        self._units = list(units)
        self._sharded = [unit for unit in units if unit.sharded_flats]
        self._mesh = mesh
        # on a GPU: when the shards were written, by epoch
        self._written: dict[int, streams.Event] = {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context around every change of this rank's shards: gathers, other ranks that fetch them,
        and a save in the background may be reading them.
        """
        if self.wait_until_copied is not None:
            self.wait_for_copy()
        consensus = self._mesh.consensus
        if consensus is None:
            yield
            return
        for unit in self._sharded:
            if unit.in_flight is not None:
                unit.finish_gather()
        with consensus.fetches.writing():
            yield
            if not self._mesh.blocks:
                current = streams.current_stream(self._mesh.device)
                self._written[consensus.fetches.epoch + 1] = streams.record_event(current)
                self._written.pop(consensus.fetches.epoch + 1 - EVENTS, None)

    def serve(self) -> None:
        """Answer other ranks' fetches from now on, on a thread of its own. Idempotent."""
        if self._mesh.consensus is not None:
            self._mesh.consensus.fetches.serve(
                self.read, partial(kinds.set_device, self._mesh.device)
            )

    def read(self, index: int, epoch: int) -> bytes:
        """Return this rank's shards of a unit after ``epoch`` writes, for another rank's fetch.

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
            return shard_bytes_of(self._units[index])
        # On a side stream: work that this host has queued on the compute stream may wait for the
        # rank that asks.
        device = self._units[index].sharded_flats[0].full.device
        stream = streams.side_stream(device, streams.Use.FETCHES)
        with streams.on_stream(stream):
            stream.wait_event(written)
            return shard_bytes_of(self._units[index])

    def fetch(self, unit: Unit, outside_passes: bool = False) -> None:
        """Gather ``unit`` without the other ranks, whose order does not contain it;
        ``outside_passes``: where no other rank asks for it, with exact values.
        """
        consensus = self._mesh.consensus
        assert consensus is not None
        peers = sorted(
            {rank for flat in unit.sharded_flats for rank in flat.mesh.shard.other_ranks}
        )
        size = sum(flat.layout.shard_numel * flat.dtype.itemsize for flat in unit.sharded_flats)
        fetches = consensus.fetches
        fetch = fetches.fetch_alone if outside_passes else fetches.fetch
        unit.gather_from(fetch(unit.index, unit.label, peers, size), exact=outside_passes)

    def end_asking(self) -> None:
        """Tell the other ranks, once this rank's fetches are complete, that they may end."""
        if self._mesh.consensus is not None:
            self._mesh.consensus.gathers.end_asking()


def shard_bytes_of(unit: Unit) -> bytes:
    """Return this rank's shards of all sharded flat buffers of ``unit``, end to end, as
    :meth:`Unit.gather_from` takes them; from a thread other than the training thread.
    """
    shards = []
    for flat in unit.sharded_flats:
        flat.optimizer_shard.synchronize_update()
        shards.append(flat.read_shard().detach().cpu().view(torch.uint8).numpy().tobytes())
    return b"".join(shards)

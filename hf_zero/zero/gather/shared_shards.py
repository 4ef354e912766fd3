"""The shards of units: their writes, with the gathers of whole parameters that follow, and the
access of other ranks through the store (consensus.py, the note).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from hf_zero.device import graphs, kinds, streams
from hf_zero.device.spans import span
from hf_zero.distributed.flat_mesh import FlatMesh
from hf_zero.distributed.handle import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.unit import Unit, unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.optimizer_shard import CopyGate

SHARE = 4  # a message of small flat buffers has room for this many of the largest
EVENTS = 256  # writes whose events are kept; a GPU's queue of launches holds fewer


class SharedShards(CopyGate):
    """The shards of ``units``, numbered by their writes: all ranks write in the same order. The
    gate of copies of the training state of ``units`` that is not offloaded.
    """

    def __init__(self, units: Sequence[Unit], mesh: Mesh, packed: int, overlaps: bool):
        """``packed``: maximum number of elements of small flat buffers in one message.
        ``overlaps``: a step returns before the gathers of updated parameters are done.
        """
        self._units = list(units)
        self._sharded = [unit for unit in units if unit.sharded_flats]
        self._mesh = mesh
        self._packed, self._overlaps = packed, overlaps
        # whole flat buffers whose gather after a step the first use waits for
        self._coming: list[FlatBuffer] = []
        # on a GPU: when the shards were written, by epoch
        self._written: dict[int, streams.Event] = {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lease for writing of all shards, and of the state on the device: gathers, other ranks
        that fetch them, and a save in the background may be reading them.
        """
        if self.wait_until_copied is not None:
            self.wait_for_copy()
        while self._coming:  # the gather of the last step, which no forward has used
            self._coming.pop().optimizer_shard.wait_for_update()
        consensus = self._mesh.consensus
        if consensus is None:
            yield
            return
        for unit in self._sharded:
            if unit.in_flight is not None:
                unit.finish_gather()
        fetches = consensus.fetches
        with fetches.writes:  # no fetch is answered meanwhile
            yield
            if not self._mesh.blocks:
                current = streams.current_stream(self._mesh.device)
                self._written[fetches.epoch + 1] = streams.record_event(current)
                self._written.pop(fetches.epoch + 1 - EVENTS, None)
            fetches.epoch += 1

    def store_masters(
        self, stale: Sequence[FlatBuffer], written: frozenset[str], after_step: bool
    ) -> None:
        """Cast the master weights of ``stale`` into their shards, then gather the whole ones of
        these flat buffers (collective); arguments as for :meth:`Schedule.refresh`.
        """
        sends, local, whole = list[FlatBuffer](), list[FlatBuffer](), list[FlatBuffer]()
        for flat in stale:
            if after_step and flat.spec.sends_differences:
                sends.append(flat)
                continue
            local.append(flat)
            if not flat.sharded and flat.layout.num_shards > 1:
                whole.append(flat)
        with self.writing(), span("update", "shards in compute dtype"):
            for flat in local:
                # without masters of its own, the shard is what the optimizer has updated
                if flat.optimizer_shard.has_separate_master and flat.key not in written:
                    master = flat.optimizer_shard.master
                    assert master is not None
                    flat.store_shard(master)
        handles = []
        for flat in sends:
            master = flat.optimizer_shard.master
            assert master is not None
            codecs = [flat.spec.gather_codec]
            key = f"updated {flat.key}"
            handles.append(flat.mesh.shard.all_gather([(flat.full, master)], key, codecs))
        for several in packs(whole, self._packed) if whole else ():
            pairs = [(flat.full, flat.shard) for flat in several]
            last = f"..{several[-1].key}" if len(several) > 1 else ""
            key = f"updated {several[0].key}{last}"
            handle = several[0].mesh.shard.all_gather_packed(pairs, key)
            puts_off = after_step and self._overlaps and not graphs.capturing()
            if puts_off and not any(flat.spec.persistent for flat in several):
                finish_at_first_use(handle, key, several)
                self._coming += several
            else:
                handles.append(handle)
        if handles:
            with span("wait_all_gather", "updated parameters"):
                for handle in handles:
                    handle.wait()

    def serve(self) -> None:
        """Answer other ranks' fetches from now on, on a thread of its own. Idempotent."""
        if self._mesh.consensus is not None:
            begin = partial(kinds.set_device, self._mesh.device)
            self._mesh.consensus.fetches.serve(self.read, begin)

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
        # rank that asks. So may the next write, whose collectives this rank awaits before: it
        # cannot overtake the read.
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


def finish_at_first_use(handle: Handle, key: str, flats: Sequence[FlatBuffer]) -> None:
    """Let the first use of the updated parameters of ``flats`` wait for ``handle``, their
    all-gather, named ``key`` in traces: a forward that reaches the unit, or any other read
    (:class:`hf_zero.zero.layout.parameter.UpdatingParameter`).
    """
    device = flats[0].full.device
    stream = streams.current_stream(device)

    def finish() -> None:
        current = streams.current_stream(device)
        with torch.inference_mode(False), torch.no_grad(), span("wait_all_gather", key):
            handle.wait()
        if current != stream:
            # a script orders its streams after the one of the step
            stream.wait_stream(current)
        for flat in flats:
            unit_of(flat).streams.record_gather()
            flat.end_update(None)

    for flat in flats:
        flat.begin_update(finish, None)


class Pack:
    """A message being filled: at most ``limit`` elements of one dtype, over one mesh. Only flat
    buffers of at most a :data:`SHARE` of them are ``small``: packing costs a copy.
    """

    def __init__(self, limit: int):
        self.limit, self.small = limit, limit // SHARE
        self._elements = 0
        self._kind: tuple[torch.dtype, FlatMesh] | None = None

    def fits(
        self, elements: int, dtype: torch.dtype | None = None, mesh: FlatMesh | None = None
    ) -> bool:
        """Return whether ``elements`` more fit, of ``dtype`` and on the ranks of ``mesh`` if these
        are given.
        """
        if self._elements + elements > self.limit:
            return False
        kind = self._kind
        return kind is None or (
            (dtype is None or dtype is kind[0])
            and (mesh is None or mesh is kind[1] or mesh.axes == kind[1].axes)
        )

    def add(self, elements: int, dtype: torch.dtype, mesh: FlatMesh) -> None:
        self._elements, self._kind = self._elements + elements, (dtype, mesh)

    def clear(self) -> None:
        self._elements, self._kind = 0, None


def packs(flats: Iterable[FlatBuffer], limit: int) -> list[list[FlatBuffer]]:
    """Split ``flats``, in order, into messages of at most ``limit`` elements; one that is not
    small is alone.
    """
    packs: list[list[FlatBuffer]] = []
    pack = Pack(limit)
    for flat in flats:
        elements = flat.layout.padded if flat.layout.padded <= pack.small else limit + 1
        if not packs or not pack.fits(elements, flat.dtype, flat.mesh):
            packs.append([])
            pack.clear()
        packs[-1].append(flat)
        pack.add(elements, flat.dtype, flat.mesh)
    return packs

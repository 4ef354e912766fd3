"""Whole weights from the shards of all ranks, one group of flat buffers at a time: the source of
state dicts, of checkpoints in one file and of weights for other programs.

A group is gathered into memory of its own, beside the units', so ranks may hold different units
gathered when they begin. Two groups share this memory in turn, where the next is gathered while the
caller uses one. In either case the values of a group are valid until the next one is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from hf_zero.device import streams
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.handle import Handle
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.unit import unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.whole_names import WholeNames

if TYPE_CHECKING:
    from hf_zero.zero.sharded_engine import ShardedEngine

ALIGNED = 64  # bytes


Named = tuple[str, torch.Tensor]


class TensorInfo(NamedTuple):
    """Name, dtype and shape of a tensor of a stream."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightBuckets(Protocol):
    """Whole weights of one version of an engine, in buckets.

    Attributes:
        step: number of optimizer steps after which the weights were taken.
        tensors: name, dtype and shape of each tensor, in the order in which they are sent.
    """

    step: int
    tensors: list[TensorInfo]

    def __iter__(self) -> Iterator[list[Named]]: ...


class Whole(NamedTuple):
    """One whole parameter: ``here`` is its first name on this rank, ``name`` that in the whole
    model; ``value`` is on the device.
    """

    flat: FlatBuffer
    here: str
    name: str
    value: torch.Tensor


class _Gathering(NamedTuple):
    """The gather of one group under way, and its whole buffers: [padded] each. ``copied``: the
    event after which shards from host memory are on the device.
    """

    handles: Sequence[Handle]
    buffers: Sequence[tuple[FlatBuffer, torch.Tensor]]
    copied: streams.Event | None


def _has_masters(flat: FlatBuffer, dtype: torch.dtype | None) -> bool:
    """Return whether master weights replace the values of ``flat`` as ``dtype``: for float32, or if
    steps send differences, so that all ranks' values lag behind them.
    """
    return flat.optimizer_shard.has_separate_master and (
        dtype == torch.float32 or flat.spec.sends_differences
    )


def wire_dtype(flat: FlatBuffer, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a group has the values of ``flat``: ``dtype`` if that is narrower
    than their own. Raw values keep theirs.
    """
    held = torch.float32 if _has_masters(flat, dtype) else flat.dtype
    wanted = flat.dtype if flat.raw or dtype is None else dtype
    return wanted if wanted.itemsize <= held.itemsize else held


def _nbytes(flat: FlatBuffer, dtype: torch.dtype | None) -> int:
    size = flat.layout.padded * wire_dtype(flat, dtype).itemsize
    return -(-size // ALIGNED) * ALIGNED


def _is_view(flat: FlatBuffer, dtype: torch.dtype | None) -> bool:
    """Return whether the parameters of ``flat`` are whole on each rank, with values of a group."""
    return (
        not flat.sharded and not _has_masters(flat, dtype) and flat.dtype == wire_dtype(flat, dtype)
    )


def split(
    flats: Sequence[FlatBuffer], dtype: torch.dtype | None, limit: int
) -> list[list[FlatBuffer]]:
    """Split ``flats``, in order, into groups of at most ``limit`` bytes; a larger one is alone."""
    groups: list[list[FlatBuffer]] = []
    held = 0
    for flat in flats:
        size = _nbytes(flat, dtype)
        if not groups or held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(flat)
        held += size
    return groups


class Version(NamedTuple):
    """The weights of one moment: the optimizer steps so far, and each flat buffer's changes."""

    step: int
    changes: Mapping[FlatBuffer, int]


def version_of(engine: ShardedEngine) -> Version:
    """Return the version of the weights, once updates are complete and a script's writes are
    in the shards (collective).

    Raises PartitionError if the engine was destroyed.
    """
    _complete_updates(engine, engine.flats)
    engine.optimizer_step.take_member_writes()
    return Version(engine.global_steps, {flat: flat.version for flat in engine.flats})


def _complete_updates(engine: ShardedEngine, flats: Sequence[FlatBuffer]) -> None:
    """Complete the updates of ``flats``, and take a script's writes into their shards."""
    if engine.destroyed:
        raise PartitionError(
            "weights of an engine that was destroyed; take them before destroy(), or from the "
            "model after destroy(gather=True)"
        )
    if engine.optimizer_step.changes.away:
        engine.optimizer_step.changes.refuse("a read of whole weights")
    engine.optimizer_step.synchronize()
    for unit in dict.fromkeys(map(unit_of, flats)):
        unit.wait_for_update()
        unit.take_user_writes()


@torch.no_grad()
def whole_groups(
    engine: ShardedEngine,
    groups: Sequence[Sequence[FlatBuffer]],
    dtype: torch.dtype | None,
    ahead: bool = False,
    version: Version | None = None,
) -> Iterator[list[Whole]]:
    """Yield the whole parameters of each of ``groups``, in turn. Collective: exhaust it on every
    rank.

    float32 selects the master weights where training keeps them; other values have
    :func:`wire_dtype`. ``ahead``: gather the next group while the caller uses one. Raises
    PartitionError if weights have been written since ``version`` (None: the first group). A group
    is checked before its gather and after the caller has used it, and all groups at the end.
    """
    version = version or version_of(engine)
    names = WholeNames(engine.module)
    sizes = [
        sum(_nbytes(flat, dtype) for flat in group if not _is_view(flat, dtype)) for group in groups
    ]
    size = max(sizes, default=0)
    memory: list[torch.Tensor] = []
    coming: deque[_Gathering] = deque()
    try:
        for place, group in enumerate(groups):
            near = chain.from_iterable(groups[max(place - 1 - ahead, 0) : place + 1])
            _refuse_written([*near], version, engine)
            if len(memory) < 1 + ahead:
                memory.append(torch.empty(size, dtype=torch.uint8, device=engine.device))
            coming.append(_launch(group, dtype, memory[place % len(memory)]))
            if len(coming) > ahead:
                yield _finish(coming.popleft(), names)
        while coming:
            near = chain.from_iterable(groups[-2 - ahead :])
            _refuse_written([*near], version, engine)
            yield _finish(coming.popleft(), names)
        # groups may be views of the weights
        _refuse_written(engine.flats, version, engine)
    finally:
        # of a loop that was left: its memory is used again after what is under way, and gloo's
        # connections do not survive a message that nobody waits for
        with suppress(RuntimeError):  # aborted collectives
            for gathering in coming:
                _wait(gathering)


def _refuse_written(group: Sequence[FlatBuffer], version: Version, engine: ShardedEngine) -> None:
    """Raise PartitionError if weights of ``group`` have been written since ``version``, or the
    engine has other flat buffers.
    """
    _complete_updates(engine, [flat for flat in group if not flat.retired])
    others = (flat.retired or flat.version != version.changes.get(flat) for flat in group)
    if engine.global_steps != version.step or any(others):
        raise PartitionError(
            f"weights were written while they are read: those before this are of step "
            f"{version.step}, and the engine is at step {engine.global_steps}; end the loop over "
            "the weights before a step, a load or another write, and clone a tensor of the loop to "
            "change it"
        )


def _launch(
    group: Sequence[FlatBuffer], dtype: torch.dtype | None, memory: torch.Tensor
) -> _Gathering:
    """Begin the gather of ``group`` into ``memory`` [bytes]. Shards come from host memory beside
    what the caller does with the group before.
    """
    away = any(flat.shard_offloaded and not _has_masters(flat, dtype) for flat in group)
    beside = streams.shard_stream(memory.device) if away else None
    if beside is not None:
        beside.wait_stream(streams.current_stream(memory.device))
    with streams.on_stream(beside):
        handles, buffers = _issue(group, dtype, memory)
    copied = None if beside is None else streams.record_event(beside)
    return _Gathering(handles, buffers, copied)


def _issue(
    group: Sequence[FlatBuffer], dtype: torch.dtype | None, memory: torch.Tensor
) -> tuple[Sequence[Handle], Sequence[tuple[FlatBuffer, torch.Tensor]]]:
    """Issue the gather of ``group`` on the current stream."""
    buffers: list[tuple[FlatBuffer, torch.Tensor]] = []
    pairs: dict[MeshDim, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    at = 0
    for flat in group:
        sent, layout, masters = wire_dtype(flat, dtype), flat.layout, _has_masters(flat, dtype)
        if _is_view(flat, dtype):
            buffers.append((flat, flat.full))
            continue
        whole = memory[at : at + layout.padded * sent.itemsize].view(sent)
        at += _nbytes(flat, dtype)
        buffers.append((flat, whole))
        if not masters and not flat.sharded:
            whole.copy_(flat.full)
            continue
        own = whole.narrow(0, flat.mesh.shard.rank * layout.shard_numel, layout.shard_numel)
        if masters:
            values = flat.optimizer_shard.master
            assert values is not None
        else:
            target = own if sent == flat.dtype else torch.empty_like(own, dtype=flat.dtype)
            values = flat.fetch_shard(target)
        if values is not own:
            own.copy_(values)
        if layout.num_shards > 1:
            pairs.setdefault(flat.mesh.shard, []).append((whole, own))
    keys = "..".join(dict.fromkeys(flat.key for flat in (*group[:1], *group[-1:])))
    return [dim.all_gather(each, f"whole {keys}") for dim, each in pairs.items()], buffers


def _wait(gathering: _Gathering) -> None:
    """Wait for the gather of a group; on a device the current stream does."""
    for handle in gathering.handles:
        handle.wait()
    if gathering.copied is not None:
        streams.current_stream(gathering.buffers[0][1].device).wait_event(gathering.copied)


def _finish(gathering: _Gathering, names: WholeNames) -> list[Whole]:
    """Return the parameters of a group, joined from the parts of ranks along other axes."""
    _wait(gathering)
    found = []
    for flat, buffer in gathering.buffers:
        for parameter, slot in flat.items:
            # memory of the model itself is given as a tensor whose writes are counted
            view = flat.data_of(slot.name, buffer[slot.offset : slot.end].view(slot.shape))
            for name, whole in names.wholes(parameter, view, slot.name):
                found.append(Whole(flat, slot.name, name, whole))
    return found

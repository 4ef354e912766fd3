"""Initial values of an engine's parameters: of rank 0, a source, or a destroyed engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import nn

from hf_zero.distributed.mesh import Mesh
from hf_zero.zero.layout.flat_buffer import EngineFlats, FlatBuffer, owner_of
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.parameter import name_of
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.walk import named_modules_of

if TYPE_CHECKING:
    from hf_zero.zero.layout.engine_plan import EnginePlan

T = TypeVar("T")


class FormerValues:
    """Values of parameters that a destroyed engine left sharded, gathered one flat buffer at a
    time; also keeps the first error of reading other values.
    """

    def __init__(self) -> None:
        self._seen: dict[int, EngineFlats] = {}  # by id, engines with such values
        self._flat: FlatBuffer | None = None
        self._whole = torch.empty(0)
        self._error: Exception | None = None

    def attempt(self, read: Callable[..., T], *args: object) -> T | None:
        """Call ``read``, which may fail on this rank alone. An exception is kept until all ranks
        have finished reading, so that none waits for this one; see :meth:`raise_error`.
        """
        try:
            return read(*args)
        except Exception as error:
            self._error = self._error or error
            return None

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Free the shards whose parameters have been taken over, and the process groups of an
        engine with no shards left.
        """
        self._flat, self._whole = None, torch.empty(0)
        self.drop_spent()
        for former in self._seen.values():
            if not any(_owns(flat) for flat in former.flats):
                former.mesh.close()

    def drop_spent(self) -> None:
        """Free the flat buffers whose parameters have all been taken over."""
        for former in self._seen.values():
            for flat in former.flats:
                if not _owns(flat):
                    flat.drop()

    def values(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the values of ``parameter``, which has no source (collective if it is sharded)."""
        flat = owner_of(parameter)
        if flat is None:
            return parameter
        if flat is not self._flat:
            self._flat, self._whole = flat, flat.whole_from_shards()
            self._seen[id(flat.engine_flats)] = flat.engine_flats
        slot = flat.layout.by_name[name_of(parameter)]
        return self._whole[slot.offset : slot.end].view(slot.shape)


@torch.no_grad()
def fill_whole(
    flat: FlatBuffer, full: torch.Tensor, mesh: Mesh, former: FormerValues
) -> torch.Tensor:
    """Broadcast the values of the first rank that holds ``flat``, which alone reads sources, and
    write them into ``full``. Return them in their original precision, for the master weights:
    [padded].
    """
    dtypes = {parameter.dtype for parameter, _ in flat.items}
    widest = flat.dtype if dtypes <= {flat.dtype} else torch.float32
    values = (
        full
        if widest == flat.dtype
        else torch.empty(full.numel(), dtype=widest, device=full.device)
    )
    clear_padding(flat.layout, values)
    for parameter, slot in flat.items:
        target, source = values[slot.offset : slot.end].view(slot.shape), source_of(parameter)
        if source is None:
            target.copy_(former.values(parameter))
        elif flat.mesh.is_first:
            former.attempt(_copy_whole, source, target)
        parameter.__dict__.pop("_hf_zero_source", None)
    mesh.broadcast(values, flat.mesh)
    if values is not full:
        full.copy_(values)
    return values


def _copy_whole(source: Source, target: torch.Tensor) -> None:
    target.copy_(source.whole())


def clear_padding(layout: FlatLayout, values: torch.Tensor, start: int = 0) -> None:
    """Set the padding to zero in ``values``, elements of a buffer of ``layout`` from ``start``."""
    for first, last in layout.padding_in(start, start + values.numel()):
        values[first:last].zero_()


def _owns(flat: FlatBuffer) -> bool:
    return any(owner_of(parameter) is flat for parameter, _ in flat.items)


class Staging:
    """Host memory for one whole parameter at a time.

    One block is reused: an allocator would keep many blocks of different sizes.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [numel] of ``dtype``; overwrites what was taken before."""
        if self._bytes.numel() < numel * dtype.itemsize:
            # free it before the larger one is allocated
            self._bytes = torch.empty(0, dtype=torch.uint8)
            self._bytes = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
        return self._bytes[: numel * dtype.itemsize].view(dtype)


def is_pending(flat: FlatBuffer) -> bool:
    """Return whether values of ``flat`` are read from a source."""
    return any(source_of(parameter) is not None for parameter, _ in flat.items)


@torch.no_grad()
def read_own(flat: FlatBuffer, mesh: Mesh, former: FormerValues, staging: Staging) -> torch.Tensor:
    """Return this rank's elements: [owned], in their original precision. Each rank reads its own
    part of a sliceable source (collective for others).
    """
    dtypes = {parameter.dtype for parameter, _ in flat.items}
    values = (
        flat.shard_memory()
        if dtypes <= {flat.dtype}
        else torch.zeros(flat.spec.owned_numel, dtype=torch.float32, device=mesh.device)
    )
    clear_padding(flat.layout, values, flat.owned[0])
    for parameter, slot in flat.items:
        first, start, stop = flat.spec.own_range(slot.name)
        source = source_of(parameter)
        if source is not None and source.sliceable:
            target = values[start:stop]
            direct = target.dtype == source.dtype and target.device.type == "cpu"
            part = target if direct else torch.empty(stop - start, dtype=source.dtype)
            former.attempt(source.read, first, part)
            if not direct:
                target.copy_(part)
        else:
            if source is None:
                whole = former.values(parameter).detach().to(values.device).contiguous()
            else:
                staged = staging.take(math.prod(slot.shape), source.dtype)
                if flat.mesh.is_first:
                    former.attempt(source.read, 0, staged)
                whole = staged.to(values.device)
            mesh.broadcast(whole, flat.mesh)
            values[start:stop].copy_(whole.reshape(-1)[first : first + stop - start])
        parameter.__dict__.pop("_hf_zero_source", None)
    return values


@torch.no_grad()
def place_buffers(plan: EnginePlan, mesh: Mesh) -> None:
    """Move buffers of the model, which stay whole, to the device and broadcast the values of the
    first rank that holds them, but in the modules ``plan.kept_buffers``. Floating-point ones are
    cast to ``plan.buffer_dtype``; None keeps their dtypes.
    """
    device, dtype = mesh.device, plan.buffer_dtype
    moved: dict[int, torch.Tensor] = {}  # a buffer shared by two modules stays shared
    modules = named_modules_of(plan.model)
    kept = {id(b) for name, m in modules if name in plan.kept_buffers for b in m._buffers.values()}
    for _, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            sharding, keeps = sharding_of(buffer), id(buffer) in kept
            if id(buffer) in moved:
                module._buffers[name] = moved[id(buffer)]
                continue
            target = dtype if dtype and buffer.is_floating_point() else buffer.dtype
            if buffer.device != device or buffer.dtype != target:
                module._buffers[name] = moved[id(buffer)] = buffer.to(device, target)
                buffer = moved[id(buffer)]
            if not keeps:
                mesh.broadcast(without_repeats(buffer), mesh.of(sharding.axes))


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its expanded dimensions: every element of its memory once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class Source(Protocol):
    """The source of the values of a parameter that has none in memory yet; equal on all ranks."""

    dtype: torch.dtype
    sliceable: bool  # whether reading a part costs in proportion to that part

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (1-D, CPU, of ``dtype``) with elements in row-major order from ``start``."""

    def whole(self) -> torch.Tensor:
        """Return all elements, on the CPU."""


def pending(
    shape: Sequence[int], source: Source, kind: type[nn.Parameter] = nn.Parameter
) -> nn.Parameter:
    """Return a parameter without memory; an engine reads its values from ``source``. Those of a
    ``kind`` of its own are frozen.
    """
    template = kind(
        torch.zeros((), dtype=source.dtype).expand(tuple(shape)),
        requires_grad=source.dtype.is_floating_point and kind is nn.Parameter,
    )
    template.__dict__["_hf_zero_source"] = source
    return template


def source_of(parameter: torch.Tensor) -> Source | None:
    return parameter.__dict__.get("_hf_zero_source")

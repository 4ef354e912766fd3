"""Placement of one engine's state: the storage that its configuration chooses for parameters and
for optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import provided
from hf_zero.device import kinds
from hf_zero.offload.storage import (
    MASTER,
    SHARD,
    Allocator,
    DeviceStorage,
    HostStorage,
    Storage,
    StorageFormat,
    SubGroup,
)
from hf_zero.ops.host_memory import HostArena

# the size of a sub-group is a multiple of this, so that each begins at a page and at a block
SUB_GROUP_ELEMENTS = 4096


@dataclass(frozen=True)
class ShardSpec:
    """The properties of a flat buffer that its placement depends on: the elements that this rank
    owns, their dtype, whether they train, and the dtype of masters and of sums of gradients.
    """

    key: str
    numel: int
    dtype: torch.dtype
    trainable: bool
    master_dtype: torch.dtype = torch.float32


class PlacementRules:
    """The tiers that a configuration chooses for the flat buffers of one engine of ``world`` ranks.
    Arithmetic only.
    """

    def __init__(self, config: ZeroConfig, world: int):
        self._optimizer, self._param = config.offload_optimizer, config.offload_param
        self._accumulates = (config.gradient_accumulation_steps or 1) > 1
        self._divides_later = (
            config.precision == "fp16" and world > 1
        ) or config.prescale_gradients
        self._explicit = config.gradient_accumulation_dtype is not None
        self.offloads_optimizer = self._optimizer.on
        self.offloads_anything = self._optimizer.on or self._param.on
        # whether anything is offloaded to a disk, on any rank
        self.in_files = "nvme" in (self._optimizer.device, self._param.device)

    @property
    def reads_ahead(self) -> int:
        """The number of units whose shards are prefetched from files."""
        return self._param.buffer_count if self._param.device == "nvme" else 0

    @property
    def moments(self) -> str:
        return self._optimizer.moments if self._optimizer.on else "fp32"

    @property
    def sub_group_size(self) -> int:
        """The largest number of elements updated at a time."""
        return max(
            SUB_GROUP_ELEMENTS,
            self._optimizer.buffer_size // SUB_GROUP_ELEMENTS * SUB_GROUP_ELEMENTS,
        )

    def offloaded(self, specs: Sequence[ShardSpec]) -> set[str]:
        """Return the keys of the flat buffers whose states are offloaded: the last ones of the
        model. The first ones, with at most ``1 - ratio`` of all elements, stay on the device: their
        gradients are ready last, and the next forward needs them first.
        """
        if not self._optimizer.on:
            return set()
        training = [spec for spec in specs if spec.trainable]
        share = 1.0 if self._optimizer.ratio == "auto" else float(self._optimizer.ratio)
        left = (1.0 - share) * sum(spec.numel for spec in training)
        chosen = set()
        for spec in training:
            left -= spec.numel
            if left < 0:
                chosen.add(spec.key)
        return chosen

    @property
    def cores(self) -> float:
        """The fraction of this rank's cores that updates use."""
        return self._optimizer.cores

    def fitting(
        self, specs: Sequence[ShardSpec], moments: int, free: int, with_master: Collection[str]
    ) -> list[str]:
        """Return the keys of the first offloaded flat buffers whose fp32 state fits into ``free``
        bytes of the device: ``moments`` per-element states, a sum of gradients, and a master weight
        for the keys ``with_master``.
        """
        chosen = []
        for spec in specs:
            own_master = spec.master_dtype.itemsize if spec.key in with_master else 0
            free -= (own_master + 4 * moments + spec.master_dtype.itemsize) * spec.numel
            if free < 0:
                break
            chosen.append(spec.key)
        return chosen

    def shard_tiers(self, specs: Iterable[ShardSpec]) -> dict[str, str]:
        """Return where the parameter shards of ``specs``, of sharded parameters, are kept, by key:
        "device", "ram" or "disk". The first ones in the model need not go to files.
        """
        if not self._param.on:
            return {spec.key: "device" for spec in specs}
        tiers, free = {}, self._param.max_in_cpu
        for spec in specs:
            stays = self._param.device == "cpu" or spec.numel <= free
            tiers[spec.key] = "ram" if stays else "disk"
            free -= spec.numel if stays else 0
        return tiers

    def gradient_dtype(self, spec: ShardSpec, wire: torch.dtype) -> torch.dtype:
        """Return the dtype of a gradient that is offloaded or that the update reads in 16 bits: 16
        bits if exactly one reduction produces it and nothing rescales or accumulates it.
        """
        if wire.itemsize == 2 and not (self._accumulates or self._divides_later or self._explicit):
            return wire
        return spec.master_dtype


class FileTier(Protocol):
    """The storages of one engine in files, which a feature provides."""

    def reserve(self, nbytes_by_paths: Mapping[tuple[str, ...], int]) -> None:
        """Reserve room for everything that will be in files: bytes by the folders that share them.

        Raises ConfigError and DiskSpaceError, before anything else has been done.
        """

    def shard(self, spec: ShardSpec, take: Allocator) -> Storage:
        """Create the storage of a parameter shard, with buffers that ``take`` allocates."""

    def state(self, spec: ShardSpec, sub_groups: Sequence[SubGroup], take: Allocator) -> Storage:
        """Create the storage of optimizer state, with buffers that ``take`` allocates."""

    def write_error(self) -> OSError | None:
        """Return the error of a failed write, if any; the data is still in memory.

        Waits for pending writes, and warns of folders that refused O_DIRECT in a transfer.
        """

    def buffer_bytes(self) -> Mapping[str, int]:
        """Return the bytes of buffers by their content, ``states`` or ``shards``."""

    def close(self) -> None:
        """Drop the references: files are freed with their last user."""


class Placement(PlacementRules):
    """Storage for the flat buffers of one engine on this rank.

    Memory and files are allocated on first use.
    """

    def __init__(self, config: ZeroConfig, device: torch.device, rank: int, world: int):
        super().__init__(config, world)
        self._device = device
        self._arenas: dict[bool, HostArena] = {}
        self.files: FileTier | None = provided("file_tier")(config, rank) if self.in_files else None
        # whether a first step must still measure how much of the offloaded state fits on the device
        self.awaits_first_step = self._optimizer.on and self._optimizer.ratio == "auto"

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that only the host reads and writes."""
        return self._arena(pinned=False).take(numel, dtype)

    def take_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory for the device's copies of gradients and updated parameters."""
        return self._taken(self._optimizer.pin_memory, numel, dtype)

    def take_for_shards(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory for the device's copies of offloaded or buffered parameters."""
        return self._taken(self._param.pin_memory, numel, dtype)

    def _taken(self, pin: bool | None, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._arena(pinned=pin is not False and not kinds.is_synchronous(self._device)).take(
            numel, dtype
        )

    def _arena(self, pinned: bool) -> HostArena:
        if pinned not in self._arenas:
            self._arenas[pinned] = HostArena(pinned, self._device)
        return self._arenas[pinned]

    def shards(
        self, specs: Sequence[ShardSpec], tiers: Mapping[str, str]
    ) -> Callable[[ShardSpec], Storage]:
        """Return a function from a spec to the storage of its parameter shard, for sharded
        parameters; ``tiers``: the plan's tiers by key. Shards on the device are adjacent.

        Host memory is allocated when the function is called: the source of one flat buffer is then
        freed before the next one is converted.
        """
        if self._param.on:
            return lambda spec: self._shard(spec, tiers[spec.key] == "disk")
        placed: dict[str, Storage] = {}
        alike: dict[torch.dtype, list[ShardSpec]] = {}
        for spec in specs:
            alike.setdefault(spec.dtype, []).append(spec)
        for dtype, those in alike.items():
            sizes = [spec.numel for spec in those]
            arrays = torch.zeros(sum(sizes), dtype=dtype, device=self._device).split(sizes)
            placed.update(
                (spec.key, DeviceStorage({SHARD: array})) for spec, array in zip(those, arrays)
            )
        return lambda spec: placed[spec.key]

    def _shard(self, spec: ShardSpec, in_files: bool) -> Storage:
        storage: Storage
        if in_files:
            assert self.files is not None
            storage = self.files.shard(spec, self.take_for_shards)
        else:
            storage = HostStorage(spec.numel, [(0, spec.numel)], self.take_for_shards)
        storage.add(SHARD, StorageFormat(spec.dtype))
        return storage

    def optimizer_state(self, spec: ShardSpec, sub_groups: Sequence[SubGroup]) -> Storage:
        """Create the storage of offloaded optimizer state, with zeros as master weights."""
        storage: Storage
        if self._optimizer.device == "nvme":
            assert self.files is not None
            storage = self.files.state(spec, sub_groups, self.take)
        else:
            storage = HostStorage(spec.numel, sub_groups, self.take)
        storage.add(MASTER, StorageFormat(spec.master_dtype))
        return storage

    def close(self) -> None:
        """Drop the references: memory and files are freed with their last user."""
        if self.files is not None:
            self.files.close()
        self._arenas.clear()

    def buffer_bytes(self) -> dict[str, int]:
        """Return the bytes of buffers by their content, ``states`` or ``shards``."""
        nbytes = {} if self.files is None else self.files.buffer_bytes()
        return {what: nbytes.get(what, 0) for what in ("states", "shards")}

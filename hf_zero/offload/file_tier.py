"""State in files: the storages of one engine there, with the buffers that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_zero.config import ZeroConfig
from hf_zero.offload.nvme import BufferPool, NvmeStorage, pool_size
from hf_zero.offload.nvme_files import NvmeFiles
from hf_zero.offload.placement import ShardSpec
from hf_zero.offload.storage import Allocator, Storage, SubGroup


class FilesOfEngine:
    """The files of one engine on ``rank``, as :class:`hf_zero.offload.placement.FileTier`."""

    def __init__(self, config: ZeroConfig, rank: int):
        self._optimizer, self._param = config.offload_optimizer, config.offload_param
        self._aio, self._rank = config.aio, rank
        self._files: dict[tuple[str, ...], NvmeFiles] = {}
        self._pools: dict[str, BufferPool] = {}  # by kind of content

    def write_error(self) -> OSError | None:
        for pool in self._pools.values():
            pool.flush()
        for files in self._files.values():
            files.warn_of_buffering()
        errors = [pool.write_error for pool in self._pools.values()]
        return next((error for error in errors if error is not None), None)

    def reserve(self, nbytes_by_paths: Mapping[tuple[str, ...], int]) -> None:
        for paths, nbytes in nbytes_by_paths.items():
            self._files_on(paths).reserve(nbytes)

    def shard(self, spec: ShardSpec, take: Allocator) -> Storage:
        if "shards" not in self._pools:
            self._pools["shards"] = BufferPool(pool_size(self._param.buffer_count), take)
        files, whole = self._files_on(self._param.nvme_path), [(0, spec.numel)]
        return NvmeStorage(spec.key, spec.numel, whole, files, self._pools["shards"])

    def state(self, spec: ShardSpec, sub_groups: Sequence[SubGroup], take: Allocator) -> Storage:
        how = self._optimizer
        if "states" not in self._pools:
            count, reads, writes = how.buffer_count, how.pipeline_read, how.pipeline_write
            self._pools["states"] = BufferPool(pool_size(count), take, reads, writes)
        files = self._files_on(how.nvme_path)
        return NvmeStorage(spec.key, spec.numel, sub_groups, files, self._pools["states"])

    def _files_on(self, paths: tuple[str, ...]) -> NvmeFiles:
        if paths not in self._files:
            aio = self._aio
            self._files[paths] = NvmeFiles(
                paths,
                self._rank,
                block_size=aio.block_size,
                queue_depth=aio.queue_depth,
                threads=aio.threads,
            )
        return self._files[paths]

    def buffer_bytes(self) -> Mapping[str, int]:
        return {what: pool.nbytes for what, pool in self._pools.items()}

    def close(self) -> None:
        self._files.clear()

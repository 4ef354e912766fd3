"""Host memory for offloaded state: exact to a page, populated at once, pinned if a device copies
from it.

torch's own pinned allocator rounds up to a power of two and zeroes on one thread. Here memory is
mapped, advised for huge pages, bound to the device's NUMA node, populated by all threads and then
registered with the device's runtime; if the runtime cannot register memory, torch's pinned
allocator is used. It is unmapped when the last tensor on it dies.

Forked children do not get it (MADV_DONTFORK): with it, each page that the parent writes while a
data loader's worker lives would be kept twice, and a page under a transfer could be replaced by a
copy.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from hf_zero.config.variables import local_world_size
from hf_zero.device import kinds, pinned
from hf_zero.device.host_limits import free_ram
from hf_zero.errors import HostMemoryError
from hf_zero.logging import logger

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_RANGE = ctypes.c_void_p, ctypes.c_size_t  # address and bytes
_LIBC.mmap.argtypes = (*_RANGE, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = _RANGE
_LIBC.madvise.argtypes = (*_RANGE, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value
_POPULATE_WRITE = 23  # for madvise, since Linux 5.14
_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call
_PREFERRED = 1  # for mbind: falls back to another node when this one is full
_CHUNK = 64 << 20  # the most bytes that a thread populates at a time
MAPPED_ALONE = 32 << 20  # bytes from which the C library maps each block by itself
_HUGE_PAGE = 2 << 20  # bytes; chunks are multiples of it
_PCI = Path("/sys/bus/pci/devices")


def numa_node(device: torch.device) -> int | None:
    """Return the NUMA node of a device; None where neither driver nor system reports it, as on
    hosts of one node.
    """
    try:
        properties = kinds.properties(device)
        bus, slot = properties.pci_bus_id, properties.pci_device_id
        address = f"{properties.pci_domain_id:04x}:{bus:02x}:{slot:02x}.0"
        node = int((_PCI / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def _prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Prefer ``node`` for the pages; return False if the system forbids it (as in containers)."""
    number = _MBIND.get(os.uname().machine)
    if number is None:
        return False
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << (node % 64)
    call = (
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_PREFERRED),
    )
    return bool(_LIBC.syscall(*call, mask, ctypes.c_ulong(1024), ctypes.c_uint(0)) == 0)


def _bring_in(address: int, nbytes: int, holds_zeros: bool) -> int:
    """Populate every page, on all cores of this rank; return an errno, or 0. Before Linux 5.14
    zeros are written, and pages of other content are populated when they are used.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    threads = max(1, cores // local_world_size(1))
    chunk = min(_CHUNK, -(-nbytes // (threads * _HUGE_PAGE)) * _HUGE_PAGE)

    def populate(start: int) -> int:
        length = min(chunk, nbytes - start)
        if _LIBC.madvise(address + start, length, _POPULATE_WRITE) == 0:
            return 0
        if ctypes.get_errno() != errno.EINVAL:
            return ctypes.get_errno()
        if holds_zeros:
            ctypes.memset(address + start, 0, length)
        return 0

    starts = range(0, nbytes, chunk)
    if len(starts) == 1:
        return populate(0)
    with ThreadPoolExecutor(threads) as pool:
        return max(pool.map(populate, starts))


def _release(
    address: int, nbytes: int, process: int, unregister: Callable[[int], object] | None
) -> None:
    if os.getpid() != process:
        return  # a forked child never had the pages, and may have mapped other memory there
    if unregister is not None:
        unregister(address)
    _LIBC.munmap(address, nbytes)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the system for huge pages for the storage of ``tensor``, in host memory that torch has
    just allocated, of at least :data:`MAPPED_ALONE` bytes: the first write to it then costs less.
    """
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (storage.data_ptr() + storage.nbytes()) // _HUGE_PAGE * _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # a kernel without huge pages refuses; small pages work too
        _LIBC.madvise(start, end - start, mmap.MADV_HUGEPAGE)


class HostArena:
    """Tensors on host memory of a rank.

    pin: pin the memory, so that copies to and from ``device`` are asynchronous and fast. Without
        effect if the device is the host. If the runtime refuses, one warning is logged and memory
        stays pageable.
    device: the device that copies from the memory, which is bound to its NUMA node.

    A tensor must outlive the copies that read or fill it: its memory is unregistered and unmapped
    when the last tensor on it dies.
    """

    def __init__(self, pin: bool = False, device: torch.device | None = None):
        self._device = device if device is not None and not kinds.is_synchronous(device) else None
        self._pins = pin and self._device is not None
        self._node = numa_node(self._device) if self._device is not None else None
        self._mapped: dict[int, int] = {}

    @property
    def pinned(self) -> bool:
        """Return whether the next memory taken will be pinned."""
        return self._pins

    @property
    def nbytes(self) -> int:
        """Bytes mapped for live tensors: each tensor's size, rounded up to a page."""
        return sum(self._mapped.values())

    def take(
        self, numel: int, dtype: torch.dtype, file: int | None = None, huge_pages: bool = True
    ) -> torch.Tensor:
        """Return ``numel`` zeros of ``dtype``: [numel], at an address that is a multiple of the
        page. With the descriptor of a ``file`` of so many bytes, the memory is the file: elements
        are what it holds, and writes to them change it; pages that it lacks are allocated.
        Memory that lives for a moment takes small pages (``huge_pages`` False), which a system
        finds at once.

        Raises HostMemoryError, and OSError where the file system has no room for the file.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        requested = numel * dtype.itemsize
        nbytes = -(-requested // mmap.PAGESIZE) * mmap.PAGESIZE
        free = free_ram().nbytes
        if file is None and nbytes > free:  # the file system counts a file's
            raise self._refused(requested, f"{free / 1e9:.2f} GB are free")
        registers = self._device is not None and pinned.registers(self._device)
        if self._pins and not registers and file is None:
            return self._allocate(requested, nbytes)[:requested].view(dtype)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file is None else mmap.MAP_SHARED
        address = _LIBC.mmap(None, nbytes, access, kind, -1 if file is None else file, 0)
        if address == _MAP_FAILED:
            raise self._refused(
                requested,
                f"the system says: {os.strerror(ctypes.get_errno())} (see ulimit -v); "
                f"{free / 1e9:.2f} GB are free",
            )
        self._advise(address, nbytes, huge_pages)
        try:
            if file is not None:
                # After mbind, so that its pages go to the node; SIGBUS would end this process where
                # the file system cannot give a page later.
                os.posix_fallocate(file, 0, requested)
            if error := _bring_in(address, nbytes, holds_zeros=file is None):
                why = f"the system says: {os.strerror(error)}; {free / 1e9:.2f} GB are free"
                raise self._refused(requested, why)
        except BaseException:
            _LIBC.munmap(address, nbytes)
            raise
        unregister = self._register(address, nbytes) if registers else None
        memory = self._held(
            address, nbytes, partial(_release, address, nbytes, os.getpid(), unregister)
        )
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def _advise(self, address: int, nbytes: int, huge_pages: bool) -> None:
        """Tell the system where pages of mapped memory belong, before the first write to them."""
        for advice in ("MADV_DONTFORK", *(["MADV_HUGEPAGE"] if huge_pages else [])):
            # a kernel without huge pages refuses the last; small pages work too
            if hasattr(mmap, advice):
                _LIBC.madvise(address, nbytes, getattr(mmap, advice))
        if self._node is not None and not _prefer_node(address, nbytes, self._node):
            logger.info(
                "host memory is not placed on NUMA node %d of %s: the system does "
                "not let this process",
                self._node,
                self._device,
            )
            self._node = None

    def _held(
        self, address: int, nbytes: int, release: Callable[[], object]
    ) -> ctypes.Array[ctypes.c_char]:
        """Return the bytes at ``address``, counted as long as a tensor on them lives, and released
        afterwards.
        """
        memory = (ctypes.c_char * nbytes).from_address(address)
        self._mapped[address] = nbytes
        # the last one registered runs first: another thread may get the address once it is released
        weakref.finalize(memory, release).atexit = False
        weakref.finalize(memory, self._mapped.pop, address, None).atexit = False
        return memory

    def _allocate(self, requested: int, nbytes: int) -> torch.Tensor:
        """Return zeros from torch's pinned allocator, page-aligned: [nbytes], uint8."""
        try:
            block = pinned.empty(nbytes + mmap.PAGESIZE, torch.uint8)
        except RuntimeError as error:
            raise self._refused(requested, f"torch says: {str(error).splitlines()[0]}") from error
        at = -block.data_ptr() % mmap.PAGESIZE
        # the reference keeps the block alive as long as the memory
        memory = self._held(block.data_ptr() + at, nbytes, block.untyped_storage)
        return torch.frombuffer(memory, dtype=torch.uint8).zero_()

    def _refused(self, nbytes: int, why: str) -> HostMemoryError:
        """Return the error for ``nbytes`` of memory that cannot be had."""
        return HostMemoryError(
            f"{nbytes / 1e9:.2f} GB of host memory for offloaded state are not to be had: {why}. "
            "Offload to nvme instead, use more ranks, or "
            "a smaller state (hf-zero estimate adds it up)"
        )

    def _register(self, address: int, nbytes: int) -> Callable[[int], object] | None:
        """Pin the pages; return the function that undoes it, or None."""
        if self._device is None or not self._pins:
            return None
        error, unregister = pinned.register(self._device, address, nbytes)
        if not error:
            return unregister
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        reason = ""
        if limit != resource.RLIM_INFINITY:
            reason = f"; RLIMIT_MEMLOCK is {limit} bytes: raise it with ulimit -l unlimited"
        logger.warning(
            "the driver does not pin %d bytes of host memory (error %d%s). It stays pageable: "
            "copies to %s will be slower",
            nbytes,
            error,
            reason,
            self._device,
        )
        self._pins = False
        return None

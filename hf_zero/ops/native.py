"""The native core ``hf_zero._cpu``: loaded at first use, or the reason why it is not.

A rank's share of threads does not depend on OMP_NUM_THREADS. Launchers set OMP_NUM_THREADS=1 so
that ranks do not compete for cores, which leaves cores idle while one rank updates its shard. A
rank may use the cores it is bound to; if the ranks of a machine share its cores, an equal part of
them.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from hf_zero.config.variables import is_off, local_world_size, positive_number
from hf_zero.errors import ConfigError, KernelError

SWITCH = "HF_ZERO_NATIVE"
INSTRUCTION_SET = "HF_ZERO_ISA"


@functools.cache
def _loaded() -> tuple[ModuleType | None, str]:
    """Return (the module, "") or (None, the reason why it is missing)."""
    if is_off(SWITCH):
        return None, f"{SWITCH}={os.environ[SWITCH]} switches it off"
    try:
        core = importlib.import_module("hf_zero._cpu")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        return (
            None,
            "it was not built: install hf-zero again where a C++17 compiler is on PATH"
            if missing
            else f"it does not load: {error}",
        )
    forced = os.environ.get(INSTRUCTION_SET)
    if forced:
        _force(core, forced)
    if not (hasattr(core, "round_stochastically") and hasattr(core, "quantize")):
        return None, "it was built from other sources: install hf-zero again"
    core.set_threads(default_share().threads)
    return core, ""


def _force(core: ModuleType, name: str) -> None:
    if name not in core.instruction_sets():
        raise ConfigError(
            f"instruction set {name!r} ({INSTRUCTION_SET}): this machine has "
            f"{', '.join(core.instruction_sets())}; write one of them"
        )
    core.set_instruction_set(name)


@functools.cache
def default_share() -> Share:
    """Return the threads that the core starts with, and the source of their number."""
    return share_of_this_rank()


def core() -> ModuleType | None:
    """Return the module ``hf_zero._cpu``, or None.

    Raises:
        ConfigError: HF_ZERO_ISA names an instruction set that this machine lacks, or
            HF_ZERO_THREADS is not a number.
    """
    return _loaded()[0]


def available() -> bool:
    """Return whether the native core runs."""
    return core() is not None


def why_not() -> str:
    """Return the reason why the native core does not run; empty if it does."""
    return _loaded()[1]


def instruction_set() -> str:
    """Return the instruction set that kernels use: avx512bf16, avx512, avx2, plain or neon; torch
    without a native core.
    """
    native_core = core()
    return "torch" if native_core is None else native_core.instruction_set()


def instruction_sets() -> list[str]:
    """Return this machine's instruction sets, the widest last; empty without the native core."""
    native_core = core()
    return [] if native_core is None else list(native_core.instruction_sets())


def set_instruction_set(name: str) -> None:
    """Run kernels with ``name`` from now on. Results do not depend on it.

    Raises:
        ConfigError: the machine lacks it; the message lists those it has.
        KernelError: there is no native core.
    """
    _force(_needed("set_instruction_set"), name)


def threads() -> int:
    """Return the number of threads that a kernel runs on."""
    native_core = core()
    if native_core is not None:
        return native_core.threads()
    import torch

    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Run kernels on ``count`` threads from now on. Results do not depend on it.

    Raises:
        KernelError: a count below 1 or above :data:`MAX_THREADS`, or no native core: torch's
            operations run on torch's own threads.
    """
    if not 1 <= count <= MAX_THREADS:
        raise KernelError(f"set_threads({count}): give a number from 1 to {MAX_THREADS:,}")
    _needed("set_threads, use torch.set_num_threads:").set_threads(count)


def end_by_parent_only(signals: Iterable[int]) -> None:
    """Let ``signals`` end this process only if its parent sends them; those of others do nothing.
    Without the native core they act as before.
    """
    install = getattr(core(), "end_by_parent_only", None)
    if install is not None:
        install(sorted(signals))


def release_at_exit(folder: Path, top: Path, mark: str, path: Path) -> None:
    """Have the file ``path`` removed when this process ends with code 0, however it comes to end,
    and with the last file beside it ``folder``, unless another process has claimed that; and its
    parents up to ``top`` that are then empty, under the lock of the file ``mark`` there. Does
    nothing without the native core, which alone learns of the code, through glibc.
    """
    register = getattr(core(), "release_at_exit", None)
    if register is not None:
        register(str(folder), str(top), mark, str(path))


def _needed(what: str) -> ModuleType:
    native_core = core()
    if native_core is None:
        raise KernelError(f"{what} there is no native core: {why_not()}")
    return native_core


VARIABLE = "HF_ZERO_THREADS"
MAX_THREADS = 4096


@dataclass(frozen=True)
class Share:
    """A number of threads and its source, in words."""

    threads: int
    source: str


def share_of_this_rank(environ: Mapping[str, str] | None = None) -> Share:
    """Return the threads for this rank, by the variables of ``environ`` (None: of this process).

    ``HF_ZERO_THREADS`` if it is set. Else the cores of the affinity mask, divided by
    ``LOCAL_WORLD_SIZE`` unless the launcher has bound this rank to a part of its own; at most the
    cgroup's cpu quota, divided by ``LOCAL_WORLD_SIZE``; at least 1.

    Raises:
        ConfigError: one of the two variables is not a number of at least 1, or ``HF_ZERO_THREADS``
            is above :data:`MAX_THREADS`.
    """
    if (threads := positive_number(VARIABLE, environ, MAX_THREADS)) is not None:
        return Share(threads, VARIABLE)
    ranks = local_world_size(1, environ)
    mine = _affinity(0)
    cores, bound = len(mine), mine < _affinity(os.getppid())
    among = f" among {ranks} local ranks" if ranks > 1 else ""
    share = cores if bound else max(1, cores // ranks)
    source = f"{cores} cores this rank is bound to" if bound else f"{cores} cores{among}"
    quota = cpu_quota()
    if quota is not None and quota / ranks < share:
        share = max(1, math.ceil(quota / ranks))
        source = f"a cgroup quota of {quota:g} cores{among}"
    return Share(share, source)


def cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Return the number of cores that the cgroups (v1 or v2) of this process allow, the least along
    the path; None without a limit.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None  # no cgroups on this system
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            mounts = (root / name for name in (controllers, "cpu") if (root / name).is_dir())
            base, read = next(mounts, root / "cpu"), _quota_v1
        else:
            continue
        # In a container the path may be that of the host, and the mount is the container's own
        # group: its root counts too.
        cgroup = base / path.lstrip("/")
        for folder in (cgroup, *cgroup.parents):
            quotas.append(read(folder))
            if folder == base:
                break
    limits = [quota for quota in quotas if quota is not None]
    return min(limits) if limits else None


def _quota_v2(folder: Path) -> float | None:
    words = _words(folder / "cpu.max")
    return None if len(words) != 2 or words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    return None if not quota or not period or int(quota[0]) <= 0 else int(quota[0]) / int(period[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # the group has no such file (the root has none): no limit


def _affinity(pid: int) -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    try:
        return os.sched_getaffinity(pid)
    except OSError:  # the parent has ended or is another user's: compare with the machine
        return set(range(os.cpu_count() or 1))


# the constants of kernels/cpu/kernels.h
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SIGNED_BLOCKS, UNSIGNED_BLOCKS, SIGNED_DYNAMIC, UNSIGNED_DYNAMIC = 3, 4, 5, 6
FLOATS = tuple(DTYPE_CODES)
FP32 = (torch.float32,)


def flat(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    numel: int | None = None,
    device: str = "cpu",
) -> Tensor:
    """Return ``tensor`` if it is 1-D, contiguous, on a device of type ``device``, of one of
    ``dtypes`` and of ``numel`` elements.

    Raises:
        KernelError: it is not; the message has the remedy.
    """
    if tensor.device.type != device:
        raise KernelError(
            f"{op}: {name} is on {tensor.device}; host kernels take CPU tensors: copy it with "
            ".cpu(), or update it on its device"
        )
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise KernelError(
            f"{op}: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; give a "
            "contiguous 1-D view of it"
        )
    if tensor.dtype not in dtypes:
        raise KernelError(
            f"{op}: {name} is {tensor.dtype}; give one of {', '.join(map(str, dtypes))}"
        )
    if numel is not None and tensor.numel() != numel:
        raise KernelError(
            f"{op}: {name} has {tensor.numel()} elements and the others have "
            f"{numel}; cut them alike"
        )
    return tensor


def rows_of_bytes(op: str, messages: Tensor, nbytes: int, what: str) -> None:
    """Raise KernelError unless ``messages`` is contiguous, uint8 [rows, nbytes]; ``what`` names the
    messages in the error.
    """
    if (
        messages.dtype != torch.uint8
        or messages.dim() != 2
        or messages.shape[1] != nbytes
        or not messages.is_contiguous()
    ):
        raise KernelError(
            f"{op}: messages are {messages.dtype} of shape {tuple(messages.shape)}; {what} are "
            f"contiguous rows of {nbytes} bytes"
        )


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def kind(tensor: Tensor | None) -> int:
    return 0 if tensor is None else DTYPE_CODES[tensor.dtype]


def squared_norm(tensor: Tensor) -> float:
    """Return the sum of squares of ``tensor`` in float64; not finite if an element is not.

    Equal for any number of threads of the core; torch, without a core, adds in another order.
    Raises KernelError, naming the tensor, for a wrong device, layout or dtype.
    """
    flat("squared_norm", "tensor", tensor, FLOATS)
    native = core()
    if native is None:
        return float(tensor.double().square().sum())
    norm: float = native.squared_norm(tensor.data_ptr(), DTYPE_CODES[tensor.dtype], tensor.numel())
    return norm

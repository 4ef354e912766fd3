"""The simulated device of this process: importing this loads it, and registers it with torch.

It is the backend "late", or CUDA itself with LATE_AS=cuda in the environment; then this module has
to be imported before torch. What the process is asked with:

    configure(mode)     inline, eager, random, lazy or aliased: see the README
    reports(), forget() what was found: (kind, text) each
    stats()             counters; "sync_ops" are the operations that made the host wait
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import json
import os
import sys
from typing import Any

from tests.late import build

AS_CUDA = os.environ.get("LATE_AS") == "cuda"
NAME = "cuda" if AS_CUDA else "late"


def _load() -> Any:
    path = str(build.library())
    if AS_CUDA:
        if "torch" in sys.modules:
            raise ImportError("tests.late.device: with LATE_AS=cuda it must come before torch")
        # Torch asks for CUDA's hooks once, while it is imported: ours must be registered by then.
        for name in ("c10", "torch_cpu", "torch", "torch_python"):
            ctypes.CDLL(str(build.torch_folder() / "lib" / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(path)
    import torch  # noqa: F401

    loader = importlib.machinery.ExtensionFileLoader("late_C", path)
    spec = importlib.util.spec_from_loader("late_C", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def set_devices() -> None:
    """Set the number of devices to that of the environment."""
    C.set_devices(int(os.environ.get("LATE_DEVICES") or os.environ.get("LOCAL_WORLD_SIZE") or 1))


C = _load()
set_devices()

import torch._meta_registrations  # noqa: E402  # the meta kernels that are written in Python

reports, forget, stats, synchronize_all = C.reports, C.forget, C.stats, C.synchronize_all
drop, drop_nothing, drops = C.drop, C.drop_nothing, C.drops


def configure(mode: str = "lazy", seed: int = 0, max_us: int = 500, nap: float = 0.3) -> None:
    """Run tasks so from now on. ``seed``, ``max_us``, ``nap``: of the pauses in mode random."""
    C.configure(mode, max_us, seed, nap)


def flags(
    detect: bool = True, poison: bool = True, guard_host: bool = True, sites: bool = True
) -> None:
    """The checks: races, NaN in new memory, host memory under copies; Python sites in reports."""
    C.flags(detect, poison, guard_host, sites)


def only_device(index: int | None) -> None:
    """From now on a context on another device than ``index`` is a report; None allows all."""
    C.allow_devices(0xFFFFFFFF if index is None else 1 << index)


def begin(mode: str) -> int:
    """Run tasks by ``mode`` ("random:3" has a seed), on this process's own device; its rank."""
    rank, (kind, _, seed) = int(os.environ.get("RANK", "0")), mode.partition(":")
    configure(kind, seed=int(seed or 0) + rank, max_us=300, nap=0.2)
    only_device(int(os.environ.get("LOCAL_RANK", "0")))
    return rank


def tell(**row: Any) -> None:
    """Print ``row`` as a line of JSON."""
    print(json.dumps(row), flush=True)


def _register() -> None:
    from tests.late import collectives, torch_module

    if AS_CUDA:
        from tests.late import posing

        posing.pose(torch_module)
    else:
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, torch_module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    collectives.register()


_register()
flags()

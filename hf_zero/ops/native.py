"""The native core ``hf_zero._cpu``: loaded at first use, or the reason why it is not."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from hf_zero.errors import ConfigError, KernelError
from hf_zero.ops.share import Share, share_of_this_rank

SWITCH = "HF_ZERO_NATIVE"
INSTRUCTION_SET = "HF_ZERO_ISA"


@functools.cache
def _loaded() -> tuple[Any, str]:
    """Return (the module, "") or (None, the reason why it is missing)."""
    if os.environ.get(SWITCH, "").strip().lower() in {"0", "false", "off", "no"}:
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
    core.set_threads(default_share().threads)
    return core, ""


def _force(core: Any, name: str) -> None:
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


def core() -> Any:
    """Return the module ``hf_zero._cpu``, or None.

    Raises:
        ConfigError: HF_ZERO_ISA names an instruction set that this machine lacks, or
            HF_ZERO_THREADS is no number.
    """
    return _loaded()[0]


def available() -> bool:
    """Whether the native core runs."""
    return core() is not None


def why_not() -> str:
    """Return the reason why the native core does not run; empty if it does."""
    return _loaded()[1]


def instruction_set() -> str:
    """Return the instruction set that kernels use: avx512bf16, avx512, avx2, plain or neon; torch
    without a native core.
    """
    return core().instruction_set() if available() else "torch"


def instruction_sets() -> list[str]:
    """Return this machine's instruction sets, the widest last; empty without the native core."""
    return list(core().instruction_sets()) if available() else []


def set_instruction_set(name: str) -> None:
    """Run kernels with ``name`` from now on. Results do not depend on it.

    Raises:
        ConfigError: the machine lacks it; the message lists those it has.
        KernelError: there is no native core.
    """
    _force(_needed("set_instruction_set"), name)


def threads() -> int:
    """Return the number of threads that a kernel runs on."""
    if available():
        return core().threads()
    import torch

    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Run kernels on ``count`` threads from now on. Results do not depend on it.

    Raises:
        KernelError: a count below 1, or no native core: torch's operations run on torch's own
            threads.
    """
    if count < 1:
        raise KernelError(f"set_threads({count}): give a number of at least 1")
    _needed("set_threads, use torch.set_num_threads:").set_threads(count)


def _needed(what: str) -> Any:
    if not available():
        raise KernelError(f"{what} there is no native core: {why_not()}")
    return core()

"""The environment variables of hf-zero, with the values that each takes, and a warning about those
that have no effect.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping

from hf_zero.config.spelling import closest
from hf_zero.errors import ConfigError
from hf_zero.logging import LEVELS, STEPS, WARNED, listed, log_rank0

PREFIXES = ("HF_ZERO_", "HFZERO_")  # the first, and a misspelling of it
OFF = ("0", "false", "off", "no")
SWITCH = ("1", "true", "on", "yes", *OFF)
SWITCHES = ("AUTOLOAD", "PREFLIGHT", "TRACEBACK", "NATIVE", "TRITON")
ANY_VALUE = (
    "DEEPSPEED_VERSION", "HOST", "LOG", "SSH", "THREADS", "ISA", "IO_FAULT", "REQUIRE_CORE",
    "CXXFLAGS", "VENV", "TORCH", "LAUNCH_FILE", "LAUNCHED_BY", "WRITTEN_KEYS", "WARNED",
)  # fmt: skip
# A ConfigError names other values of a variable without values here, where hf-zero reads it.
VARIABLES: dict[str, tuple[str, ...]] = {
    **{f"HF_ZERO_{name}": SWITCH for name in SWITCHES},
    "HF_ZERO_BACKEND": ("hf_zero", "deepspeed"),
    "HF_ZERO_LOG_LEVEL": (*LEVELS, *STEPS),
    "HF_ZERO_IO": ("io_uring", "threads", "python"),
    **{f"HF_ZERO_{name}": () for name in ANY_VALUE},
}
SAID_BY_LOG = ("HF_ZERO_LOG_LEVEL",)  # hf_zero.logging warns about its value when it is imported


def is_off(name: str) -> bool:
    """Return whether the variable ``name``, a switch, is off; one that is not set is not."""
    return os.environ.get(name, "").strip().lower() in OFF


def positive_number(
    name: str, environ: Mapping[str, str] | None = None, most: int | None = None
) -> int | None:
    """Return the whole number that the variable ``name`` of ``environ`` (None: of this process)
    holds, or None if it is unset or empty.

    Raises:
        ConfigError: it holds something else, or a number below 1 or above ``most``.
    """
    value = (os.environ if environ is None else environ).get(name, "").strip()
    if not value:
        return None
    if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= (most or int(value)):
        limit = "of at least 1" if most is None else f"from 1 to {most:,}"
        raise ConfigError(f"{name} is {value!r}; write a number {limit}, or unset it")
    return int(value)


def local_world_size(default: int, environ: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks on this host as the launcher states it, else ``default``.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE is not a number of at least 1.
    """
    return positive_number("LOCAL_WORLD_SIZE", environ) or default


def faults(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, what is wrong with it) of each variable that has the prefix of hf-zero's and is
    unknown, or has an unknown value.
    """
    short = {name.removeprefix(PREFIXES[0]): name for name in VARIABLES}
    for name, value in sorted(environment.items()):
        choices = VARIABLES.get(name)
        if choices is None and name.startswith(PREFIXES):
            meant = closest(
                name.removeprefix(PREFIXES[0]).removeprefix(PREFIXES[1]), short, limit=1
            )
            remedy = "`hf-zero docs environment` lists the variables"
            if meant:
                remedy = f"did you mean {short[meant[0]]}?"
            yield name, f"hf-zero has no such variable; {remedy}"
        elif choices and value.strip() and value.strip().lower() not in choices:
            choice = "0 or 1" if choices is SWITCH else listed(choices)
            counts = "unknown and counts as 1" if choices is SWITCH else "unknown"
            yield name, f"{value!r} is {counts}; write {choice}, or unset it"


def warn_once() -> None:
    """Log the faults of this process's environment on rank 0, unless this process or the launcher
    that started it has done so.
    """
    problems = [*faults(os.environ)]
    if problems and WARNED not in os.environ:
        os.environ[WARNED] = "1"
        for name, problem in problems:
            if name not in SAID_BY_LOG:
                log_rank0(f"{name}: {problem}", logging.WARNING)

"""The package's one logger, named ``hf_zero``, and text: lists of names, curves, bytes and rates in
units for messages; parsers of bytes, of rates, and of the JSON in all files and from all programs.

``HF_ZERO_LOG_LEVEL`` sets the level of the logger (default ``info``). ``steps`` is ``debug`` with
the order of each step on rank 0, ``steps:all`` on every rank (``hf_zero/device/spans.py``).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from hf_zero.errors import ConfigError


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names for a message: the first ``most``, and how many more there are."""
    ordered = list(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def abridged(texts: Iterable[str], most: int = 3) -> str:
    """Return texts as :func:`listed` does, with a code of all: it differs wherever one differs."""
    every = list(texts)
    text = listed(every, most)
    return text if len(every) <= most else f"{text} (code {zlib.crc32(str(every).encode()):08x})"


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line for each row of cells, in columns that are two spaces apart."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def counted(number: int, noun: str, several: str = "") -> str:
    """Return a number with its noun: 1 rank, 2 ranks; ``several``: the plural, if it is no -s."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {several or f'{noun}s'}"


def first_line(error: BaseException) -> str:
    """Return the class of ``error`` and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # columns of a curve


def curve(values: Sequence[float], width: int = WIDTH) -> str:
    """Return ``values`` as a line of blocks: means of ``width`` parts, from least to most."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    ends = [len(finite) * part // count for part in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


_UNITS = {"": 1, "B": 1} | {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
# in the dialect of regular expressions that Python and JSON Schema share
SIZE_PATTERN = r"^\s*(\d+(?:\.\d+)?)\s*((?:[kKmMgGtT][iI]?)?[bB]|)\s*$"


def in_units(nbytes: float) -> str:
    """Return bytes in decimal units: 1.23 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 999.995:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.2f} TB"


def parse_size(text: str) -> int:
    """Parse ``80GB`` (decimal) or ``128GiB`` (binary) to bytes. Raises ConfigError."""
    match = re.fullmatch(SIZE_PATTERN, text)
    nbytes = math.inf if match is None else float(match[1]) * _UNITS[match[2].upper()]
    if nbytes == math.inf:
        raise ConfigError(
            f"{text!r} is not a number of bytes; write 80GB (decimal) or 128GiB (binary), for "
            "instance"
        )
    return int(nbytes)


def rate_in_units(bits: float) -> str:
    """Return bits a second in decimal units: 1.2 Gbit/s."""
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if bits < 999.5:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{float(f'{bits:.3g}'):,g} Tbit/s"


def parse_rate(text: str) -> float:
    """Parse ``100Mbit``, ``1Gbit/s`` or ``25Gbps`` to bits a second. Raises ConfigError."""
    # no capital B, which would mean bytes
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGTmgt]?)b(?:it)?(?:/s|ps)?\s*", text)
    rate = 0.0
    if match is not None:
        rate = float(match[1]) * 1000.0 ** " KMGT".index(match[2].upper() or " ")
    if not 0 < rate < math.inf:
        raise ConfigError(f"{text!r} is no number of bits a second; write 1Gbit, for instance")
    return rate


JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON text; its reader checks the values."""


class DuplicateKeyError(ValueError):
    """Two values of ``key`` in one object: parsers differ in which of them counts."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r:.80} occurs twice in one section")


class NestingError(ValueError, RecursionError):
    """Values too deep in each other."""


def parse_json(text: str | bytes) -> Any:
    """Return the value in ``text``.

    Raises ValueError: JSONDecodeError, UnicodeDecodeError, DuplicateKeyError or NestingError.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise NestingError("values are too deep in each other") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return values


def finite(value: object) -> object:
    """Return ``value``, or None for a number that is not finite, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


LEVELS = ("debug", "info", "warning", "error", "critical")
STEPS = ("steps", "steps:all")
# set where warnings about the environment were logged: ranks that inherit it do not repeat them
WARNED = "HF_ZERO_WARNED"
# values of HF_ZERO_LOG, the variable's name before, and those of today
BEFORE = {"debug": "steps", "debug:all": "steps:all"}


def asked_in(environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return one of LEVELS and STEPS, by variables of ``environment``, and warnings about them."""
    asked, older = (environment.get(name, "") for name in ("HF_ZERO_LOG_LEVEL", "HF_ZERO_LOG"))
    asked, warnings = asked.lower(), []
    if older:
        today = BEFORE.get(older.lower(), older.lower())
        warnings.append(
            f"HF_ZERO_LOG={older} has no effect beside HF_ZERO_LOG_LEVEL={asked}; unset it"
            if asked
            else f"HF_ZERO_LOG={older} is read as HF_ZERO_LOG_LEVEL={today}; set that instead"
        )
        asked = asked or today
    if asked not in ("", *LEVELS, *STEPS):
        known = listed((*LEVELS, *STEPS))
        warnings.append(
            f"HF_ZERO_LOG_LEVEL={asked} is unknown and has no effect; set it to {known}"
        )
        asked = ""
    return asked or "info", warnings


logger = logging.getLogger("hf_zero")


def log_rank0(message: str, level: int = logging.INFO) -> None:
    """Log once per job: on the process whose ``RANK`` is 0 (or unset)."""
    if os.environ.get("RANK", "0") == "0":
        logger.log(level, message)


def set_level(level: int | str, of: logging.Logger = logger) -> None:
    """Log messages of at least this level, in ``of`` and its handlers."""
    of.setLevel(level)
    for handler in of.handlers:
        handler.setLevel(level)


def _rank_of(record: logging.LogRecord) -> bool:
    # read when a record is made: under srun and mpirun RANK is found after this import
    record.rank = os.environ.get("RANK", "0")
    return True


# what HF_ZERO_LOG_LEVEL has asked for
asked_level, _warnings = asked_in(os.environ)

if not logger.handlers:
    _handler = logging.StreamHandler()
    _handler.addFilter(_rank_of)
    _handler.setFormatter(logging.Formatter("[hf-zero %(levelname)s rank %(rank)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel("DEBUG" if asked_level in STEPS else asked_level.upper())
    logger.propagate = False
    for _warning in [] if WARNED in os.environ else _warnings:
        log_rank0(_warning, logging.WARNING)

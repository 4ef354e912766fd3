"""Bytes in words: 1.23 GB, and back."""

from __future__ import annotations

import re

from hf_zero.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def in_units(nbytes: float) -> str:
    """Bytes in decimal units: 1.23 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.2f} TB"


def parse_size(text: str) -> int:
    """``80GB`` (decimal) or ``128GiB`` (binary) as bytes. Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise ConfigError(
            f"{text!r} is no number of bytes; write 80GB (decimal) or 128GiB (binary), for instance"
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])

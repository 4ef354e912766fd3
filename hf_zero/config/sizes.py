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


def parse_rate(text: str) -> float:
    """``100Mbit``, ``1Gbit/s`` or ``25Gbps`` as bits a second. Raises ConfigError."""
    # a capital B would be bytes
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGTmgt]?)b(?:it)?(?:/s|ps)?\s*", text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"{text!r} is no speed of a link; write 100Mbit or 1Gbit, for instance")
    return float(found[1]) * 1000.0 ** " KMGT".index(found[2].upper() or " ")


def rate_in_units(bits: float) -> str:
    """Bits a second in decimal units: 1.2 Gbit/s."""
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if bits < 1000:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:,.3g} Tbit/s"


def parse_size(text: str) -> int:
    """``80GB`` (decimal) or ``128GiB`` (binary) as bytes. Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise ConfigError(
            f"{text!r} is no number of bytes; write 80GB (decimal) or 128GiB (binary), for instance"
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])

"""Bytes in words, both ways."""

from __future__ import annotations

import pytest

from hf_zero.errors import ConfigError
from hf_zero.logging import in_units, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80_000_000_000),
        ("128GiB", 128 << 30),
        ("1.5 tb", 1_500_000_000_000),
        ("7", 7),
        ("7B", 7),
        ("2kb", 2000),
        ("3MiB", 3 << 20),
    ],
)
def test_a_size_is_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80 gigs", "1e9", "80 G B"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text!r} is not a number of bytes; write 80GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1.5e9, "1.50 GB"), (2e15, "2,000.00 TB")],
)
def test_bytes_in_words(nbytes: float, text: str) -> None:
    assert in_units(nbytes) == text

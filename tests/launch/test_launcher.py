"""What ``hf-zero launch`` repeats of the error of a rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_zero.launch import launcher

LONG = "which says at length what else is to be known about it and what might be done, " * 2


@pytest.mark.parametrize(
    ("error", "repeated"),
    [
        (
            "ConfigError: stage = 7 is unknown; write 0 to 3",
            " (ConfigError: stage = 7 is unknown; write 0 to 3)",
        ),
        (
            f"ConfigError: a.json: stage = 7 is unknown; {LONG}",
            " (ConfigError: a.json: stage = 7 is unknown)",
        ),
        (f"LaunchError: rank 1 has ended. {LONG}", " (LaunchError: rank 1 has ended)"),
        (f"ConfigError: it, {LONG}", " (ConfigError)"),
        ("ConfigError: 3 mistakes:", " (ConfigError: 3 mistakes)"),
        ("", ""),
    ],
)
def test_an_error_is_repeated_in_whole_sentences(error: str, repeated: str) -> None:
    message = {"message": error} if error else "signal"
    failure = SimpleNamespace(error_file_data={"message": message}, timestamp=1)
    assert launcher._first({3: failure}) == (3, failure, repeated)

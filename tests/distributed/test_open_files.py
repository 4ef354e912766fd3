"""The limit of open files, which the connections of many ranks exceed."""

from __future__ import annotations

import resource

import pytest

from hf_zero.distributed import process_group

UNLIMITED = resource.RLIM_INFINITY


# soft and hard limit, ranks, limit afterwards, whether it is told
LIMITS = [
    (1024, 524_288, 8, 1024, False),
    (1024, 524_288, 256, 4608, False),
    (1024, UNLIMITED, 1024, 16_896, False),
    (1024, 4096, 1024, 4096, True),
    (65_536, 65_536, 1024, 65_536, False),
    (UNLIMITED, UNLIMITED, 1024, UNLIMITED, False),
]


def test_the_limit_of_open_files_is_raised_to_what_ranks_need(
    monkeypatch: pytest.MonkeyPatch, heard_in_full: list[str]
) -> None:
    for soft, hard, world, limit, told in LIMITS:
        heard_in_full.clear()
        limits = {resource.RLIMIT_NOFILE: (soft, hard)}
        with monkeypatch.context() as patch:
            patch.setattr(resource, "getrlimit", limits.get)
            patch.setattr(resource, "setrlimit", limits.__setitem__)
            process_group.allow_connections(world)
        assert limits == {resource.RLIMIT_NOFILE: (limit, hard)}
        assert any("Too many open files" in line for line in heard_in_full) == told


def test_a_process_may_raise_its_own_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, before[1]))
    try:
        process_group.allow_connections(40)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1152
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

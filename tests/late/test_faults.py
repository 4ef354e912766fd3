"""Each fault that is put into hf_zero is found by the device, whatever the numbers say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.late import launch

# Of each kind (waits, copies, orders) one or two; the long suite puts in the others.
# Of each kind (waits, copies, orders) one; the long suite puts in the others.
FAST = (
    "compute does not wait for a gather",
    "a pinned buffer is refilled under its copy",
    "one rank gathers in another order",
    "one rank prefetches one unit less",
    "updated parameters are gathered on another stream",
    "a stage does not wait for what it receives",
    "a generation is copied before the update",
)
OVER_HOSTS = (
    "odd ranks issue second hops in another order",
    "a second hop does not wait for the first",
    "a first hop does not wait for what it gathers",
    "what is gathered is freed under the first hop",
)


def survivors(mode: str, *names: str, ranks: int = 2, hosts: int = 1) -> list[str]:
    """Faults that struck nowhere, or that no rank has reported as what they are."""
    rows = launch.run_ranks("tests.late.faults", mode, *names, ranks=ranks, hosts=hosts)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["fault"], []).append(row)
    assert len(by_name) == len(names) or (not names and len(by_name) >= 20)
    lived = []
    for name, found in by_name.items():
        kinds = {kind for row in found for kind, _ in row["reports"]}
        if not any(row["struck"] for row in found):
            lived.append(f"{name}: it was put nowhere")
        elif not kinds & set(found[0]["kinds"]):
            lived.append(f"{name}: reports {kinds or 'none'}, {[row['error'] for row in found]}")
    return lived


def test_no_fault_survives() -> None:
    launch.needs_the_device()
    assert survivors("eager", *FAST) == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["eager", "random:1", "random:2", "random:3"])
def test_no_fault_survives_in_other_modes(mode: str) -> None:
    launch.needs_the_device()
    assert survivors(mode) == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["eager", "random:1"])
def test_no_fault_of_hops_survives(mode: str) -> None:
    launch.needs_the_device()
    assert survivors(mode, *OVER_HOSTS, ranks=4, hosts=2) == []

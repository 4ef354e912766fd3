"""Host synchronisations of a step on the simulated device: blocking copies in either direction,
waits for events and streams. None but those of the table.
"""

from __future__ import annotations

import pytest

from tests.helpers.cells import fast
from tests.late import host_syncs, launch

# of two micro-batches: the host learns in each of four layers how many rows go where, for experts
# without a capacity
EXPECTED = {
    "experts": {"dispatch.py: _to_copy": 8},
    "experts, checkpointed": {"dispatch.py: _to_copy": 8},  # none in the recomputation
}


NOTED = {
    "to the device": ["_to_copy"],
    "into the device": ["copy_"],
    "not pinned": ["_to_copy"],
    "numbers": ["tensor of numbers"],
    "to the host": ["_to_copy"],
    "an event": ["synchronize"],
    "the whole device": ["synchronize"],
    "uploaded": [],
    "into pinned memory": [],
    "on the device": [],
}


def test_the_counter_sees_copies_in_both_directions_and_waits() -> None:
    launch.needs_the_device()
    env = launch.environment(as_cuda=True)
    (row,) = launch.run_ranks("tests.late.host_syncs", "counter", ranks=1, env=env)
    assert row["found"] == NOTED and not row["reports"]


@pytest.mark.parametrize("names", fast(host_syncs.CASES, ("alone", "sequence").__contains__))
def test_a_step_waits_for_the_device_as_often_as_the_table_says(names: str) -> None:
    launch.needs_the_device()
    env = launch.environment(as_cuda=True)
    rows = launch.run_ranks("tests.late.host_syncs", names, env=env)
    assert {row["case"] for row in rows} == host_syncs.CASES[names].keys()
    for row in rows:
        assert not row["reports"], row
        expected = EXPECTED.get(row["case"], {})
        assert row["found"] in ([expected, expected], [{}, expected]), row

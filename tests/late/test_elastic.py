"""A training that goes on with other ranks, another stage and other places of its states, on the
device: no report, and the losses of a plain loop.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.late import launch

RANKS, STEPS, CLOSE = (2, 1, 2), 2, 1e-5  # ranks of each leg, steps of each; relative


@pytest.mark.long
@pytest.mark.parametrize("mode", ["random", "lazy", "aliased"])
def test_it_goes_on_elsewhere(mode: str, tmp_path: Path) -> None:
    launch.needs_the_device()
    legs = [
        launch.run_ranks("tests.late.elastic", mode, str(tmp_path), str(leg), ranks=ranks)
        for leg, ranks in enumerate(RANKS)
    ]
    plain = next(row["losses"] for row in legs[0] if row["way"] == "plain")
    rows = [(leg, row) for leg, found in enumerate(legs) for row in found if row["way"] != "plain"]
    assert len(rows) == 3 * sum(RANKS)
    for leg, row in rows:
        assert row["reports"] == [], row
        for at, losses in enumerate(row["losses"]):
            expected = plain[leg * STEPS + at][row["rank"] :: RANKS[leg]]
            assert losses == pytest.approx(expected, rel=CLOSE), (leg, row)

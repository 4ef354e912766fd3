"""Right and broken programs are judged rightly in every mode."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.helpers.cells import fast
from tests.late import launch

MODES = ["inline", "eager", "lazy", "random:1"]


@pytest.mark.parametrize(
    "as_cuda", fast([False, True], lambda as_cuda: as_cuda), ids=["late", "cuda"]
)
def test_each_program_is_judged_rightly(as_cuda: bool) -> None:
    launch.needs_the_device()
    env = launch.environment(as_cuda, LATE_DEVICES="2")
    rows = launch.rows(launch.run("tests.late.parts", *MODES, env=env))
    by_mode: dict[tuple[str, str], Any] = {(row["mode"], row["name"]): row for row in rows}
    programs = {name for _, name in by_mode}
    assert len(by_mode) == len(programs) * len(MODES) and len(programs) >= 15
    wrong = []
    for (mode, name), row in by_mode.items():
        kinds = {kind for kind, _ in row["reports"]}
        wanted = {row["wanted"]} - {""}
        if not (wanted <= kinds) or (kinds and not wanted):
            wrong.append(f"{mode} {name}: reports {row['reports']}, expected {wanted or 'none'}")
        inline = by_mode["inline", name]["value"]
        if not wanted and not (
            isinstance(row["value"], float) and math.isclose(row["value"], inline)
        ):
            wrong.append(f"{mode} {name}: {row['value']} instead of {inline}")
    assert not wrong

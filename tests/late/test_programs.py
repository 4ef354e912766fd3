"""Right and broken programs are judged rightly in every mode, and each fault that is put into
hf_zero is found, whatever the numbers say.
"""

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
    assert len(by_mode) == len(programs) * len(MODES) and len(programs) >= 20
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


OVER_HOSTS = (
    "a second hop does not wait for the first",
    "a first hop does not wait for what it gathers",
    "what is gathered is freed under the first hop",
    "parameters that other ranks use are read before their number comes",
)
IN_LAZY = ("an engine ends under the copies of activations",)
ON_ONE_RANK = (
    "shards are on the device before their copy begins",
    "a branch does not wait for a unit that the other one prefetches",
    "a forward does not wait for the copies of an update",
    "the gradient norm is reported under its copy",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "names", "ranks"),
    [
        (mode, *chosen)
        for mode in ("eager", "random:1")
        for chosen in (((), 2), (OVER_HOSTS, 4), (ON_ONE_RANK, 1))
    ]
    + [("lazy", IN_LAZY, 2)],
)
def test_no_fault_survives(mode: str, names: tuple[str, ...], ranks: int) -> None:
    launch.needs_the_device()
    words = ("tests.late.faults", mode, *names)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in launch.run_ranks(*words, ranks=ranks, hosts=-(-ranks // 2)):
        by_name.setdefault(row["fault"], []).append(row)
    assert len(by_name) == len(names) or (not names and len(by_name) >= 50)
    lived = []
    for name, found in by_name.items():
        kinds = {kind for row in found for kind, _ in row["reports"]}
        if not any(row["struck"] for row in found):
            lived.append(f"{name}: it was put nowhere")
        elif not kinds & set(found[0]["kinds"]):
            lived.append(f"{name}: reports {kinds or 'none'}, {[row['error'] for row in found]}")
    assert lived == []

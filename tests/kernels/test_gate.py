"""Every Triton kernel, as it ships, compiled for the GPUs it is meant for and found fit."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from tests.helpers import aot_gate
from tests.helpers.aot_gate import Case, Report, problems
from tests.helpers.cells import runs_long

WHY_NOT = aot_gate.why_not()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "ptxas is here")
def test_kernels_are_fit_for_their_gpus(pytestconfig: pytest.Config) -> None:
    """A compilation takes 0.1 to 2.4 s: the fast suite looks at the first case of each kernel for
    sm_90.
    """
    cases, wrong = aot_gate.cases(), list[str]()
    wanted = [(label, arch) for label, case in cases.items() for arch in case.archs]
    if not runs_long(pytestconfig):
        firsts = {case.kernel.__name__: label for label, case in reversed(cases.items())}
        wanted = [(label, 90) for label in firsts.values()]
    for (label, arch), report in aot_gate.measure(wanted).items():
        case = cases[label]
        wrong += [f"{label}, sm_{arch}: {each}" for each in problems(case, report)]
    assert wrong == []


def test_each_kernel_has_a_case_and_a_row_in_the_readme() -> None:
    readme = (aot_gate.ROOT / "kernels" / "README.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE)
    assert {case.kernel.__name__ for case in aot_gate.cases().values()} == {*named}


CASE = Case(
    kernel=SimpleNamespace(__name__="kernel", arg_names=["x", "n", "BLOCK"]),
    name="1024",
    signature={"x": "*bf16", "n": "i32"},
    constexprs={"BLOCK": 1024},
    aligned=("x",),
    num_warps=4,
    num_stages=1,
    dot=False,
    min_occupancy=0.5,
)
NONE = dict.fromkeys(aot_gate.INSTRUCTIONS, 0)
LOADS = {**NONE, "16-byte loads": 2}
FIT = Report("kernel 1024", 90, 4, registers=64, shared=1024, instructions=LOADS)


def test_what_may_not_ship_is_said() -> None:
    assert problems(CASE, FIT) == [] and FIT.blocks_per_sm == 8 and FIT.occupancy == 0.5
    for change, said in (
        ({"spilled": 8}, "8 bytes of registers spill where 0 are stated"),
        ({"shared": 232_449}, "a block of sm_90 has 232,448"),
        ({"traps": True}, "a trap in its place"),
        ({"serialized": True}, "serialized"),
        ({"instructions": NONE}, "no 16-byte loads"),
        ({"registers": 65}, "occupancy 0.44 where 0.50 is stated"),
        ({"error": "does not compile: CompilationError"}, "does not compile"),
    ):
        assert said in " ".join(problems(CASE, replace(FIT, **change))), change
    assert problems(replace(CASE, max_spilled=8), replace(FIT, spilled=8)) == []
    assert "no wgmma" in " ".join(problems(replace(CASE, dot=True), FIT))
    assert "takes ['BLOCK', 'n', 'x']" in replace(CASE, signature={"x": "*bf16"}).unnamed()

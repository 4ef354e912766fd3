"""Every Triton kernel, as it ships, compiled for the GPUs it is meant for and found fit:
helpers/aot_gate.py says what that is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

from tests.helpers import aot_gate  # noqa: E402
from tests.helpers.aot_gate import Case, Report, problems  # noqa: E402
from tests.helpers.triton_releases import SUPPORTED, UnsupportedTriton  # noqa: E402

WHY_NOT = aot_gate.why_not()
TABLE = aot_gate.Table.read(aot_gate.README.read_text())


def ends() -> set[str]:
    """The first and the last case that is declared of each kernel."""
    labels: dict[str, list[str]] = {}
    for label, case in aot_gate.cases().items():
        labels.setdefault(case.kernel.__name__, []).append(label)
    return {label for each in labels.values() for label in (each[0], each[-1])}


WRITE = "run python -m tests.helpers.aot_gate --write"
OFTEN = ends()
# A compilation takes 0.1 to 2.4 s: the fast suite looks at some for one architecture, --long at
# all.
WANTED = [
    pytest.param(
        label,
        arch,
        id=f"{label}-sm_{arch}".replace(" ", "-"),
        marks=[] if arch == 90 and label in OFTEN else pytest.mark.long,
    )
    for label, case in aot_gate.cases().items()
    for arch in case.archs
]

Reports = dict[tuple[str, int], Report]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Reports:
    """Compile the kernels of the selected tests in parallel; return their reports."""
    selected = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    return aot_gate.measure(
        (each["label"], each["arch"]) for each in selected if {"label", "arch"} <= each.keys()
    )


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "ptxas is here")
@pytest.mark.parametrize(("label", "arch"), WANTED)
def test_a_kernel_is_fit_for_its_gpus(label: str, arch: int, reports: Reports) -> None:
    """Another release than the table's may use other registers, within the same limits."""
    case, report = aot_gate.cases()[label], reports[label, arch]
    assert problems(case, report) == []
    if triton.__version__ == TABLE.release:
        assert aot_gate.figures(report) == TABLE.figures(case, arch), WRITE


def test_the_table_in_the_readme_has_every_kernel() -> None:
    assert set(TABLE.rows) == set(aot_gate.cases()), WRITE


def test_the_table_in_the_readme_is_of_the_pinned_release() -> None:
    pinned = re.search(r"^triton==(\S+)", (aot_gate.ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert TABLE.release == pinned[1], f"install triton=={pinned[1]} and {WRITE}"
    assert TABLE.release in SUPPORTED


def test_a_release_without_what_the_gate_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import compiler

    monkeypatch.delattr(compiler, "get_ptxas")
    with pytest.raises(
        UnsupportedTriton,
        match=rf"^Triton {re.escape(triton.__version__)} lacks triton\.backends\.nvidia\.compiler"
        r"\.get_ptxas, which the tests of the kernels need; install triton 3\.7\.1, 3\.8\.0 or",
    ):
        aot_gate.why_not()


def test_the_counts_in_the_readme_have_every_kernel() -> None:
    counted = aot_gate.README.read_text().partition(aot_gate.BEGIN)[0]
    assert {f"`{case.kernel.__name__}`" for case in aot_gate.cases().values()} == set(
        re.findall(r"^\| (`\w+`) \|", counted, re.MULTILINE)
    )


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
FIT = Report(
    "kernel 1024",
    90,
    4,
    registers=64,
    shared=1024,
    instructions={**dict.fromkeys(aot_gate.INSTRUCTIONS, 0), "16-byte loads": 2},
)


def test_what_may_not_ship_is_said() -> None:
    assert problems(CASE, FIT) == [] and FIT.blocks_per_sm == 8 and FIT.occupancy == 0.5
    for change, said in (
        ({"spilled": 8}, "8 bytes of registers spill where 0 are stated"),
        ({"shared": 232_449}, "a block of sm_90 has 232,448"),
        ({"traps": True}, "a trap in its place"),
        ({"serialized": True}, "serialized"),
        ({"instructions": dict.fromkeys(aot_gate.INSTRUCTIONS, 0)}, "no 16-byte loads"),
        ({"registers": 65}, "occupancy 0.44 where 0.50 is stated"),
        ({"error": "does not compile: CompilationError"}, "does not compile"),
    ):
        assert said in " ".join(problems(CASE, replace(FIT, **change))), change
    assert problems(replace(CASE, max_spilled=8), replace(FIT, spilled=8)) == []
    for arch, tensor_core in aot_gate.TENSOR_CORE.items():
        product, report = replace(CASE, dot=True), replace(FIT, arch=arch)
        assert f"no {tensor_core}" in " ".join(problems(product, report))
        assert (
            problems(product, replace(report, instructions={**FIT.instructions, tensor_core: 1}))
            == []
        )


def test_a_case_that_misnames_an_argument_is_said() -> None:
    assert CASE.unnamed() == ""
    assert "takes ['BLOCK', 'n', 'x']" in replace(CASE, signature={"x": "*bf16"}).unnamed()
    assert "aligned names ['y']" in replace(CASE, aligned=("y",)).unnamed()


def test_the_table_is_read_back_from_what_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(aot_gate, "cases", lambda: {CASE.label: CASE})
    monkeypatch.setattr(aot_gate, "README", tmp_path / "README.md")
    reports = {(CASE.label, arch): replace(FIT, arch=arch) for arch in CASE.archs}
    aot_gate.README.write_text("no table")
    with pytest.raises(ValueError, match="lacks the lines"):
        aot_gate.write(reports)
    aot_gate.README.write_text(f"before\n{aot_gate.BEGIN}\nold\n{aot_gate.END}\nafter\n")
    aot_gate.write(reports)
    text = aot_gate.README.read_text()
    read = aot_gate.Table.read(text)
    assert read.release == triton.__version__
    assert read.rows.keys() == {"kernel 1024"}
    assert read.figures(CASE, 90) == aot_gate.figures(FIT) == ("64", "1.0", "8", "0.50")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text

"""The figures of all runs, and the table that shows them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from scripts.deepspeed_tests.kinds import KINDS
from scripts.deepspeed_tests.reasons import KEPT, REASONS, WORKS_HERE, about_what, on_purpose
from scripts.deepspeed_tests.runs import ROOT

FIGURES = ROOT / "tests" / "deepspeed"
RAW, TABLE = FIGURES / "deepspeed_tests.json", FIGURES / "DEEPSPEED_TESTS.md"
HEAD = """# DeepSpeed's own unit tests over the facade

Written by `scripts/deepspeed_tests`; tests of DeepSpeed {ref},
run over {peers} and over hf-zero on two CPU ranks.

A file is *public* if every name that it takes from deepspeed is in the facade's table (there or not
built), *internals* if none is, *mixed* otherwise; a test of a public file that uses private
attributes of DeepSpeed's objects counts as mixed. Only tests count that DeepSpeed itself passes
there. A test that took longer than the limit was not run. A file counts when all its tests were
tried over DeepSpeed. *On purpose*: what it asks for is otherwise here, for the reason below. *Not
built*: failed by a NotBuiltError.

| tests | of files | that DeepSpeed passes | run here | passed | failed | on purpose | not built |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def table(rows: dict[str, Any]) -> str:
    """The figures of all files that have been run."""
    peers = sorted({row["peer"]["of"] for row in rows["files"].values()} - {"nothing"})
    text = HEAD.format(ref=rows["ref"], peers=" and ".join(peers))
    lines, counted = [], {kind: Counter[str]() for kind in KINDS}
    told = {kind: Counter[str]() for kind in KINDS}
    for file, row in sorted(rows["files"].items()):
        if "facade" not in row or row["peer"]["of"] == "nothing":
            continue
        failed, not_run = row["facade"]["failed"], {*row["facade"]["not_run"]}
        counted[row["kind"]].update(files=not row["peer"].get("not_run"))
        reasons: Counter[tuple[str, str]] = Counter()
        for name in row["peer"]["passed"]:
            said = failed.get(name, "not run yet" if name in not_run else "")
            kind = row["kind"]
            if kind == "public" and name.partition("[")[0] in row["private"]:
                kind = "mixed"
            counted[kind].update(tests=1, run=name not in not_run, failed=name in failed)
            counted[kind].update(not_built=name in failed and "NotBuiltError" in said)
            if name in failed:
                why = on_purpose(f"{file}::{name}")
                counted[kind].update(on_purpose=bool(why))
                said = why or said
                told[kind].update([about_what(said)])
            reasons.update([(kind, said)] if said else [])
        tests = len(row["peer"]["passed"])
        lines += [f"| {file} | {k} | {n} of {tests} | {w} |" for (k, w), n in reasons.most_common()]
    for kind, n in counted.items():
        passed = n["run"] - n["failed"]
        share = f" ({passed / n['run']:.0%})" if n["run"] else ""
        text += (
            f"| {kind} | {int(n['files'])} of {rows['all'][kind]} | {n['tests']} | {int(n['run'])} "
        )
        text += f"| {int(passed)}{share} | {int(n['failed'])} | {int(n['on_purpose'])} "
        text += f"| {int(n['not_built'])} |\n"
    text += rest_of(counted["public"], told["public"])
    text += "\n## Why\n\n| why | public | mixed |\n| --- | --- | --- |\n"
    for reason in REASONS:
        text += f"| {reason} | {told['public'][reason]} | {told['mixed'][reason]} |\n"
    text += "\n## What fails\n\n| file | kind | tests | why |\n| --- | --- | --- | --- |\n"
    text += "\n".join(lines) + "\n"
    waiting = sorted(rows["to_run"])
    if waiting:
        text += "\n## Public files that were not run yet\n\n"
        text += "".join(f"- {file}\n" for file in waiting)
    return text


def rest_of(counted: Counter[str], told: Counter[str]) -> str:
    """Return the sentence on the public tests without those that cannot pass."""
    refusals, kept = told[WORKS_HERE], told[KEPT]
    run = counted["run"] - refusals - kept
    if run <= 0:
        return ""
    passed = counted["run"] - counted["failed"]
    return (
        f"\nOf the public tests, {refusals} assert that DeepSpeed refuses what works here, and "
        f"{kept} read what its implementation keeps. Of the other {run}, {passed} pass "
        f"({passed / run:.0%}).\n"
    )


def write(rows: dict[str, Any], kinds: dict[str, str]) -> None:
    public = {file for file, kind in kinds.items() if kind == "public"}
    rows["to_run"] = sorted(public - {*rows["files"]})
    RAW.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    TABLE.write_text(table(rows))

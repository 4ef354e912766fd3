#!/usr/bin/env python
"""Run DeepSpeed's own unit tests over the facade, on two CPU ranks.

Their source is fetched afresh into a temporary folder and is not kept: ``python
scripts/deepspeed_tests.py --ref v0.19.8 runtime/zero/test_zero_context.py ...``, or with ``--source
FOLDER`` a checkout that is there. Each file is a process of pytest. ``--peer FOLDER``, an installed
DeepSpeed and its requirements (``pip install --target FOLDER deepspeed``), runs every test over
DeepSpeed first: only what it passes counts. Results are added to
``tests/integrations/deepspeed/deepspeed_tests.json``, and DEEPSPEED_TESTS.md beside it is written
anew from all of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_zero.integrations.deepspeed.api import API  # noqa: E402

FIGURES = ROOT / "tests" / "integrations" / "deepspeed"
RAW, TABLE = FIGURES / "deepspeed_tests.json", FIGURES / "DEEPSPEED_TESTS.md"
URL = "https://github.com/deepspeedai/DeepSpeed"
REGISTER = "import hf_zero._autoload; hf_zero._autoload.register()\n"
NOT_RUN = "not run: another test of the file took longer than the limit"
CAP = 20  # limits of one test that a file may take
KINDS = ("public", "mixed", "internals")
HEAD = """# DeepSpeed's own unit tests over the facade

Written by `scripts/deepspeed_tests.py`; DeepSpeed {ref}, two CPU ranks. A file is *public* if every
name that it takes from deepspeed is in the facade's table (there or not built), *internals* if none
is, *mixed* otherwise. Of tests that were run over DeepSpeed as well only those count that it
passes. {all} files are public in all.

| files | tests | passed | failed |
| --- | --- | --- | --- |
"""


def names_used(tree: ast.AST) -> Iterator[str]:
    """Names that a test takes from deepspeed's modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("deepspeed."))


def known(name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    return name in API or (
        module in API and (leaf in API[module].names or bool(API[module].others))
    )


def kind_of(file: Path) -> str:
    found = [known(name) for name in names_used(ast.parse(file.read_text()))]
    return "public" if all(found) else "mixed" if any(found) else "internals"


def run(tests: Path, file: str, limit: int, path: list[str], facade: bool) -> dict[str, Any]:
    """What became of each test of ``file``: "passed", "skipped", or the first line of the error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        if facade:  # as the .pth of an installation does, which an editable one lacks
            (Path(folder) / "sitecustomize.py").write_text(REGISTER)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([folder, *path]),
            "LOCAL_SIZE": "2",
            "DS_ACCELERATOR": "cpu",
            "DS_DISABLE_REUSE_DIST_ENV": "1",
            "DS_UNITTEST_TIMEOUT": str(limit),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_ZERO_AUTOLOAD": "1" if facade else "0",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
        command += ["--rootdir=.", f"unit/{file}"]
        listed = subprocess.run(
            [*command, "--co"], cwd=tests, env=environment, capture_output=True, text=True
        )
        found = dict.fromkeys(collected(listed.stdout), NOT_RUN)
        command += [f"--junitxml={report}"]
        process = subprocess.Popen(
            command,
            cwd=tests,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout=limit * CAP)
        except subprocess.TimeoutExpired:
            print(f"{file} takes more than {limit * CAP} s", file=sys.stderr)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that it has left, too
        process.wait()
        if not report.is_file():
            return found or {file: NOT_RUN}
        return found | dict(results(ElementTree.parse(report)))


def collected(listing: str) -> Iterator[str]:
    """The tests of the tree that ``pytest --co`` prints, as :func:`results` names them."""
    owner = ""
    for kind, name in re.findall(r"<(Module|Class|Function) ([^>]+)>", listing):
        if kind == "Function":
            yield f"{owner}::{name}"
        else:
            owner = Path(name).stem if kind == "Module" else name


def results(report: ElementTree.ElementTree[Any]) -> Iterator[tuple[str, str]]:
    for case in report.iter("testcase"):
        if not case.get("name"):  # of a run that was broken off
            continue
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        bad = [item for tag in ("failure", "error") for item in case.findall(tag)]
        if bad:
            yield name, reason(bad[0])
        else:
            yield name, "passed" if case.find("skipped") is None else "skipped"


def reason(item: ElementTree.Element) -> str:
    """The line of a traceback that says most."""
    text = f"{item.get('message') or ''}\n{item.text or ''}"
    lines = [line.strip(" E") for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed|Timeout)\b", line)]
    said = (errors or [line for line in lines if line] or ["failed"])[-1]
    return re.sub(r" ?\(?/[^\s)]*\)?", "", said)[:200].strip()  # without paths of this machine


def table(rows: dict[str, Any]) -> str:
    """The figures of all files that have been run."""
    counted: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    lines, files = [], Counter(row["kind"] for row in rows["files"].values())
    for file, row in sorted(rows["files"].items()):
        counts = [name for name, said in row["peer"].items() if said == "passed"]
        if not row["peer"]:
            counts = [name for name, said in row["facade"].items() if said != "skipped"]
        failed = {n: row["facade"].get(n, "not collected") for n in counts}
        failed = {n: said for n, said in failed.items() if said != "passed"}
        counted[row["kind"]].update(tests=len(counts), failed=len(failed))
        for said, times in Counter(failed.values()).most_common():
            lines.append(f"| {file} | {row['kind']} | {times} of {len(counts)} | {said} |")
    text = HEAD.format(ref=rows["ref"], all=rows["all"])
    for kind, count in counted.items():
        passed = count["tests"] - count["failed"]
        text += f"| {files[kind]} {kind} | {count['tests']} | {passed} | {count['failed']} |\n"
    text += "\n## What fails\n\n| file | kind | tests | why |\n| --- | --- | --- | --- |\n"
    return text + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", help="below tests/unit, such as runtime/test_pld.py")
    parser.add_argument("--ref", default="v0.19.8", help="tag of DeepSpeed (default: %(default)s)")
    parser.add_argument("--source", type=Path, help="a checkout of DeepSpeed, instead of fetching")
    parser.add_argument("--peer", type=Path, help="a folder with an installed DeepSpeed")
    parser.add_argument("--also", type=Path, help="a folder with packages that the tests import")
    parser.add_argument("--limit", type=int, default=60, help="seconds of one test")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = given.source
        if source is None:
            source = Path(folder) / "DeepSpeed"
            clone = ["git", "clone", "-q", "--depth", "1", "--branch", given.ref, URL, str(source)]
            subprocess.run(clone, check=True)
        rows = json.loads(RAW.read_text()) if RAW.is_file() else {"files": {}}
        rows["ref"] = given.ref
        unit = source / "tests" / "unit"
        rows["all"] = sum(kind_of(file) == "public" for file in unit.rglob("test_*.py"))
        more = [str(given.also)] if given.also else []
        for file in given.files:
            row = rows["files"].setdefault(file, {"peer": {}})
            row["kind"] = kind_of(source / "tests" / "unit" / file)
            if given.peer and not row["peer"]:
                row["peer"] = run(source / "tests", file, given.limit, [str(given.peer)], False)
            path = [str(ROOT), *more]
            row["facade"] = run(source / "tests", file, given.limit, path, True)
            passed = sum(said == "passed" for said in row["facade"].values())
            print(file, row["kind"], f"{passed} of {len(row['facade'])} pass", flush=True)
            RAW.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
            TABLE.write_text(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

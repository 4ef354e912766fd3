"""Seed faults into the package, one at a time, and count those that the fast suite catches.

    python scripts/mutants check            # every fault applies once, and compiles
    python scripts/mutants record           # which tests execute which fault: one run of the suite
    python scripts/mutants run [NAME ...]   # for each fault the tests that execute it
    python scripts/mutants table [LABEL ...]   # faults caught, by folder

A fault is a table in one of the TOML files beside this one: an edit, found by the text around it,
that breaks a promise of the package. ``record`` and ``run`` keep their results in ``.mutants``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from scripts import suite  # noqa: E402

FAULTS = Path(__file__).resolve().parent
RESULTS = ROOT / ".mutants"
COPIED = ("hf_zero", "kernels", "tests", "scripts", "recipes", ".github", ".ci")
FIRST = 20  # tests of the first round, each of another file
LIMIT = 150.0  # seconds of one fault's tests; a test that takes two thirds of them fails


@dataclass(frozen=True)
class Fault:
    """A seeded fault: ``find`` occurs once in ``file`` and becomes ``replace``."""

    name: str
    file: str
    find: str
    replace: str
    breaks: str
    source: str = ""

    @property
    def folder(self) -> str:
        return self.file.split("/")[1] if self.file.startswith("hf_zero/") else "kernels"

    def problem(self) -> str:
        """Return why the fault does not apply to the tree, or an empty string."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        count = path.read_text().count(self.find)
        if count != 1:
            return f"its text occurs {count} times in {self.file}"
        try:
            compile(path.read_text().replace(self.find, self.replace), self.file, "exec")
        except SyntaxError as error:
            return f"it does not compile: {error}"
        return ""

    def lines(self) -> set[int]:
        """Return the lines that the edit changes; for an insertion those around it."""
        text = (ROOT / self.file).read_text()
        first = text[: text.index(self.find)].count("\n") + 1
        old, new = self.find.split("\n"), self.replace.split("\n")
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        last = 0
        while last < min(len(old), len(new)) - same and old[-1 - last] == new[-1 - last]:
            last += 1
        changed = range(first + same, first + len(old) - last)
        return set(changed) or {first + same - 1, first + same}


def faults() -> list[Fault]:
    return [
        Fault(**{key: value.removesuffix("\n") for key, value in row.items()})
        for path in sorted(FAULTS.glob("*.toml"))
        for row in tomllib.loads(path.read_text())["fault"]
    ]


def check() -> int:
    """Print each fault that does not apply."""
    rows = faults()
    names = Counter(row.name for row in rows)
    problems = [(row.name, row.problem()) for row in rows]
    problems += [(name, "its name is taken") for name, count in names.items() if count > 1]
    for name, problem in problems:
        if problem:
            print(f"{name}: {problem}")
    failed = sum(bool(problem) for _, problem in problems)
    print(f"{len(rows)} faults, {failed} that do not apply")
    return 1 if failed else 0


PROBE = """
import os

seen = set()


def hit(name):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (name, test) not in seen:
        seen.add((name, test))
        with open(os.path.join({folder!r}, str(os.getpid())), "a") as hits:
            hits.write(f"{{name}}\\t{{test}}\\n")
"""


def record(arguments: list[str]) -> int:
    """Run the suite over a copy of the tree with a probe before each fault's statement, which notes
    the test that executes it, also in processes that the test starts.
    """
    if check():
        return 1
    hits = RESULTS / "hits"
    shutil.rmtree(hits, ignore_errors=True)
    hits.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="hf-zero-mutant-") as folder:
        tree = copy_of_the_tree(Path(folder))
        (tree / "probe_of_mutants.py").write_text(PROBE.format(folder=str(hits)))
        for file in {row.file for row in faults() if row.folder != "kernels"}:
            path = tree / file
            rows = [row for row in faults() if row.file == file]
            path.write_text(probed(path.read_text(), rows))
        chosen = suite.pytest_arguments(suite.parse(arguments))
        command = [sys.executable, "-m", "pytest", *chosen, f"--junitxml={RESULTS}/durations.xml"]
        return subprocess.run(command, cwd=tree, env=variables(tree)).returncode


def variables(tree: Path) -> dict[str, str]:
    return {**os.environ, **suite.VARIABLES, "PYTHONPATH": str(tree)}


def probed(text: str, rows: list[Fault]) -> str:
    """Return ``text`` with a probe before the statement of each of ``rows``."""
    lines = text.split("\n")
    tree = ast.parse(text)
    for row in sorted(rows, key=lambda row: -min(row.lines())):
        place = _statement(tree, min(row.lines()), lines)
        if place is not None:
            indent = " " * place.col_offset
            probe = f'{indent}__import__("probe_of_mutants").hit("{row.name}")'
            lines.insert(place.lineno - 1, probe)
    return "\n".join(lines)


def _statement(tree: ast.Module, line: int, lines: list[str]) -> ast.stmt | None:
    """Return the innermost statement of a function that has ``line``, or the first statement of a
    function whose head has it; None outside of functions.
    """
    best, within = None, False
    body: list[ast.stmt] = tree.body
    while True:
        inner = [node for node in body if _first(node) <= line <= (node.end_lineno or 0)]
        if not inner:
            return best if within else None
        node = inner[0]
        if within and not lines[node.lineno - 1].lstrip().startswith("elif "):
            best = node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            within = True
            best = node.body[0]
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(node, "handlers", [])]
        blocks += [case.body for case in getattr(node, "cases", [])]
        body = [each for block in blocks if isinstance(block, list) for each in block]


def _first(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def durations() -> dict[str, float]:
    """Return the seconds of each test of the recorded run, which is empty if that was cut off."""
    seconds: dict[str, float] = defaultdict(float)
    if not (RESULTS / "durations.xml").exists():
        return seconds
    for case in ElementTree.parse(RESULTS / "durations.xml").iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[f"{path}::{case.attrib['name']}"] += float(case.attrib["time"])
    return seconds


def tests_by_fault(rows: Iterable[Fault]) -> dict[str, list[str]]:
    """Return the tests that execute each fault's statement, or, for one outside of functions, those
    that import its module or belong to its folder. First come tests whose names have rare words in
    common with the fault, then of each file the one that is fast and executes few others.
    """
    seconds = durations()
    hits: dict[str, set[str]] = defaultdict(set)
    for path in (RESULTS / "hits").iterdir():
        for line in path.read_text().splitlines():
            name, _, test = line.partition("\t")
            hits[name].add(test)
    executed = Counter(test for tests in hits.values() for test in tests)
    in_names = Counter(word for test in executed for word in _words(test))

    def cost(test: str) -> float:  # a test that executes few faults is one of their own
        return executed[test] * (1.0 + seconds.get(test, 0.0))

    found: dict[str, list[str]] = {}
    for row in rows:
        tests = sorted(list(hits[row.name] - {""}) or suite.tests_of([row.file]), key=cost)
        said = _words(f"{row.name} {row.file} {row.breaks}")

        def kinship(test: str, said: set[str] = said) -> float:  # of rare words in common
            return sum(1.0 / in_names[word] for word in said & _words(test))

        first = sorted(tests, key=kinship, reverse=True)[: FIRST // 2]
        found[row.name] = first + [test for test in _spread(tests) if test not in first]
    return found


def _words(text: str) -> set[str]:
    return {word for word in re.split(r"[^a-z0-9]+", text.lower()) if len(word) > 2}


def _spread(tests: list[str]) -> Iterator[str]:
    """Yield the first test of each file, then the second, and so on."""
    files: dict[str, list[str]] = defaultdict(list)
    for name in tests:
        files[name.partition("::")[0]].append(name)
    while files:
        for file in list(files):
            yield files[file].pop(0)
            if not files[file]:
                del files[file]


def copy_of_the_tree(folder: Path) -> Path:
    tree = folder / "tree"
    tree.mkdir()
    for name in (*COPIED, *(path.name for path in ROOT.iterdir() if path.is_file())):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True)  # bytecode, too: times are kept
        elif source.is_file():
            shutil.copy(source, tree / name)
    return tree


def outcome(fault: Fault, tests: list[str], limit: float) -> dict[str, object]:
    """Return which of ``tests`` fails first with the fault, in a copy of the tree."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hf-zero-mutant-") as folder:
        tree = copy_of_the_tree(Path(folder))
        path = tree / fault.file
        path.write_text(path.read_text().replace(fault.find, fault.replace))
        for chosen in (tests[:FIRST], tests[FIRST:]):
            left = limit - (time.monotonic() - begun)
            if chosen and left > 0:
                failed = _first_failure(tree, chosen, left, round(limit * 2 / 3))
                if failed:
                    return {"caught": failed, "seconds": round(time.monotonic() - begun)}
    spent = round(time.monotonic() - begun)
    return {"caught": "", "seconds": spent, "tests": len(tests), "whole": spent < limit}


def _first_failure(tree: Path, tests: list[str], limit: float, hangs: int) -> str:
    listed = tree / "selected.txt"
    listed.write_text("\n".join(tests) + "\n")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-o", f"faulthandler_timeout={hangs}"]  # and the process ends: pyproject.toml
    process = subprocess.Popen(
        [*command, f"@{listed}"],
        cwd=tree,
        env=variables(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return ""  # tests that take long are no failure
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if process.returncode == 0:
        return ""
    failed = [
        line.split()[1] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return failed[0] if failed else f"pytest ended with {process.returncode}"


def run(names: list[str], jobs: int, label: str, limit: float) -> int:
    """Print and keep what becomes of each fault. The test that has caught it before runs first."""
    rows = [row for row in faults() if not names or row.name in names]
    unknown = set(names) - {row.name for row in rows}
    if unknown:
        print(f"no such fault: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if not (RESULTS / "hits").is_dir():
        print("no recorded run: python scripts/mutants record", file=sys.stderr)
        return 2
    results = RESULTS / f"{label}.json"
    known = json.loads(results.read_text()) if results.exists() else {}
    tests = tests_by_fault(rows)
    for kept in RESULTS.glob("*.json"):
        for name, result in json.loads(kept.read_text()).items():
            if result["caught"] in tests.get(name, ()):
                tests[name].remove(result["caught"])
                tests[name].insert(0, result["caught"])
    waiting = [row for row in rows if names or row.name not in known]
    with ThreadPoolExecutor(jobs) as pool:
        for row, result in zip(
            waiting, pool.map(lambda row: outcome(row, tests[row.name], limit), waiting)
        ):
            known[row.name] = result
            results.write_text(json.dumps(known, indent=1) + "\n")
            print(
                f"{row.name}: {result['caught'] or 'NOT CAUGHT'} ({result['seconds']} s)",
                flush=True,
            )
    return 0


def table(labels: list[str]) -> int:
    """Print the faults caught in each folder, as rows of a Markdown table."""
    kept = [json.loads((RESULTS / f"{label}.json").read_text()) for label in labels]
    folders: dict[str, list[Fault]] = defaultdict(list)
    for row in faults():
        folders[row.folder].append(row)
    print("| folder | faults |" + "".join(f" {label} |" for label in labels))
    print("| --- |" + " --- |" * (1 + len(labels)))
    for folder, rows in [*sorted(folders.items()), ("**all**", faults())]:
        caught = [sum(bool(each.get(row.name, {}).get("caught")) for row in rows) for each in kept]
        print(f"| {folder} | {len(rows)} |" + "".join(f" {count} |" for count in caught))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    commands.add_parser("record").add_argument("arguments", nargs=argparse.REMAINDER)
    runs = commands.add_parser("run")
    runs.add_argument("names", nargs="*")
    runs.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    runs.add_argument("--label", default="fast", help="name of the results")
    runs.add_argument("--limit", type=float, default=LIMIT, help="seconds of one fault's tests")
    commands.add_parser("table").add_argument("labels", nargs="*", default=["fast"])
    given = parser.parse_args()
    if given.command == "check":
        return check()
    if given.command == "record":
        return record(given.arguments)
    if given.command == "run":
        return run(given.names, given.jobs, given.label, given.limit)
    return table(given.labels)


if __name__ == "__main__":
    sys.exit(main())

"""Run hf-zero on releases of torch, Transformers, Accelerate, TRL, PEFT, Datasets and Lightning.

    scripts/releases                    # pinned, newest, oldest, and those that releases.toml names
    scripts/releases --only torch=newest --only transformers=5.18.1 --only all=newest
    scripts/releases --only frameworks=LLaMA-Factory --only frameworks=all --resolve

An environment is the installed one, which has the pinned releases, with one library at another
release: a folder of the cache holds what differs, and needs no network. ``all=newest`` takes these
folders together. So does ``frameworks=NAME``: pip resolves hf-zero and the requirements of the
framework in an empty environment, without an installation, and the tests run with the releases that
it chooses, but for torch. ``--resolve`` runs no tests. A run replaces the row of its environment in
``bench/results/releases.jsonl`` and writes the tables of ``hf_zero/docs/compatibility.md``. Exit
code 1 if a test fails, or if the tests do not end by themselves.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from marks import filled, markdown_table
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from suite import VARIABLES, guarded

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "scripts" / "bench" / "results" / "releases.jsonl"
PAGE = ROOT / "hf_zero" / "docs" / "compatibility.md"
LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets", "lightning")
ENDED = (0, 1)  # exit codes of pytest after all tests: they passed, or some failed
# Installed packages that change with a library.
COMPANIONS = {"torch": "torchvision", "lightning": "pytorch-lightning=={release}"}
LIMIT = 1500  # seconds, which end a hang: the tests take four minutes on two quiet cores
CACHE = Path.home() / ".cache/hf-zero/releases"
TABLES = tomllib.loads((ROOT / "scripts" / "releases.toml").read_text())
SELECTION, BETWEEN, FRAMEWORKS = TABLES["columns"], TABLES["between"], TABLES["frameworks"]
ALL = ["torch=pinned", *(f"{library}=newest" for library in (*LIBRARIES, "all"))]
ALL += [f"{library}=oldest" for library in (*LIBRARIES, "all")]
ALL += [f"{library}={release}" for library, names in BETWEEN.items() for release in names]
ALL += ["frameworks=all"]
VERSIONS = "import json, sys, versions as v; print(json.dumps(v.versions(*sys.argv[1:])))"
DOCTOR = "import sys; from hf_zero.cli import main; sys.argv[0] = 'hf-zero'; main()"
Row = dict[str, Any]


def number(release: str) -> tuple[int, ...]:
    """Return the numbers of ``release``, without those of a pre-release or a build."""
    return tuple(map(int, re.findall(r"\d+", re.split("[a-z+]", release)[0])))


def output(*command: str, python: str = sys.executable, **environment: str) -> str:
    """Return what ``python`` prints with the arguments ``command``."""
    env = {**os.environ, **environment}
    done = subprocess.run([python, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode and not done.stdout:
        raise RuntimeError(done.stderr[-2000:] or f"exit code {done.returncode}")
    return done.stdout


def pip(*arguments: str, python: str = sys.executable, configured: bool = False) -> str:
    """Run pip, as this machine is ``configured`` or with no settings of it but the certificates."""
    own = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if not configured:
        own |= {name: "" for name in os.environ if name[:4] == "PIP_" and name != "PIP_CERT"}
        own |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return output("-I", "-m", "pip", *arguments, python=python, **own)


def installed(*names: str, path: str = "") -> dict[str, str]:
    found = output("-c", VERSIONS, *names, PYTHONPATH=f"{ROOT / 'scripts' / 'bench'}:{path}")
    return {name: version.partition("+")[0] for name, version in json.loads(found).items()}


def published(library: str, cache: Path, more: list[str]) -> list[str]:
    """Return the releases of ``library`` that the index has, or had when it was last reached, from
    the newest to the lower bound of pyproject.toml. Exit with one line if neither is known.
    """
    record = cache / f"{library}{'-pre' * ('--pre' in more)}.txt"
    try:
        shown = pip("index", "versions", library, "--retries", "1", "--timeout", "20", *more)
        record.write_text(shown.partition("versions: ")[2].partition("\n")[0])
    except RuntimeError as error:
        if not record.exists():
            raise SystemExit(
                f"releases: no index has named the releases of {library} yet "
                f"({str(error).strip().splitlines()[-1]}); run once with a network"
            ) from None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    bound = next(line.partition(">=")[2] for line in lines if line.startswith(f"{library}>="))
    known = dict.fromkeys(each.partition("+")[0] for each in record.read_text().split(", "))
    return [each for each in known if number(each) >= number(bound)]


def environments(only: list[str], cache: Path, more: list[str]) -> dict[str, dict[str, str]]:
    """Return for each environment, by name, the releases that differ from the installed ones."""
    here, found = installed(*LIBRARIES), dict[str, dict[str, str]]()

    def releases(library: str, word: str) -> list[str]:
        if word not in ("newest", "oldest", "minors"):
            return [here[library] if word == "pinned" else word]
        known = published(library, cache, more)
        minors = {number(each)[:2]: each for each in reversed(known)}
        return {"newest": known[:1], "oldest": known[-1:], "minors": [*minors.values()]}[word]

    for each in only:
        library, _, word = each.partition("=")
        if library == "frameworks" and word in ("all", *FRAMEWORKS):
            found |= {name: {} for name in FRAMEWORKS if word in ("all", name)}
            continue
        if library not in (*LIBRARIES, "all") or not word:
            names = f"{', '.join(LIBRARIES)} or all; newest, oldest, pinned, minors or a version"
            names += f"; or frameworks; all, {', '.join(FRAMEWORKS)}"
            raise SystemExit(f"releases: --only {each} is not NAME=RELEASE: {names}")
        whole = [{each: releases(each, word)[0] for each in LIBRARIES}] if library == "all" else []
        for part in whole or [{library: release} for release in releases(library, word)]:
            differing = {name: release for name, release in part.items() if release != here[name]}
            name = " ".join(*differing.items()) if len(differing) == 1 else f"all {word}"
            found[name if differing else "pinned"] = differing
    return found


def empty_environment(folder: Path) -> str:
    """Return the Python of an environment in ``folder`` with pip alone, made on first use."""
    python = str(folder / "bin" / "python")
    if not folder.exists():
        venv.create(folder, with_pip=True)
        pip("install", "--quiet", "--upgrade", "pip", python=python)
    return python


def resolve(framework: str, cache: Path, more: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the releases of the libraries that pip chooses for hf-zero and ``framework`` in an
    empty environment, and the specifiers by which ``framework`` requires them. Raises RuntimeError
    if pip finds no releases.
    """
    python = empty_environment(cache / "empty")
    asked = [str(ROOT), *FRAMEWORKS[framework]]
    report = pip("install", "--quiet", "--dry-run", "--report", "-", *more, *asked, python=python)
    installs = json.loads(report)["install"]
    chosen = {each["metadata"]["name"].lower(): each["metadata"] for each in installs}
    lines = [
        line
        for each in installs
        if each["requested"] and each["metadata"]["name"].lower() != "hf-zero"
        for line in each["metadata"].get("requires_dist", ())
    ]
    requires = dict[str, SpecifierSet]()
    for each in map(Requirement, [*FRAMEWORKS[framework], *lines]):
        if each.name in LIBRARIES and (each.marker is None or each.marker.evaluate({"extra": ""})):
            requires[each.name] = requires.get(each.name, SpecifierSet()) & each.specifier
    found = {name: chosen[name]["version"] for name in LIBRARIES if name in chosen}
    return (
        {name: version.partition("+")[0] for name, version in found.items()},
        {name: str(specifiers) for name, specifiers in requires.items()},
    )


def overlays_below(folder: Path) -> Path:
    """Return the folder below ``folder`` for overlays of this Python and these constraints."""
    digest = hashlib.sha256((ROOT / "constraints.txt").read_bytes()).hexdigest()[:8]
    cache = folder / f"python3.{sys.version_info[1]}-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def overlay(library: str, release: str, cache: Path, more: list[str]) -> Path:
    """Return the folder of what differs from the installed environment, made on first use."""
    folder = cache / f"{library}-{release}"
    if not folder.exists():
        beside = COMPANIONS.get(library, "").format(release=release)
        present = beside and beside.partition("==")[0] in installed(beside.partition("==")[0])
        asked = [f"{library}=={release}", *([beside] if present else [])]
        report = pip("install", "--quiet", "--dry-run", "--report", "-", *more, *asked)
        metadata = [item["metadata"] for item in json.loads(report)["install"]]
        exact = [f"{each['name']}=={each['version']}" for each in metadata]
        partial = cache / f"{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        pip("install", "--quiet", "--no-deps", "--no-compile", f"--target={partial}", *more, *exact)
        partial.rename(folder)
    return folder


def run(name: str, folders: list[Path], quick: bool) -> Row:
    """Return the row of a run of the doctor and the tests with ``folders`` on the path."""
    path = os.pathsep.join(map(str, [ROOT, *folders]))
    row: Row = {
        "environment": name,
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.getoutput(f"git -C '{ROOT}' describe --always"),
        "versions": installed(*LIBRARIES, "triton", path=path),
    }
    with guarded() as environment:
        environment |= {**VARIABLES, "PYTHONPATH": path}
        try:
            findings = json.loads(
                output("-c", DOCTOR, "doctor", "--probe", "--json", **environment)
            )
            row["broken"] = [
                finding["name"] for finding in findings if finding["status"] == "broken"
            ]
        except (RuntimeError, ValueError) as error:
            row.setdefault("broken", [str(error).splitlines()[-1]])
        results = Path(environment["TMPDIR"], "results.xml")
        # after SIGINT pytest writes the results so far
        command = ["timeout", "--signal=INT", "--kill-after=60", str(LIMIT), sys.executable]
        command += ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
        command += ["--max-worker-restart", "0", "-m", "not long", f"--junitxml={results}"]
        for paths in SELECTION.values():
            command += [f"tests/{each}" for each in (paths[:1] if quick else paths)]
        begun = time.monotonic()
        tests = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True)
        row |= {"exit_code": tests.returncode, "seconds": round(time.monotonic() - begun)}
        row["columns"] = columns(results.read_text() if results.exists() else "<none/>")
    return row


def columns(results: str) -> dict[str, Row]:
    """Return for each column the number of tests that passed and the names of those that failed."""
    found: dict[str, Row] = {}
    for case in ElementTree.fromstring(results).iter("testcase"):
        names = [case.get(key) for key in ("classname", "name") if case.get(key)]
        for column, paths in SELECTION.items():
            modules = (path.removesuffix(".py").replace("/", ".") for path in paths)
            if f"{names[0]}.".startswith(tuple(f"tests.{module}." for module in modules)):
                cell = found.setdefault(column, {"passed": 0, "failed": []})
                if case.find("failure") is not None or case.find("error") is not None:
                    cell["failed"].append("::".join(names))
                elif case.find("skipped") is None:
                    cell["passed"] += 1
    return found


def table(rows: list[Row]) -> str:
    """Return the table of ``rows``, and the failures below it."""
    head = ["Release", "Doctor", *SELECTION, "Run on"]
    lines, failures = [], []
    for row in sorted((row for row in rows if "columns" in row), key=position):
        cells = [row["environment"], "broken" if row["broken"] else "passed"]
        names = list(row["broken"])
        whole = "passed" if row["exit_code"] in ENDED else "not finished"
        for column in SELECTION:
            cell = row["columns"].get(column, {"passed": 0, "failed": []})
            failed, passed = len(cell["failed"]), cell["passed"]
            names += cell["failed"][:2]
            wrong = f"{failed} of {failed + passed} failed"
            cells.append(wrong if failed else whole if passed else "not run")
        lines.append([*cells, row["date"]])
        if names:
            failures.append([row["environment"], ", ".join(f"`{name}`" for name in names)])
    second = ["", *markdown_table(["Release", "Failed"], failures)] if failures else []
    return "\n".join(["", *markdown_table(head, lines), *second, *beside(rows), ""])


def beside(rows: list[Row]) -> list[str]:
    """Return the lines of the table of what pip has chosen beside each framework."""
    head = ["Beside hf-zero", *LIBRARIES, "Resolved on"]
    lines = []
    for row in sorted(rows, key=position):
        if "resolved" in row:
            asked = f"{row['environment']}: {', '.join(f'`{each}`' for each in row['asked'])}"
            versions = [row["resolved"].get(library, "not asked for") for library in LIBRARIES]
            lines.append([asked, *versions, row["resolved_on"]])
    return ["", *markdown_table(head, lines)] if lines else []


def position(row: Row) -> tuple[Any, ...]:
    """Return the place of ``row`` in the table: pinned, then by library and release, then all."""
    library, _, release = row["environment"].partition(" ")
    return ("pinned", *LIBRARIES, "all", *FRAMEWORKS).index(library), number(release)


def write(rows: dict[str, Row]) -> None:
    """Write ``rows``, and the tables of them into the page."""
    ROWS.write_text("".join(f"{json.dumps(rows[each])}\n" for each in sorted(rows)))
    PAGE.write_text(filled(PAGE.read_text(), "releases", table(list(rows.values()))))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME=RELEASE", help="may be repeated")
    parser.add_argument("--resolve", action="store_true", help="of frameworks: run no tests")
    parser.add_argument("--quick", action="store_true", help="run fewer tests, write no row")
    parser.add_argument("--pre", action="store_true", help="newest may be a pre-release")
    parser.add_argument("--index", metavar="URL", help="another package index")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--table", action="store_true", help="write the table, run nothing")
    options = parser.parse_args()
    rows = {row["environment"]: row for row in map(json.loads, ROWS.read_text().splitlines())}
    more = ["--pre"] * options.pre + ["--extra-index-url", options.index] * bool(options.index)
    cache = overlays_below(options.cache)
    chosen = {} if options.table else environments(options.only or ALL, cache, more)
    failures = 0
    for place, (name, releases) in enumerate(chosen.items(), 1):
        print(f"[{place}/{len(chosen)}] {name}: ", end="", flush=True)
        before = rows.get(name, {"environment": name})
        try:
            if name in FRAMEWORKS:
                releases, requires = resolve(name, cache, more)
                today = datetime.date.today().isoformat()
                before |= {"resolved": releases, "requires": requires}
                before |= {"asked": FRAMEWORKS[name], "resolved_on": today}
                here = installed(*LIBRARIES)
                releases = {
                    each: release
                    for each, release in releases.items()
                    if each != "torch" and release != here[each]
                }
            wanted = {} if name in FRAMEWORKS and options.resolve else releases
            folders = [overlay(each, release, cache, more) for each, release in wanted.items()]
        except RuntimeError as error:
            print(f"not installed: {str(error).strip().splitlines()[-1]}")
            failures += 1
            continue
        if name in FRAMEWORKS and options.resolve:
            print(", ".join(f"{each} {release}" for each, release in before["resolved"].items()))
            rows[name] = before
            write(rows)
            continue
        row = before | run(name, folders, options.quick)
        rows |= {} if options.quick else {name: row}
        write(rows)
        wrong = len(row["broken"]) + sum(len(cell["failed"]) for cell in row["columns"].values())
        passed = sum(cell["passed"] for cell in row["columns"].values())
        ended = row["exit_code"] in ENDED
        end = "" if ended else f", not finished: exit code {row['exit_code']}"
        print(f"{passed} passed, {wrong} failed, {row['seconds']} s{end}", flush=True)
        failures += wrong or not passed or not ended
    if options.table:
        write(rows)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

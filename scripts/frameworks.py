"""Run frameworks for training with hf-zero, each in an environment of its own, beside DDP.

    scripts/frameworks                          # all that frameworks.toml lists
    scripts/frameworks --only LLaMA-Factory --environments FOLDER --keep
    scripts/frameworks --part 1/4               # a quarter of the frameworks

pip installs a framework together with a wheel of this checkout, and the CPU build of torch where
an index or PIP_FIND_LINKS has it. A run is the command that the framework documents, on two CPU
ranks, with tiny random models: once under DDP, once with the DeepSpeed configuration that the
framework publishes, and once from the checkpoint in the middle of the latter. What counts are the
losses, the weights that ``from_pretrained`` reads from the final folders, and that the checkpoint
is one of hf-zero. A run replaces its row in ``bench/results/frameworks.jsonl`` and the tables in
``hf_zero/docs``. Exit code 1 if one differs, fails or cannot be installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from environment import CPU_INDEX, IMPATIENT, Refused, pinned
from marks import filled, markdown_table
from releases import FRAMEWORKS, ROOT, empty_environment, output, pip
from suite import VARIABLES, guarded, part_of

from hf_zero.launch.hosts import free_port

HERE = ROOT / "scripts" / "framework_runs"
ROWS = ROOT / "scripts" / "bench" / "results" / "frameworks.jsonl"
PAGE = ROOT / "hf_zero" / "docs" / "frameworks.md"
TABLE = tomllib.loads((ROOT / "scripts" / "frameworks.toml").read_text())
LIBRARIES = ("torch", "transformers", "accelerate", "trl", "peft", "datasets")
MODES = ("ddp", "zero", "resumed")
LIMIT = 900  # seconds of one command
# Loss: relative; weight: absolute, with learning rates of 1e-3. Frameworks log losses rounded.
TOLERANCES = {"losses": 1e-4, "weights": 1e-4, "resumed": 1e-4}
Row = dict[str, Any]


class Failure(Exception):
    """A step of a run that failed, in one line."""


@dataclass(frozen=True)
class Run:
    """A command of a framework, with templates of files and of words that depend on the mode.

    ``$model``, ``$data``, ``$out``, ``$checkpoint``, ``$port`` and ``$scripts`` stand for paths and
    a free port, ``$stage`` for one of a row's ``stages``; other names for what ``ddp`` and ``zero``
    say, and ``$resume`` for ``resume`` in the mode ``resumed``.
    """

    framework: str
    name: str
    command: str
    reads: str
    ddp: dict[str, str]
    zero: dict[str, str]
    resume: str
    configuration: str
    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    final: str = "."
    checkpoint: str = "checkpoint-3"

    def filled(self, mode: str, paths: dict[str, str]) -> dict[str, Any]:
        """Return command, files and environment of ``mode``, with ``paths`` in their templates."""
        words = dict(self.ddp if mode == "ddp" else self.zero)
        words["resume"] = self.resume if mode == "resumed" else ""
        words = {name: Template(text).substitute(paths) for name, text in words.items()} | paths

        def fill(templates: dict[str, str]) -> dict[str, str]:
            return {name: Template(text).substitute(words) for name, text in templates.items()}

        whole = fill({"command": self.command})
        return whole | {"files": fill(self.files), "environment": fill(self.environment)}


def runs(framework: str) -> Iterator[Run]:
    """Yield the runs of ``framework``: of a row with ``stages`` one for each, its ``$stage``."""
    for row in TABLE[framework].get("runs", []):
        values = {key: value for key, value in row.items() if key != "stages"}
        for stage in row.get("stages", [""]):
            for mode in ("ddp", "zero"):
                values[mode] = row[mode] | {"stage": str(stage)}
            configuration = Template(row["configuration"]).substitute(stage=stage)
            yield Run(framework=framework, **values | {"configuration": configuration})


def make_environment(framework: str, folder: Path, wheel: Path) -> str:
    """Return the Python of the environment of ``framework`` in ``folder``, made on first use.

    Raises RuntimeError, in pip's words, if the framework does not fit beside hf-zero.
    """
    table = TABLE[framework]
    asked = [*FRAMEWORKS.get(framework, []), *table.get("requires", [])]
    stamp = folder / "requirements.json"
    if stamp.exists() and json.loads(stamp.read_text()) == asked:
        python = str(folder / "bin" / "python")
        pip(
            "install",
            "-q",
            "--force-reinstall",
            "--no-deps",
            str(wheel),
            python=python,
            configured=True,
        )
        return python
    shutil.rmtree(folder, ignore_errors=True)
    python = empty_environment(folder)
    torch = [f"torch=={pinned('torch')}+cpu"]
    torch += [f"torchvision=={pinned('torchvision')}+cpu"] * table.get("torchvision", False)
    held = folder / "torch.txt"  # keeps pip from taking the ordinary build in its place
    try:
        index = ["--extra-index-url", CPU_INDEX, *IMPATIENT]
        pip("install", "-q", *index, *torch, python=python, configured=True)
        held.write_text("\n".join(torch))
    except RuntimeError:
        held.write_text("")
    asked_all = [str(wheel), *asked]
    pip("install", "-q", "-c", str(held), *asked_all, python=python, configured=True)
    stamp.write_text(json.dumps(asked))
    return python


def wheel_in(folder: Path) -> Path:
    """Return a wheel of this checkout in ``folder``, made unless one is newer than its files."""
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py"]
    sources += [
        *ROOT.glob("hf_zero/**/*.py"),
        *ROOT.glob("hf_zero/**/*.toml"),
        *ROOT.glob("kernels/**/*"),
    ]
    changed = max(path.stat().st_mtime for path in sources)
    for made in folder.glob("*.whl"):
        if made.stat().st_mtime > changed:
            return made
        made.unlink()
    pip("wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT), configured=True)
    return next(folder.glob("*.whl"))


def losses(out: Path) -> dict[int, float]:
    """Return the losses by step that a run has written: those of the Trainer's newest state, or of
    ``losses.json``.
    """
    states = [json.loads(path.read_text()) for path in out.rglob("trainer_state.json")]
    if states:
        history = max(states, key=lambda state: state["global_step"])["log_history"]
        return {row["step"]: row["loss"] for row in history if "loss" in row}
    written = out / "losses.json"
    if not written.exists():
        raise Failure("no losses were written")
    return {int(step): loss for step, loss in json.loads(written.read_text()).items()}


def manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint of hf-zero in the folder ``checkpoint``."""
    for path in checkpoint.rglob("manifest.json"):
        found: dict[str, Any] = json.loads(path.read_text())
        if found.get("format") == "hf-zero/checkpoint":
            return found
    raise Failure(f"{checkpoint.name} is no checkpoint of hf-zero")


def train(run: Run, mode: str, python: str, folder: Path, variables: dict[str, str]) -> Path:
    """Run the command in ``mode``; return the folder that it has written."""
    home = folder / mode
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    paths = {"model": folder.parent, "data": folder.parent / "data", "out": home / "out"}
    paths |= {"checkpoint": folder / "zero" / "out" / run.checkpoint, "scripts": HERE}
    paths["site"] = next(Path(python).parent.parent.glob("lib/python3*/site-packages"))
    words = {name: str(path) for name, path in paths.items()} | {"port": str(free_port())}
    parts = run.filled(mode, words)
    for name, text in parts["files"].items():
        (home / name).write_text(text)
    environment = {**variables, **parts["environment"]}
    if mode == "ddp":  # without it ranks of Accelerate train alone where there is no GPU
        environment["ACCELERATE_USE_CPU"] = "true"
    command = ["timeout", "--signal=INT", "--kill-after=60", str(LIMIT)]
    command += shlex.split(parts["command"])
    with (home / "log.txt").open("w") as log:
        done = subprocess.run(
            command, cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
        )
    if done.returncode:
        lines = (home / "log.txt").read_text(errors="replace").splitlines()
        said = [line for line in lines if re.search(r"Error\b|Refused|Exception", line)] or lines
        raise Failure(f"{mode}: exit code {done.returncode}: {(said or ['no output'])[-1][:300]}")
    return home / "out"


def measure(run: Run, python: str, folder: Path, variables: dict[str, str]) -> Row:
    """Return what the three modes of ``run`` have written, compared.

    Raises Failure.
    """
    written = {mode: train(run, mode, python, folder, variables) for mode in MODES}
    found = {mode: losses(out) for mode, out in written.items()}
    ddp = found["ddp"]
    if not ddp or any(set(each) != set(ddp) for each in found.values()):
        raise Failure(f"losses of other steps: {found}")

    def worst(mode: str) -> float:
        return max(abs(found[mode][step] / ddp[step] - 1) for step in ddp)

    states = [*(written["ddp"] / run.checkpoint).glob("rng_state*.pth")]  # of the Trainer, by rank
    if states and len(states) != 2:
        raise Failure(f"ddp: {len(states)} ranks, not 2")
    saved = manifest(written["zero"] / run.checkpoint)
    if saved["world"]["size"] != 2:
        raise Failure(f"{saved['world']['size']} ranks, not 2")
    folders = [str(out / run.final) for out in written.values()]
    command = [str(HERE / "compare.py"), run.reads, *folders]
    weights = json.loads(output(*command, python=python, **variables).splitlines()[-1])
    differences = {"losses": worst("zero"), "weights": weights[0]}
    differences["resumed"] = max(weights[1], worst("resumed"))
    rows = {mode: list(values.values()) for mode, values in found.items()}
    return {"stage": saved["stage"], "losses": rows, "differences": differences}


def versions(python: str, framework: str) -> dict[str, str]:
    """Return the versions of the framework, hf-zero and the libraries in an environment."""
    names = dict.fromkeys((TABLE[framework]["distribution"], "hf-zero", *LIBRARIES))
    shown = json.loads(pip("list", "--format", "json", python=python))
    have = {row["name"].lower().replace("_", "-"): row["version"] for row in shown}
    return {name: have[name.lower()] for name in names if name.lower() in have}


def run_framework(framework: str, folder: Path, wheel: Path, only: str) -> Iterator[Row]:
    """Yield the rows of ``framework``, whose environment is ``folder``."""
    row: Row = {"framework": framework, "date": datetime.date.today().isoformat()}
    row["commit"] = subprocess.getoutput(f"git -C '{ROOT}' describe --always")
    if reason := TABLE[framework].get("not_run"):
        yield row | {"run": "", "status": "not run", "reason": reason}
        return
    try:
        python = make_environment(framework, folder, wheel)
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        why = next((line for line in lines if "conflict" in line.lower()), lines[-1])
        yield row | {"run": "", "status": "not installed", "reason": why}
        return
    with guarded() as environment, tempfile.TemporaryDirectory() as work:
        home = Path(work, "tiny")
        bin_first = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {**environment, **VARIABLES, "PATH": bin_first, "PYTHONPATH": ""}
        variables |= {"HF_HOME": str(home / "cache"), "MASTER_ADDR": "127.0.0.1"}
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        output(str(HERE / "tiny.py"), str(home), python=python, **variables)
        for place, run in enumerate(run for run in runs(framework) if only in run.name):
            begun, part = time.monotonic(), home / f"run{place}"
            about = {"run": run.name, "configuration": run.configuration, "reads": run.reads}
            found = row | about | {"versions": versions(python, framework)}
            try:
                found |= measure(run, python, part, variables)
                wrong = {
                    name: value
                    for name, value in found["differences"].items()
                    if not value <= TOLERANCES[name]
                }
                found["status"] = "differs" if wrong else "passed"
            except (Failure, RuntimeError) as error:
                found |= {"status": "failed", "reason": str(error).strip().splitlines()[-1]}
                logs = folder.parent / f"{framework}-{place}"
                shutil.rmtree(logs, ignore_errors=True)
                shutil.copytree(part, logs, ignore=lambda *_: ["out"])
                print(f"  logs: {logs}", flush=True)
            found["seconds"] = round(time.monotonic() - begun)
            yield found


def told(row: Row) -> str:
    """Return the outcome of ``row`` in a few words."""
    if "differences" not in row:
        return f"{row['status']}: {row['reason']}"
    return ", ".join(f"{name} {within(value)}" for name, value in row["differences"].items())


def within(value: float) -> str:
    return f"{value:.0e}" if value else "equal"


def with_heads(heads: str, lines: list[list[str]]) -> str:
    """Return a table of ``lines`` whose columns are ``heads``, between empty lines."""
    return "\n".join(["", *markdown_table(heads.split(", "), lines), ""])


def measured(rows: list[Row]) -> list[str]:
    """Return the cells of the largest differences of ``rows``, or of the first row without them."""
    for row in rows:
        if "differences" not in row:
            return [told(row), "", ""]
    return [within(max(row["differences"][name] for row in rows)) for name in TOLERANCES]


def library_versions(row: Row) -> str:
    names = {"transformers": "Transformers", "torch": "torch"}
    have = row["versions"]
    return ", ".join(f"{word} {have[name]}" for name, word in names.items() if name in have)


def table(rows: list[Row]) -> str:
    """Return the table of the runs ``rows``, for the page of their framework."""
    lines = [
        [row["run"], row["configuration"], library_versions(row), *measured([row]), row["date"]]
        for row in rows
        if row["run"]
    ]
    return with_heads("Run, Configuration, With, Losses, Weights, Resumed, Run on", lines)


def summary(rows: list[Row]) -> str:
    """Return the table of the frameworks of ``rows``, in the order of frameworks.toml."""
    lines = []
    for framework, values in TABLE.items():
        own = [row for row in rows if row["framework"] == framework]
        if not own:
            continue
        shown = f"[{framework}]({values['page']}.md)" if "page" in values else framework
        if not own[0]["run"]:
            lines.append([shown, told(own[0]), "", "", "", "", own[0]["date"]])
            continue
        shown += f" {own[0]['versions'].get(values['distribution'], '')}".rstrip()
        names = "; ".join(dict.fromkeys(row["run"] for row in own))
        cells = [library_versions(own[0]), *measured(own), own[-1]["date"]]
        lines.append([shown, names, *cells])
    return with_heads("Framework, Runs, With, Losses, Weights, Resumed, Run on", lines)


def parts(rows: list[Row]) -> dict[Path, str]:
    """Return the tables of ``rows`` by page: of all, and of each framework that has one."""
    found = {PAGE: summary(rows)}
    for name, values in TABLE.items():
        if "page" in values:
            own = [row for row in rows if row["framework"] == name]
            found[PAGE.with_stem(values["page"])] = table(own)
    return found


def identity(row: Row) -> tuple[str, str]:
    """Return what tells the run of ``row`` from others of its framework; empty without a run."""
    return row["run"], row.get("configuration", "")


def replaces(row: Row, other: Row) -> bool:
    """Return whether ``row`` takes the place of ``other``; one without a run does so for all."""
    runs_of = identity(row), identity(other)
    return row["framework"] == other["framework"] and (("", "") in runs_of or len({*runs_of}) == 1)


def known_rows() -> list[Row]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def write(rows: list[Row]) -> None:
    """Write ``rows`` and the table of them, in the order of frameworks.toml and of its runs."""
    order = [
        (name, run)
        for name in TABLE
        for run in (("", ""), *((run.name, run.configuration) for run in runs(name)))
    ]
    known = {(row["framework"], identity(row)): row for row in rows}
    kept = [known[key] for key in order if key in known]
    ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    for page, shown in parts(kept).items():
        page.write_text(filled(page.read_text(), "frameworks", shown))


def chosen(only: list[str], part: str) -> list[str]:
    """Return the frameworks that ``--only`` and ``--part`` name. Exit with one line if none."""
    if unknown := set(only) - set(TABLE):
        raise SystemExit(f"frameworks: no {', '.join(unknown)}; --only takes {', '.join(TABLE)}")
    if (found := part_of(part)) is None:
        raise SystemExit(f"frameworks: --part takes K/N with K from 1 to N, not {part!r}")
    names = [name for name in TABLE if not only or name in only]
    number, parts_in_all = found
    return names[number - 1 :: parts_in_all]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="repeatable")
    parser.add_argument("--run", default="", metavar="WORDS", help="runs whose name has these")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="one of N parts")
    parser.add_argument("--environments", type=Path, metavar="FOLDER", help="by default temporary")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--table", action="store_true", help="write the table, run nothing")
    options = parser.parse_args()
    failures = 0
    names = [] if options.table else chosen(options.only, options.part)
    folder = (
        options.environments or Path(tempfile.mkdtemp(prefix="hf-zero-frameworks-"))
    ).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place, name in enumerate(names, 1):
            print(f"[{place}/{len(names)}] {name}", flush=True)
            wheel = wheel_in(folder / "wheels")
            for row in run_framework(name, folder / name, wheel, options.run):
                about = ", ".join(filter(None, identity(row)))
                print(f"  {about}: {told(row)}".replace(" : ", " "), flush=True)
                write([*(each for each in known_rows() if not replaces(row, each)), row])
                failures += row["status"] not in ("passed", "not run")
            if not options.keep:
                shutil.rmtree(folder / name, ignore_errors=True)
        if options.table:
            write(known_rows())
    except Refused as error:
        raise SystemExit(f"frameworks: {error}") from None
    finally:
        if not options.keep and not options.environments:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

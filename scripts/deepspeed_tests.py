#!/usr/bin/env python
"""Run DeepSpeed's own unit tests over the facade, on two CPU ranks.

Their source is fetched afresh into a temporary folder and is not kept: ``python
scripts/deepspeed_tests.py --peer FOLDER runtime/zero/test_zero_context.py ...``, or with ``--source
FOLDER`` a checkout that is there; ``--kind public`` names all files of a kind. FOLDER is an
installed DeepSpeed with its requirements (``pip install --target FOLDER deepspeed``, without its
torch): a file runs over it first, and over the facade those tests that it passes.

Results are added to ``tests/integrations/deepspeed/deepspeed_tests.json`` file by file, and
DEEPSPEED_TESTS.md is written anew from all of them. What is there from the same versions is not run
again, so a run that was broken off, or ended by ``--minutes``, goes on with what is missing;
``--again failed`` and ``--again all`` run tests over the facade anew.
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
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_zero.integrations.deepspeed.api import API  # noqa: E402

FIGURES = ROOT / "tests" / "integrations" / "deepspeed"
RAW, TABLE = FIGURES / "deepspeed_tests.json", FIGURES / "DEEPSPEED_TESTS.md"
URL = "https://github.com/deepspeedai/DeepSpeed"
REGISTER = "import hf_zero._autoload; hf_zero._autoload.register()\n"
Rows = dict[str, dict[str, Any]]
KINDS = ("public", "mixed", "internals")
PATIENCE = 20  # seconds that a rank may go on after another has raised
# Failures that stay, by the beginning of the test's name, and why.
SCALED = "the engine scales a plain loss.backward() itself: scale() is never needed"
GRAD_FN = (
    "it reads the name and the attributes of DeepSpeed's autograd.Function; zero3_linear_wrap is "
    "torch's own linear"
)
USER_BACKWARD = "v1/zero/test_zero_user_backward.py::TestZeroUserBackward"
ON_PURPOSE = {
    f"{USER_BACKWARD}WithScale::test_error_when_backward_without_scale": SCALED,
    f"{USER_BACKWARD}ScaleErrorDetection": SCALED,
    "v1/zero/test_zero_user_backward.py::TestUnmanagedGradientAccumulationOverlapCommValidation": (
        "overlap_comm is accepted beside managed_gradient_accumulation: false: at stages 0 and 1 "
        "reductions begin in step() anyway"
    ),
    "runtime/test_no_sync_ctxt.py::TestNoSyncCtxt::test_zero_stage": (
        "no_sync() works at stages 2 and 3, where DeepSpeed refuses it"
    ),
    "runtime/test_no_sync_ctxt.py::TestNoSyncCtxt::test_reentry": (
        "no_sync() may stand inside another one, where DeepSpeed refuses it"
    ),
    "runtime/zero/test_zero_context_ancestry.py::TestSerialParamInit": (
        "a single rank shards nothing: its parameters are whole, and AVAILABLE"
    ),
    "runtime/zero/test_zero_hook_attribute_delegation.py": (
        "it reads what DeepSpeed's hooks write on modules; hf-zero's hooks write nothing there"
    ),
    "runtime/zero/test_unwrap_model.py::TestUnwrapModel::": (
        "it reads DeepSpeed's list of hooks; the gathered model is what unwrapping is for, and "
        "whole in both"
    ),
    "v1/zero/test_zero.py::TestIncorectAllgatherBucketSize": (
        "every allgather_bucket_size works, where DeepSpeed refuses odd ones"
    ),
    "v1/zero/test_zero_torch_func.py::TestZero0DirectBackwardStillRaises": (
        "a plain loss.backward() works at stage 0, too"
    ),
    "runtime/zero/test_zero_leaf_module.py::TestSetZ3LeafModule::test_no_grad_input_error": (
        "leaf modules take inputs without gradients, where DeepSpeed raises"
    ),
    "runtime/test_ds_config_dict.py::TestNoModel": (
        "a model may be the first argument of initialize without its name, where DeepSpeed raises"
    ),
    "runtime/test_ds_config_dict.py::test_invalid_gradient_allreduce_op": (
        "refused by a ValueError with a text of its own"
    ),
    "runtime/test_ds_config_dict.py::test_sum_gradient_allreduce_rejects_z": (
        "sums of gradients work at stage 3, too, and beside an empty section zenflow"
    ),
    "runtime/test_ds_initialize.py::TestOptimizerImplementation": (
        "grad_accum_dtype works at stage 0 in every precision, where DeepSpeed refuses some"
    ),
    "v1/zero/test_zero.py::TestBF16OptimizerGradReduction": (
        "it reads a buffer of DeepSpeed's BF16_Optimizer; engine.optimizer is the script's own"
    ),
    "checkpoint/test_zero_optimizer.py::TestZeROCheckpointFrozenWeights::test_save_exclude": (
        "it reads files of DeepSpeed's checkpoints by their names; those of hf-zero are listed in "
        "manifest.json"
    ),
    "checkpoint/test_zero_optimizer.py::test_elastic_checkpoint": (
        "elastic_checkpoint is accepted without a warning: every checkpoint is elastic"
    ),
    "v1/zero/test_zero2_offload_multi_backward.py::": (
        "it reads a buffer of DeepSpeed's optimizer; engine.optimizer is the script's own"
    ),
    "v1/zero/test_stage2_flatten_on_gpu.py::": (
        "it reads a line of DeepSpeed's log and the flat buffers of its optimizers"
    ),
    "ops/muon/test_muon.py::TestMuonZero12NumericalCorrectness": (
        "it reads the partitions of DeepSpeed's optimizer; the suite compares Muon's update of "
        "shards with torch's own"
    ),
    "ops/muon/test_muon.py::TestMuonRejectsReduceScatter": (
        "Muon's matrices are offloaded whatever reduce_scatter says, where DeepSpeed refuses it"
    ),
    "runtime/half_precision/test_fp16.py::TestFP16OptimizerForMoE": (
        "layers of experts across ranks are not built"
    ),
    "runtime/test_ds_config_dict.py::test_sum_gradient_allreduce_rejects_deepcompile": (
        "DeepCompile is not built: refused by a NotBuiltError"
    ),
    "ops/adam/test_zf_torch_adam.py": (
        "it hands ZenFlow's optimizer what DeepSpeed's engine writes on parameters "
        "(selected_indices, ds_tensor, swappers); offload_optimizer's exact update overlaps the "
        "next forward"
    ),
    "v1/zero/test_zero_cpu_offload_grad_accum.py": (
        "it reads a buffer of DeepSpeed's optimizer; engine.optimizer is the script's own"
    ),
    "v1/zero/test_zero_activation_checkpoint_lifecycle.py": (
        "it reads what DeepSpeed's hooks keep on parameters and modules (is_external_param, "
        "ds_recompute_parameters)"
    ),
    "v1/zero/test_zero_functorch_linear.py::TestZeroFunctorchLinearRegression": GRAD_FN,
    "v1/zero/test_zero_functorch_linear.py::TestZeroLinearAutocast::test_setup_context": GRAD_FN,
}
# What a failure is about, by what was said; the first that fits.
REASONS = {
    "on purpose: works here, where DeepSpeed refuses it": (
        r"on purpose: .*(DeepSpeed (raises|refuses)|\bworks?\b|accepted|never needed)"
    ),
    "on purpose: reads what DeepSpeed's implementation keeps": r"on purpose: it (reads|hands)",
    "on purpose: otherwise here": r"on purpose:",
    "a feature that is not built": r"NotBuiltError",
    "imports a module or name of DeepSpeed's implementation": r"ImportError|ModuleNotFoundError",
    "uses an attribute of DeepSpeed's implementation": (
        r"AttributeError: .*no attribute|AttributeError: _|internal to DeepSpeed|isinstance\("
    ),
    "something else": r"",
}
HEAD = """# DeepSpeed's own unit tests over the facade

Written by `scripts/deepspeed_tests.py`; tests of DeepSpeed {ref},
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


def names_used(tree: ast.AST) -> Iterator[str]:
    """Names that a test takes from deepspeed's modules: imported, or as attributes of a module."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "deepspeed":
                    yield from (alias.name,) if "." in alias.name else ()
                    modules[alias.asname or "deepspeed"] = (
                        alias.name if alias.asname else "deepspeed"
                    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            modules.pop(node.id, None)  # a variable of the same name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value, modules)
            if owner in API and isinstance(node.ctx, ast.Load):
                yield f"{owner}.{node.attr}"


def dotted(node: ast.AST, modules: Mapping[str, str]) -> str:
    """``a.b.c`` as the name of a module; "" for anything else."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, modules)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def known(name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    return name in API or (
        module in API and (leaf in API[module].names or bool(API[module].others))
    )


def kind_of(file: Path) -> str:
    found = [known(name) for name in names_used(ast.parse(file.read_text()))]
    return "public" if all(found) else "mixed" if any(found) else "internals"


def about(unit: Path, file: str) -> dict[str, Any]:
    tree = ast.parse((unit / file).read_text())
    tests = private_tests(tree, helpers(unit.parent, tree))
    return {"kind": kind_of(unit / file), "private": sorted(tests)}


def helpers(tests: Path, tree: ast.Module) -> dict[str, ast.AST]:
    """The functions of the files below ``tests`` that a test imports from, by name."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unit."):
            file = tests / (node.module or "").replace(".", "/")
            body = ast.parse(file.with_suffix(".py").read_text()).body
            found.update((each.name, each) for each in body if isinstance(each, ast.FunctionDef))
    return found


def private_tests(
    tree: ast.Module, helpers: Mapping[str, ast.AST] = MappingProxyType({})
) -> set[str]:
    """``Class::test`` of the tests that use private attributes of deepspeed's objects, themselves
    or by functions of the same file or of ``helpers``.
    """
    bodies = dict(helpers)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bodies[node.name] = node
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    bodies[f"{node.name}::{item.name}"] = item
    private = {name for name, body in bodies.items() if any(map(is_private, ast.walk(body)))}
    while more := {
        name
        for name, body in bodies.items()
        for node in ast.walk(body)
        if isinstance(node, ast.Name) and node.id in private and name not in private
    }:
        private |= more
    tests = (name for name in bodies if name.rpartition("::")[2].startswith("test"))
    return {name for name in tests if name in private}


def is_private(node: ast.AST) -> bool:
    """Whether ``node`` asks another object than ``self`` for ``_name``, or makes one with it."""
    if isinstance(node, ast.keyword):
        return (node.arg or "").startswith("_")
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "torch")
        return node.attr.startswith("_") and not node.attr.startswith("__") and not own
    if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
        called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
        return called in ("getattr", "setattr", "hasattr", "patch", "object") and any(
            str(word).rpartition(".")[2].startswith("_") for word in words
        )
    return False


class Deadline:
    """When no further test is started, and what runs is ended."""

    def __init__(self, at: float) -> None:
        self.at = at

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at

    def end(self) -> None:
        self.at = 0.0


class Run:
    """Some files over DeepSpeed or over the facade; tests are named ``file::class::test``."""

    def __init__(self, tests: Path, path: list[str], facade: bool, limit: int) -> None:
        self.tests, self.limit, self.facade = tests, limit, facade
        self.path = [*path, str(tests), str(ROOT / "scripts")]
        self.said: dict[str, str] = {}
        self.missing: list[str] = []  # collected and wanted, but not run
        self.collected: set[str] = set()
        self.not_collected: dict[str, str] = {}  # of a file, why

    def run(self, files: list[str], wanted: list[str] | None, until: Deadline) -> None:
        """Run the ``wanted`` tests (None: all) of ``files``, in as many processes as hanging tests
        need.
        """
        while files and not until.passed:
            before = len(self.said) + len(self.not_collected)
            self._attempt(files, wanted, until)
            if not self.missing or len(self.said) + len(self.not_collected) == before:
                return
            wanted = self.missing
            files = list(dict.fromkeys(file_of(name) for name in wanted))

    def _attempt(self, files: list[str], wanted: list[str] | None, until: Deadline) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if wanted is not None:
                (folder / "wanted.json").write_text(json.dumps(wanted))
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
                + ["-p", "deepspeed_tests_plugin", "--rootdir=.", "--continue-on-collection-errors"]
                + [f"unit/{file}" for file in files],
                cwd=self.tests,
                env=self._environment(folder),
                stdout=(folder / "output").open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None and not until.passed:
                    time.sleep(0.5)
                    if self._stuck(folder):
                        break
            finally:
                end_session(process.pid)
                crashed = process.returncode is not None
                process.wait()
                release_builds()
                self._read(folder, files, wanted, until.passed, crashed)

    def _environment(self, folder: Path) -> dict[str, str]:
        if self.facade:  # as the .pth of an installation does, which an editable one lacks
            (folder / "sitecustomize.py").write_text(REGISTER)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), *self.path]),
            "DEEPSPEED_TESTS_FOLDER": str(folder),
            "LOCAL_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "DS_DISABLE_REUSE_DIST_ENV": "1",
            "DS_UNITTEST_TIMEOUT": str(self.limit),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_ZERO_AUTOLOAD": "1" if self.facade else "0",
        }

    def _stuck(self, folder: Path) -> bool:
        """Whether a test takes longer than it may."""
        events = events_of(folder)
        started = [event for event in events if "starts" in event]
        if not started or "ends" in events[-1]:
            return False
        now = time.monotonic()
        raised = [event for event in events[events.index(started[-1]) :] if "raised" in event]
        if raised and now - raised[0]["at"] > PATIENCE:
            return True
        return bool(now - started[-1]["at"] > self.limit + PATIENCE)

    def _read(
        self,
        folder: Path,
        files: list[str],
        wanted: list[str] | None,
        late: bool,
        crashed: bool,
    ) -> None:
        """Take what became of each test from the events that the plugin wrote."""
        names: list[str] = []
        running, raised = "", ""
        for event in events_of(folder):
            names = event.get("collected", names)
            self.collected.update(names)
            if "not_collected" in event:
                self.not_collected[event["not_collected"]] = event["said"]
            elif "starts" in event:
                running, raised = event["starts"], ""
            elif "raised" in event:
                raised = raised or event["raised"]
            elif "ends" in event:
                running = ""
                if self.said.get(event["ends"], "passed") == "passed":
                    self.said[event["ends"]] = event["said"]
        if running and raised:
            self.said[running] = f"{raised} (on one rank, while another waited)"
        elif running and crashed:
            self.said[running] = "the process ended within the test"
        elif running and not late:
            self.said[running] = f"not run: longer than {self.limit} s"
        if not names and not late:
            lines = (folder / "output").read_text().strip().splitlines() or ["no output"]
            self.not_collected = dict.fromkeys(files, lines[-1][:200]) | self.not_collected
        chosen = names if wanted is None else [name for name in wanted if name in names]
        self.missing = [name for name in chosen if name not in self.said]


def file_of(name: str) -> str:
    return name.partition("::")[0]


def of_file(names: Iterable[str], file: str) -> list[str]:
    """Those of ``names`` that lie in ``file``, without it."""
    return [name.partition("::")[2] for name in names if file_of(name) == file]


def events_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "events"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def end_session(leader: int) -> None:
    """End every process of the session that ``leader`` has started, whoever its parent is now:
    workers, and the compilers of an extension, for which ninja makes groups of their own.
    """

    def running(process: psutil.Process) -> bool:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            return os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
        return False

    while left := list(filter(running, psutil.process_iter())):  # one may start another meanwhile
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def release_builds() -> None:
    """Remove the locks of extensions that a killed process was building: another one would wait
    for them without end.
    """
    default = Path.home() / ".cache" / "torch_extensions"
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", default)).glob("**/lock"):
        lock.unlink(missing_ok=True)


def over_peer(rows: Rows, run: Run, of: str, until: Deadline) -> None:
    """Bring ``peer`` of each row up to date: the tests that DeepSpeed passes, and why not the
    others.
    """
    fresh = [file for file, row in rows.items() if row.get("peer", {}).get("of") != of]
    for file in fresh:
        rows[file] = {key: rows[file][key] for key in ("kind", "private") if key in rows[file]}
        rows[file]["peer"] = {"of": of, "passed": [], "not_run": [], "others": {}, "late": []}
    rest = [f"{file}::{name}" for file, row in rows.items() for name in row["peer"]["not_run"]]
    for files, wanted in ((fresh, None), (list(dict.fromkeys(map(file_of, rest))), rest)):
        run.missing = []
        run.run(files, wanted, until)
        for file in files:
            peer = rows[file]["peer"]
            if file not in {file_of(n) for n in [*run.said, *run.missing, *run.not_collected]}:
                if wanted is None:
                    peer["of"] = "nothing"  # time was over before it was collected
                continue
            said = {name: run.said[f"{file}::{name}"] for name in of_file(run.said, file)}
            late = [name for name, word in said.items() if word.startswith("not run")]
            others = Counter(word for n, word in said.items() if word != "passed" and n not in late)
            others.update([run.not_collected[file]] if file in run.not_collected else [])
            peer["passed"] += [name for name, word in said.items() if word == "passed"]
            peer["others"] = dict(others + Counter(peer["others"]))
            peer["not_run"] = of_file(run.missing, file)
            peer["late"] += late


def over_facade(rows: Rows, run: Run, of: str, again: str, until: Deadline) -> None:
    """Bring ``facade`` of each row up to date: which of the tests that DeepSpeed passes fail, and
    why.
    """
    wanted = []
    for file, row in rows.items():
        passed = row["peer"]["passed"]
        old = row.get("facade", {})
        if old.get("of") != of or again == "all":
            old = row["facade"] = {"of": of, "passed": [], "failed": {}, "not_run": []}
        if again == "failed":
            old["failed"] = {}
        done = {*old["passed"], *old["failed"]}
        wanted += [f"{file}::{name}" for name in passed if name not in done]
    run.run(list(dict.fromkeys(map(file_of, wanted))), wanted, until)
    for name in wanted:
        file, _, test = name.partition("::")
        row = rows[file]["facade"]
        row["not_run"] = [other for other in row["not_run"] if other != test]
        word = run.said.get(name) or run.not_collected.get(file)
        if word is None and run.collected and name not in run.collected:
            word = "not collected"
        if word == "passed":
            row["passed"].append(test)
        elif word is None or word.startswith("not run"):
            row["not_run"].append(test)
        else:
            row["failed"][test] = word


def on_purpose(name: str) -> str:
    """Why the failure of a test stays; "" if it does not."""
    found = (why for start, why in ON_PURPOSE.items() if name.startswith(start))
    return "".join(f"on purpose: {why}" for why in found)


def about_what(said: str) -> str:
    """Which of REASONS ``said`` gives."""
    return next(reason for reason, pattern in REASONS.items() if re.search(pattern, said))


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


def write(rows: dict[str, Any], kinds: dict[str, str]) -> None:
    public = {file for file, kind in kinds.items() if kind == "public"}
    rows["to_run"] = sorted(public - {*rows["files"]})
    RAW.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    TABLE.write_text(table(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="below tests/unit, such as runtime/test_pld.py")
    parser.add_argument("--kind", choices=KINDS, help="all files of a kind")
    parser.add_argument("--ref", default="v0.19.8", help="tag of DeepSpeed (default: %(default)s)")
    parser.add_argument("--source", type=Path, help="a checkout of DeepSpeed, instead of fetching")
    parser.add_argument("--peer", type=Path, required=True, help="an installed DeepSpeed's folder")
    parser.add_argument("--also", type=Path, help="a folder with packages that the tests import")
    parser.add_argument("--limit", type=int, default=120, help="seconds of one test")
    parser.add_argument("--batch", type=int, default=4, help="files that one process runs")
    parser.add_argument("--minutes", type=float, default=1e6, help="end after as many")
    parser.add_argument("--again", choices=("none", "failed", "all"), default="none")
    given = parser.parse_args()
    until = Deadline(time.monotonic() + given.minutes * 60)
    signal.signal(signal.SIGTERM, lambda *_: until.end())
    signal.signal(signal.SIGINT, lambda *_: until.end())
    with tempfile.TemporaryDirectory() as folder:
        source = given.source
        if source is None:
            source = Path(folder) / "DeepSpeed"
            clone = ["git", "clone", "-q", "--depth", "1", "--branch", given.ref, URL, str(source)]
            subprocess.run(clone, check=True)
        unit = source / "tests" / "unit"
        kinds = {str(f.relative_to(unit)): kind_of(f) for f in sorted(unit.rglob("test_*.py"))}
        rows = json.loads(RAW.read_text()) if RAW.is_file() else {"files": {}}
        rows |= {"ref": given.ref, "all": Counter(kinds.values())}
        for file, row in rows["files"].items():
            row |= about(unit, file)
        installed = next(given.peer.glob("deepspeed-*.dist-info")).name.split("-")[1]
        installed = installed.removesuffix(".dist")
        torch, own = f"torch {version('torch')}", f"hf_zero {version('hf_zero')}"
        more = [str(given.also)] if given.also else []
        chosen = given.files or [file for file, kind in kinds.items() if kind == given.kind]
        for start in range(0, len(chosen), given.batch):
            files = chosen[start : start + given.batch]
            if until.passed:
                break
            some = {file: rows["files"].get(file, {}) | about(unit, file) for file in files}
            peer = Run(source / "tests", [str(given.peer)], False, given.limit)
            over_peer(some, peer, f"deepspeed {installed}, {torch}", until)
            facade = Run(source / "tests", [str(ROOT), *more], True, given.limit)
            over_facade(some, facade, f"{own}, {torch}", given.again, until)
            rows["files"] |= some
            for file, row in some.items():
                tests, ours = row["peer"]["passed"], row["facade"]
                said = f"{len(ours['failed'])} of {len(tests)} fail, {len(ours['not_run'])} not run"
                print(f"{file}: {said}", flush=True)
            write(rows, kinds)
        write(rows, kinds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

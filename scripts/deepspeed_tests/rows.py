"""Results of each test, file by file, updated by runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from scripts.deepspeed_tests.runs import Deadline, Run, file_of, of_file

Rows = dict[str, dict[str, Any]]


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

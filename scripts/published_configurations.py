"""Translates the configurations that repositories publish, as ``hf-zero migrate`` does, and prints
what becomes of them. The checkouts are fetched by whoever runs it; none is a part of hf-zero.

    git clone --depth 1 https://github.com/haotian-liu/LLaVA sources/LLaVA
    python scripts/published_configurations.py sources/* \\
        --out scripts/bench/results/published_configurations-2026-11-24.jsonl
    python scripts/readme.py

A file counts if it is JSON or YAML, and a DeepSpeed or an Accelerate configuration rather than that
of a whole training program or a template whose values a script fills in.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_zero.config.files import load_file
from hf_zero.config.migrating import Migration, migrate
from hf_zero.errors import ConfigError
from hf_zero.optim.build import refused

BYTES = 20_000  # more is no configuration
MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
PRECISIONS = ("fp16", "bf16", "optimizer")
PROGRAMS = (  # keys of configurations of other programs, which hold DeepSpeed's beside theirs
    *("model", "train", "tokenizer", "base_model", "model_name_or_path", "num_layers"),
    *("num-layers", "train_iters", "pipe_parallel_size", "pipe-parallel-size"),
)


OUTCOMES = ("translates", "translates, some keys left out", "to fix by hand")
# a value for a script to fill in, such as ${zero_stage} or ZERO_STAGE
BLANK = re.compile(r'"(\$\{\w+\}|[A-Z]+(_[A-Z]+)+),?"')
JSON = "DeepSpeed JSON"


def configurations(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kind and the mapping of each configuration below ``folder``."""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".json", ".yaml", ".yml") or not path.is_file():
            continue
        if path.stat().st_size > BYTES:
            continue
        try:
            mapping = load_file(path)
        except ConfigError:
            continue
        if "distributed_type" in mapping:
            yield str(mapping["distributed_type"]).rpartition(".")[2], mapping
        elif (
            isinstance(mapping.get("zero_optimization", {}), dict)
            and any(mark in mapping for mark in MARKS)
            and ("zero_optimization" in mapping or any(name in mapping for name in PRECISIONS))
            and not any(name in mapping for name in PROGRAMS)
            and not BLANK.search(json.dumps(mapping, default=str))
        ):
            yield JSON, mapping


def outcome(migration: Migration) -> str:
    if not migration.runs:
        return OUTCOMES[2]
    left = any(found.outcome == "left out" for found in migration.findings)
    return OUTCOMES[1] if left else OUTCOMES[0]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """A row for each kind and outcome of the configurations below ``folder``, with what is left
    out.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for kind, mapping in configurations(folder):
        migration = migrate(mapping, check=refused)
        key = kind, outcome(migration)
        named = {"repository": folder.name, "kind": kind, "outcome": key[1]}
        row = found.setdefault(
            key, {**named, "configurations": 0, "left_out": Counter(), "to_fix": Counter()}
        )
        row["configurations"] += 1
        for judged, counted in (("left out", row["left_out"]), ("to fix", row["to_fix"])):
            counted.update(
                f"{found.key}: {found.note}"[:160]
                for found in migration.findings
                if found.outcome == judged
            )
    return list(found.values())


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table of the outcomes by kind."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        counts[_group(row["kind"]), row["outcome"]] += row["configurations"]
    repositories = len({row["repository"] for row in rows})
    kinds = sorted({kind for kind, _ in counts})
    total = f"{counts.total()} configurations of {repositories} repositories"
    lines = [
        f"| {' | '.join((total, *OUTCOMES))} |",
        f"|{' --- |' * (1 + len(OUTCOMES))}",
        *(
            f"| {kind} | {' | '.join(str(counts[kind, each]) for each in OUTCOMES)} |"
            for kind in kinds
        ),
    ]
    return "\n".join(lines)


def _group(kind: str) -> str:
    named = {"DEEPSPEED": "Accelerate for DeepSpeed", "FSDP": "Accelerate for FSDP"}
    return kind if kind == JSON else named.get(kind, "Accelerate for DDP or one process")


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of the newest file in ``folder``."""
    newest = max(folder.glob("published_configurations-*.jsonl"))
    return [json.loads(line) for line in newest.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="checkouts, one a repository")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON lines")
    args = parser.parse_args()
    rows = [
        row for folder in tqdm(args.folders, unit="repository", delay=5) for row in rows_of(folder)
    ]
    if args.out is not None:
        args.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(table(rows))
    for judged in ("to_fix", "left_out"):
        reasons: Counter[str] = sum((row[judged] for row in rows), Counter())
        for reason, count in reasons.most_common():
            print(f"{count:4} {judged} {reason}")


if __name__ == "__main__":
    main()

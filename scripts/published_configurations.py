"""Translates the configurations that repositories publish, as ``hf-zero migrate`` does, and prints
what becomes of them. The checkouts are fetched by whoever runs it; none is a part of hf-zero.

    git clone --depth 1 https://github.com/haotian-liu/LLaVA sources/LLaVA
    python scripts/published_configurations.py sources/*

A file counts if it is JSON or YAML, and a DeepSpeed or an Accelerate configuration rather than that
of a whole training program.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_zero.config.files import load_file
from hf_zero.config.migrating import Migration, migrate
from hf_zero.errors import ConfigError

BYTES = 20_000  # more is no configuration
MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
PRECISIONS = ("fp16", "bf16", "optimizer")
PROGRAMS = (  # keys of configurations of other programs, which hold DeepSpeed's beside theirs
    *("model", "train", "tokenizer", "base_model", "model_name_or_path", "num_layers"),
    *("num-layers", "pipe_parallel_size", "pipe-parallel-size"),
)


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
        ):
            yield "DeepSpeed JSON", mapping


def outcome(migration: Migration) -> str:
    if not migration.runs:
        return "to mend by hand"
    left = any(found.outcome == "left out" for found in migration.findings)
    return "run, some keys left out" if left else "run"


def main(folders: list[str]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    holding = set()
    reasons: Counter[str] = Counter()
    for folder in tqdm(folders, unit="repository"):
        for kind, mapping in configurations(Path(folder)):
            migration = migrate(mapping)
            counts[kind, outcome(migration)] += 1
            holding.add(folder)
            reasons.update(
                f"{found.key}: {found.note}"
                for found in migration.findings
                if found.outcome == "left out"
            )
    columns = ("run", "run, some keys left out", "to mend by hand")
    print(f"{counts.total()} configurations of {len(holding)} repositories")
    print(f"| {' | '.join(('kind', *columns))} |\n|{' --- |' * 4}")
    for kind in sorted({kind for kind, _ in counts}):
        print(f"| {kind} | {' | '.join(str(counts[kind, column]) for column in columns)} |")
    for reason, count in reasons.most_common():
        print(f"{count:4} {reason[:160]}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The figures on the cards of recipes, and the quickstart's table in the documentation, from runs.

    python scripts/cards.py                     # writes cards and table from the rows
    python scripts/cards.py --run cifar10 gpt2  # runs the cards' first commands for the rows, first

``results/recipes-*.jsonl`` has a row for each recipe, whose figures are those of its card's first
command. A figure of a new run replaces the one in the row if they differ by more than a tolerance,
which is wider for the recipes in ``SPREADS``; seconds are not compared. The results in a card's
front matter (``model-index``) are those of its row.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import quickstart_summary
from huggingface_hub import EvalResult, ModelCard
from marks import filled
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
RECIPES, START = ROOT / "recipes", ROOT / "hf_zero" / "docs" / "start.md"
ROWS = ROOT / "scripts" / "bench" / "results" / "recipes-2026-11-24.jsonl"
OUTPUT = {"gpt2": "--save", "hello-bert": "--checkpoint_dir"}  # others: --output_dir
DATA = {  # others: Python's language reference
    "cifar10": "drawn pictures",
    "dpo": "generated pairs",
    "grpo": "generated prompts",
    "translation": "generated phrases",
    "vit": "drawn pictures",
    "whisper": "generated tones",
}
TOLERANCES = {"peak_bytes": 0.2, "bytes": 0.01, "loss": 0.1, "result": 0.1}  # of the figure
RATES = 0.03  # accuracy and other parts of one, absolute
# Wider tolerances, absolute, of recipes in which differences of rounding grow during training. Runs
# with learning rates that differ by 1e-7 or a few times that, and with ATEN_CPU_CAPABILITY=default
# ONEDNN_MAX_CPU_ISA=SSE41, gave cifar10 losses from 0.116 to 0.240 (six runs), up to 0.073 from the
# row's, and translation exact matches from 0.7025 to 0.7175 (five runs with the row's own). An
# earlier run, whose figures were the row's before, gave 0.7375: 0.0325 from the row's now.
SPREADS: dict[str, dict[str, float]] = {
    "cifar10": {"loss": 0.1},
    "translation": {"exact_match": 0.05},
}
MEMORY_STEPS = 60

Row = dict[str, Any]


def rows() -> dict[str, Row]:
    """The rows by recipe."""
    return {row["recipe"]: row for row in map(json.loads, ROWS.read_text().splitlines())}


def run(recipe: str, folder: Path) -> Row:
    """Run the first command of the card of ``recipe``, with its output in ``folder``, and those of
    its table of memory; return its row.
    """
    _launch(recipe, folder)
    if recipe == "bert-mlm":
        steps = ("--max_train_steps", str(MEMORY_STEPS))
        for stage in range(4):
            _launch(recipe, folder / f"stage_{stage}", *steps, stage=stage)
    return row_of(recipe, folder)


def row_of(recipe: str, folder: Path) -> Row:
    """Return the row of a run whose output is in ``folder``."""
    if (folder / "row.json").exists():
        return dict(json.loads((folder / "row.json").read_text()))
    state = _state(folder)
    evaluated = [entry for entry in state["log_history"] if "eval_loss" in entry]
    first, last = evaluated[0], evaluated[-1]
    names = [
        name
        for name in last
        if name in first
        and name.startswith("eval_")
        and not name.endswith(("_per_second", "_runtime", "_time"))
    ]
    row: Row = {
        "recipe": recipe,
        "ranks": 2,
        "steps": last["step"],
        "metrics": {
            name.removeprefix("eval_"): [first[name], last[name]]
            for name in sorted(names, reverse=True)
        },
    }
    if recipe == "bert-mlm":
        row["memory"] = [_memory(folder / f"stage_{stage}", stage) for stage in range(4)]
        row["quickstart"] = _quickstart(folder)
    return row


def _launch(recipe: str, folder: Path, *more: str, stage: int = 3) -> None:
    text = (RECIPES / recipe / "README.md").read_text()
    line = text.partition("```\n")[2].partition("\n")[0]
    words = shlex.split(line.replace("zero3", f"zero{stage}"))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [*words, OUTPUT.get(recipe, "--output_dir"), str(folder), *more]
    subprocess.run(command, cwd=RECIPES / recipe, env=environment, check=True)


def _state(folder: Path) -> Row:
    """What a run has logged, at its end."""
    states = [json.loads(path.read_text()) for path in folder.rglob("trainer_state.json")]
    return max(states, key=lambda state: len(state["log_history"]))


def _memory(folder: Path, stage: int) -> Row:
    """Bytes of all tensors of a rank, beside those that an estimate foresees."""
    import hf_zero

    state = _state(folder)
    model = folder / "model"
    hf_zero.convert_checkpoint(folder / f"step_{MEMORY_STEPS}", model, progress=False)
    foreseen = hf_zero.estimate(model, ranks=2, precision="fp32").at(stage)
    return {
        "stage": stage,
        "predicted_bytes": foreseen.state,
        "measured_bytes": state["memory"][0]["state"],
        "loss": state["log_history"][-1]["eval_loss"],
    }


def _quickstart(folder: Path) -> Row:
    import hf_zero

    last = max(folder.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    hf_zero.convert_checkpoint(last, folder / "model", progress=False)
    return quickstart_summary.described(last, folder / "model")


def differences(old: Any, new: Row) -> Iterator[str]:
    """Yield the figures of the row ``new`` that are not those of ``old`` within the tolerances."""
    yield from _differences(old, new, "", SPREADS.get(new.get("recipe", ""), {}))


def _differences(old: Any, new: Any, name: str, spread: Mapping[str, float]) -> Iterator[str]:
    if isinstance(new, Mapping):
        for key, value in new.items():
            inner = f"{name}.{key}".strip(".")
            yield from _differences((old or {}).get(key), value, inner, spread)
    elif isinstance(new, list):
        was = old if isinstance(old, list) and len(old) == len(new) else [None] * len(new)
        for number, value in enumerate(new):
            yield from _differences(was[number], value, f"{name}[{number}]", spread)
    elif old is None or not _agree(old, new, name, spread):
        yield f"{name}: {old} was, {new} is"


def _agree(old: Any, new: Any, name: str, spread: Mapping[str, float]) -> bool:
    if isinstance(new, str) or "second" in name:
        return True
    share = next((share for kind, share in TOLERANCES.items() if kind in name), 0.0)
    least = RATES if isinstance(new, float) else 0
    widest = max((width for kind, width in spread.items() if kind in name), default=0.0)
    return bool(abs(new - old) <= max(share * abs(old), least, widest))


def updated(old: Any, new: Row) -> Row:
    """Return the row ``new`` with the figures of ``old`` where they agree."""
    return dict(_updated(old, new, "", SPREADS.get(new.get("recipe", ""), {})))


def _updated(old: Any, new: Any, name: str, spread: Mapping[str, float]) -> Any:
    if isinstance(new, Mapping):
        return {
            key: _updated((old or {}).get(key), value, f"{name}.{key}", spread)
            for key, value in new.items()
        }
    if isinstance(new, list):
        was = old if isinstance(old, list) and len(old) == len(new) else [None] * len(new)
        return [_updated(before, value, name, spread) for before, value in zip(was, new)]
    return old if old is not None and _agree(old, new, name, spread) else new


def generated() -> dict[Path, str]:
    """The cards and the page with figures, as the rows have them."""
    found = {RECIPES / recipe / "README.md": card(row) for recipe, row in rows().items()}
    table = _quickstart_table(rows()["bert-mlm"]["quickstart"])
    return found | {START: filled(START.read_text(), "quickstart", table)}


def card(row: Row) -> str:
    """The card of a recipe with the figures of its row, in text and front matter."""
    path = RECIPES / row["recipe"] / "README.md"
    before = ModelCard(path.read_text())
    text = before.text
    if "metrics" in row:
        text = filled(text, "figures", _table(row))
    if "memory" in row:
        text = filled(text, "memory", _memory_table(row["memory"]))
    (heading,) = re.findall(r"^# (.+)$", text, re.MULTILINE)[:1]
    before.data.model_name = heading
    before.data.eval_results = list(_results(row, before.data.pipeline_tag or "other"))
    before.text = text
    return str(before)


def _results(row: Row, task: str) -> Iterator[EvalResult]:
    recipe = row["recipe"]
    data = DATA.get(recipe, "pydoc_data.topics")
    if "metrics" in row:
        figures = [(name, name, ends[1]) for name, ends in row["metrics"].items()]
    else:
        name, _, last = row["result"]
        figures = [(name.split()[-1], name, last)]
    for kind, name, value in figures:
        yield EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=data,
            metric_type=kind,
            metric_name=name,
            metric_value=round(value, 4),
        )


def _table(row: Row) -> str:
    lines = [f"| | before training | after {row['steps']:,} steps |", "| --- | --- | --- |"]
    for name, ends in row["metrics"].items():
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(f'{end:.3f}' for end in ends)} |")
    return "\n".join(lines)


def _memory_table(stages: list[Row]) -> str:
    head = f"evaluation loss after {MEMORY_STEPS} steps"
    lines = [f"| stage | predicted | measured | {head} |", "| --- | --- | --- | --- |"]
    for stage in stages:
        sizes = (stage["predicted_bytes"], stage["measured_bytes"])
        shown = " | ".join(f"{size:,}" for size in sizes)
        lines.append(f"| {stage['stage']} | {shown} | {stage['loss']:.6f} |")
    return "\n".join(lines)


def _quickstart_table(described: Row) -> str:
    console = Console(width=78, record=True, file=io.StringIO())
    console.print(quickstart_summary.table(described))
    text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    return f"```text\n{text}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="+", choices=rows(), default=[], metavar="RECIPE")
    args = parser.parse_args()
    found = rows()
    for recipe in args.run:
        with tempfile.TemporaryDirectory() as folder:
            row = run(recipe, Path(folder))
        for difference in differences(found.get(recipe), row):
            print(f"{recipe}: {difference}")
        found[recipe] = updated(found.get(recipe), row)
    if args.run:
        ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in found.values()))
    for path, text in generated().items():
        path.write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()

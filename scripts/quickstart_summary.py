"""The last act of scripts/quickstart: fill a masked word with the converted model, and say what
the run was like.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
from transformers.utils import logging

import hf_zero

SENTENCE = "The value of [MASK] expression is a new object."


def fill(folder: Path) -> str:
    """The words the model proposes for the mask, with their probabilities."""
    filler = pipeline(
        "fill-mask",
        model=AutoModelForMaskedLM.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
    )
    return ", ".join(
        f"{guess['token_str'].strip()} ({guess['score']:.0%})" for guess in filler(SENTENCE)[:3]
    )


def described(checkpoint: Path, model: Path) -> dict[str, Any]:
    """The figures of the run whose last sharded ``checkpoint`` became the folder ``model``."""
    run = json.loads((checkpoint / "trainer_state.json").read_text())
    losses = [entry["eval_loss"] for entry in run["log_history"] if "eval_loss" in entry]
    estimate = hf_zero.estimate(model, ranks=run["processes"], precision="fp32", optimizer="AdamW")
    sharded, whole = estimate.at(3), estimate.at(0)
    return {
        "parameters": run["parameters"],
        "processes": run["processes"],
        "sharding": run["sharding"],
        "steps": run["completed_steps"],
        "loss": [losses[0], losses[-1]],
        "rank_bytes": [rank["state"] for rank in run["memory"]],
        "predicted_bytes": sharded.state,  # with gradients: measured before the step
        "state_bytes": sharded.state,
        "whole_bytes": whole.state,
        "tokens_per_second": run["tokens_per_second"],
        "filled": fill(model),
        "checkpoint": f"runs/quickstart/{checkpoint.name}",
        "model": f"runs/quickstart/{model.name}",
    }


def table(run: dict[str, Any]) -> Table:
    """The table about a run that :func:`described`."""
    shown = Table(
        title=f"{run['parameters']:,} parameters, {run['processes']} ranks, {run['sharding']}, "
        f"{run['steps']} steps",
        show_header=False,
    )
    before, after = run["loss"]
    shown.add_row("evaluation loss", f"{before:.3f} before, {after:.3f} after")
    predicted = run["predicted_bytes"]
    for rank, size in enumerate(run["rank_bytes"]):
        against = f"{predicted / 1e6:.2f} MB predicted ({size / predicted - 1:+.1%})"
        shown.add_row(f"tensors on rank {rank}", f"{size / 1e6:.2f} MB, {against}")
    shown.add_row(
        "model and optimizer state",
        f"{run['state_bytes'] / 1e6:.2f} MB; unsharded {run['whole_bytes'] / 1e6:.2f} MB",
    )
    shown.add_row("speed", f"{run['tokens_per_second']:,.0f} tokens/s")
    shown.add_row(SENTENCE, run["filled"])
    shown.add_row("sharded checkpoint", run["checkpoint"])
    shown.add_row("model folder", run["model"])
    folder = Path(run["checkpoint"]).parent
    shown.add_row("page of the run", f"{folder}/report.html")
    shown.add_row("the command that wrote it", f"hf-zero report {folder}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="the last sharded checkpoint")
    parser.add_argument("model", type=Path, help="the converted folder")
    args = parser.parse_args()
    logging.disable_progress_bar()  # a bar of a hundredth of a second
    run = described(args.checkpoint, args.model)
    Console().print(table(run | {"checkpoint": str(args.checkpoint), "model": str(args.model)}))


if __name__ == "__main__":
    main()

"""The last act of scripts/quickstart: fill a masked word with the converted model, and say what
the run was like.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="the last sharded checkpoint")
    parser.add_argument("model", type=Path, help="the converted folder")
    args = parser.parse_args()

    run = json.loads((args.checkpoint / "trainer_state.json").read_text())
    losses = [entry["eval_loss"] for entry in run["log_history"] if "eval_loss" in entry]
    estimate = hf_zero.estimate(
        args.model, ranks=run["processes"], precision="fp32", optimizer="AdamW"
    )
    sharded, whole = estimate.at(3), estimate.at(0)
    predicted = sharded.state + sharded.gradient_buffers

    table = Table(
        title=f"{run['parameters']:,} parameters, {run['processes']} ranks, {run['sharding']}, "
        f"{run['completed_steps']} steps",
        show_header=False,
    )
    table.add_row("evaluation loss", f"{losses[0]:.3f} before, {losses[-1]:.3f} after")
    for rank in run["memory"]:
        against = f"{predicted / 1e6:.2f} MB predicted ({rank['state'] / predicted - 1:+.1%})"
        table.add_row(f"tensors on rank {rank['rank']}", f"{rank['state'] / 1e6:.2f} MB, {against}")
    table.add_row(
        "of these state", f"{sharded.state / 1e6:.2f} MB; unsharded {whole.state / 1e6:.2f} MB"
    )
    table.add_row("speed", f"{run['tokens_per_second']:,.0f} tokens/s")
    table.add_row(SENTENCE, fill(args.model))
    table.add_row("sharded checkpoint", str(args.checkpoint))
    table.add_row("model folder", str(args.model))
    Console().print(table)


if __name__ == "__main__":
    main()

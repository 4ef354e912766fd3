"""Train a Llama on sequences that grow, and measure the memory of a rank: with whole ones on each
rank, or with parts of the same ones on all ranks (ParallelismConfig's sp_size, or cp_size for a
ring). Plot the peak of a forward and backward over the length.

    accelerate launch --config_file whole.yaml run_long_context.py
    accelerate launch --config_file split.yaml run_long_context.py
    accelerate launch --config_file ring.yaml run_long_context.py
    accelerate launch --config_file split.yaml run_long_context.py --model NAME --text rows.txt \\
        --lengths 32768 65536
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))
from plot import line_plot

BYTES = 128  # of the text, where no tokenizer reads it
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler prints its starts and stops


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, or a name on the hub; default: a small one")
    parser.add_argument("--text", type=Path, help="a file; default: Python's language reference")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument(
        "--steps", type=int, default=6, help="at each length; the memory is that of the second"
    )
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/long-context"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the memory of the second step is measured; set 2")
    return args


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, use_cache=False)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=max(args.lengths),
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def stream_of(args: argparse.Namespace) -> torch.Tensor:
    text = args.text.read_text() if args.text else "\n".join(topics[key] for key in sorted(topics))
    if args.model:
        stream = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[0]
    else:
        stream = torch.tensor([byte for byte in text.encode() if byte < BYTES])
    if len(stream) <= max(args.lengths):
        raise SystemExit(
            f"--lengths {max(args.lengths)} needs a text of more tokens than that, and this one "
            f"has {len(stream)}; choose a longer --text, or shorter --lengths"
        )
    return stream


def rows_of(stream: torch.Tensor, length: int, count: int) -> list[dict[str, torch.Tensor]]:
    """``count`` rows from anywhere in the text, with their positions."""
    starts = torch.randint(len(stream) - length, (count,)).tolist()
    return [
        {
            "input_ids": stream[start : start + length],
            "labels": stream[start : start + length],
            "position_ids": torch.arange(length),
        }
        for start in starts
    ]


def mean_over(group: Any, loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of all ranks of ``group``, as in Accelerate's guide."""
    gather = torch.distributed.nn.functional.all_gather
    count = (labels != -100).sum()
    losses, counts = torch.stack(gather(loss, group=group)), torch.stack(gather(count, group=group))
    return (torch.where(counts > 0, losses, 0.0) * counts).sum() / counts.sum().clamp(min=1)


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes of tensors that ``run`` adds at once."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = most = 0
    events = [
        each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def train(accelerator: Accelerator, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each length."""
    parallel = accelerator.parallelism_config
    size = parallel.sp_size if parallel is not None else 1  # of a ring, too
    ring = os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1") != "1"
    parts = f"{'a ring of' if ring else 'parts of sequences on'} {size} ranks"
    stream, model = stream_of(args), model_of(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # one row for each rank in each step
    count = args.steps * accelerator.num_processes // size
    loaders = [DataLoader(rows_of(stream, length, count)) for length in args.lengths]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    group = None
    if size > 1:
        from deepspeed.utils import groups

        group = groups._get_sequence_parallel_group()

    losses: list[torch.Tensor] = []

    def step(batch: dict[str, torch.Tensor]) -> None:
        if group is not None:
            batch = {**batch, "labels": batch["shift_labels"]}
        loss = model(**batch).loss
        if group is not None:
            loss = mean_over(group, loss, batch["labels"])
        accelerator.backward(loss)
        losses.append(loss.detach())

    for length, loader in zip(args.lengths, loaders):
        losses.clear()
        peak = 0
        for number, batch in enumerate(loader):
            if number == 1:  # the first has made what stays
                peak = peak_of(partial(step, batch))
            else:
                step(batch)
            optimizer.step()
            optimizer.zero_grad()
        yield {
            "config": parts if size > 1 else "whole sequences",
            "length": length,
            "peak_mib": peak / 2**20,
            "loss": accelerator.reduce(torch.stack(losses).mean(), "mean").item(),
        }


def report(rows: list[dict[str, Any]], folder: Path) -> None:
    """The rows beside those of other configurations, and the plot of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.jsonl"
    former = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rows = [each for each in former if each["config"] != rows[0]["config"]] + rows
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves: dict[str, list[tuple[float, float]]] = {}
    print(f"{'':32}{'tokens':>8}{'peak':>14}{'loss':>9}")
    for row in rows:
        curves.setdefault(row["config"], []).append((row["length"], row["peak_mib"]))
        print(f"{row['config']:32}{row['length']:8}{row['peak_mib']:10.1f} MiB{row['loss']:9.3f}")
    title = "Peak memory that a forward and backward adds on a rank"
    line_plot(folder / "memory_over_length.svg", curves, title, "tokens of a sequence", "MiB")
    print(f"rows and plot: {folder}")


def main() -> None:
    args = parse()
    accelerator = Accelerator()
    set_seed(args.seed)
    rows = list(train(accelerator, args))
    if accelerator.is_main_process:
        report(rows, args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Train the same pre-LN BERT of 12 layers on the same samples with all of its layers and with
layers that each iteration leaves out at random: a DeepSpeed configuration for each. Plot their
held-out losses over samples and over seconds.

    torchrun --nproc_per_node 2 run_layer_drop.py
    torchrun --nproc_per_node 2 run_layer_drop.py --deepspeed_config layer_drop.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import BertConfig, BertForMaskedLM

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from plot import line_plot  # noqa: E402

CONFIGS = ("all_layers.json", "layer_drop.json")
MASK = 128  # beyond the values of a byte of the text
IGNORED = -100  # a label that the loss leaves out


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--deepspeed_config", type=Path, nargs="+", default=[HERE / name for name in CONFIGS]
    )
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="passed by launchers that do not set LOCAL_RANK"
    )
    parser.add_argument("--num_iterations", type=int, default=400)
    parser.add_argument("--batch_size", type=int, default=8, help="rows of an iteration on a rank")
    parser.add_argument("--seq_length", type=int, default=64, help="bytes of a row")
    parser.add_argument("--warmup", type=int, default=40, help="iterations")
    parser.add_argument("--num_layers", type=int, default=12)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--eval_every", type=int, default=25)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/layer-drop"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_text(seq_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Python's own language reference, a number a byte: what is trained on, a stream, and 64 rows
    [64, seq_length] from its held-out end.
    """
    joined = "\n".join(topics[name] for name in sorted(topics))
    stream = torch.tensor([byte for byte in joined.encode() if byte < MASK])
    end = len(stream) * 19 // 20
    rows = stream[end:].unfold(0, seq_length, seq_length)
    return stream[:end], rows[:: len(rows) // 64][:64]


def masked(tokens: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """``tokens`` with three in twenty of them masked, which are the labels."""
    chosen = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.15
    return {
        "input_ids": tokens.masked_fill(chosen, MASK),
        "labels": tokens.masked_fill(~chosen, IGNORED),
    }


def build(file: Path, args: argparse.Namespace) -> Any:
    """An engine around a new model; whatever the file, the model begins with the same weights."""
    torch.manual_seed(args.seed)
    net = BertForMaskedLM(
        BertConfig(
            vocab_size=MASK + 1,
            max_position_embeddings=args.seq_length,
            hidden_size=args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            intermediate_size=4 * args.hidden_size,
            pad_token_id=None,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            # BERT's 0.02 is for a hidden size of 768
            initializer_range=0.5 * args.hidden_size**-0.5,
        )
    )
    config = json.loads(file.read_text())
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    engine, _, _, _ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / args.warmup)
        ),
    )
    return engine


@torch.no_grad()
def evaluate(engine: Any, rows: torch.Tensor) -> float:
    """Mean loss over the held-out rows, which each rank reads in full, through all layers."""
    engine.eval()
    batch = masked(rows, seed=0)
    loss = engine(**{name: each.to(engine.device) for name, each in batch.items()}).loss.item()
    engine.train()
    return loss


def train(file: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A run with one configuration: a row for each evaluation, on every rank. Evaluations do not
    count among the seconds.
    """
    engine, name = build(file, args), file.stem
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    stream, held_out = load_text(args.seq_length)
    rows = [{"config": name, "samples": 0, "seconds": 0.0, "loss": evaluate(engine, held_out)}]
    seconds, began = 0.0, time.perf_counter()
    bar = tqdm(total=args.num_iterations, disable=None if rank == 0 else True, desc=name)
    for step in range(1, args.num_iterations + 1):
        random = torch.Generator().manual_seed(step * ranks + rank)
        starts = torch.randint(
            len(stream) - args.seq_length, (args.batch_size, 1), generator=random
        )
        batch = masked(stream[starts + torch.arange(args.seq_length)], seed=step * ranks + rank)
        engine.backward(engine(**{key: each.to(engine.device) for key, each in batch.items()}).loss)
        engine.step()
        bar.update()
        if step % args.eval_every == 0 or step == args.num_iterations:
            seconds += time.perf_counter() - began
            rows.append(
                {
                    "config": name,
                    "samples": step * args.batch_size * ranks,
                    "seconds": seconds,
                    "loss": evaluate(engine, held_out),
                }
            )
            bar.set_postfix(loss=f"{rows[-1]['loss']:.3f}", refresh=False)
            began = time.perf_counter()
    bar.close()
    deepspeed.log_dist(f"{name}: held-out loss {rows[-1]['loss']:.3f}", ranks=[0])
    return rows


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The rows and their plots as files, and a table."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) for row in rows)
    (args.output_dir / "rows.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{'':20}{'seconds':>10}{'held-out loss':>16}")
    for last in {row["config"]: row for row in rows}.values():
        print(f"{last['config']:20}{last['seconds']:10.1f}{last['loss']:16.3f}")
    for unit in ("samples", "seconds"):
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            curves.setdefault(row["config"], []).append((row[unit], row["loss"]))
        line_plot(
            args.output_dir / f"loss_over_{unit}.svg",
            curves,
            f"A BERT of {args.num_layers} layers, and one that leaves some out",
            unit,
            "held-out loss",
        )
    print(f"rows and plots: {args.output_dir}")


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    rows = [row for file in args.deepspeed_config for row in train(file, args)]
    if deepspeed.comm.get_rank() == 0:
        report(rows, args)
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()

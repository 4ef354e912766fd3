"""Train the same small GPT-2 once with rows in a random order, and once with the rows that
`hf-zero analyze` finds easy first. Plot their held-out losses over the steps.

    torchrun --nproc_per_node 2 run_curriculum_sampling.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from plot import line_plot  # noqa: E402

CONFIGS = ("random.json", "rarity.json")
VALUES = 128  # of a byte of the text


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
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--seq_length", type=int, default=64, help="bytes of a row")
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--evaluations", type=int, default=16, help="of each run, evenly apart")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/curriculum-sampling"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_rows(seq_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Python's own language reference, a number a byte: rows to train on, and every twentieth,
    which is held out.
    """
    joined = "\n".join(topics[name] for name in sorted(topics))
    stream = torch.tensor([byte for byte in joined.encode() if byte < VALUES])
    rows = stream.unfold(0, seq_length, seq_length)
    held_out = torch.arange(len(rows)) % 20 == 0
    return rows[~held_out], rows[held_out][::4]


def prepare(args: argparse.Namespace) -> Path:
    """Rank 0 stores the rows and measures them; the folder of the rows."""
    folder: Path = args.output_dir / "data"
    if deepspeed.comm.get_rank() == 0:
        rows, _ = load_rows(args.seq_length)
        Dataset.from_dict({"input_ids": rows.tolist()}).save_to_disk(folder)
        command = str(Path(sys.executable).with_name("hf-zero"))
        measure = [command, "analyze", str(folder), "--metric", "vocab_rarity", "--workers", "2"]
        subprocess.run(measure, check=True)
    deepspeed.comm.barrier()
    return folder


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": tokens, "labels": tokens}


def build(file: Path, data: Path, args: argparse.Namespace) -> tuple[Any, Any]:
    """An engine around a new model, and its loader; whatever the file, the model begins with the
    same weights.
    """
    torch.manual_seed(args.seed)
    net = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VALUES,
            n_positions=args.seq_length,
            n_embd=args.hidden_size,
            n_layer=args.num_layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    config = json.loads(file.read_text())
    sampling = config.get("data_efficiency", {}).get("data_sampling", {})
    metrics = sampling.get("curriculum_learning", {}).get("curriculum_metrics", {})
    for name, metric in metrics.items():  # the file has the default of --output_dir
        metric["index_to_metric_path"] = str(data.with_name(f"{data.name}-difficulty") / name)
    engine, _, loader, _ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        training_data=load_from_disk(data).with_format("torch"),
        collate_fn=collate,
        config=config,
    )
    return engine, loader


def batches(loader: Any) -> Iterator[dict[str, torch.Tensor]]:
    for epoch in count():
        loader.data_sampler.set_epoch(epoch)
        yield from loader


@torch.no_grad()
def evaluate(engine: Any, rows: torch.Tensor) -> float:
    """Mean loss over the held-out rows, which each rank reads in full."""
    engine.eval()
    tokens = rows.to(engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss.item()
    engine.train()
    return loss


def train(file: Path, data: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A run with one configuration: a row for each evaluation, on every rank."""
    (engine, loader), name = build(file, data, args), file.stem
    _, held_out = load_rows(args.seq_length)
    interval = max(1, args.steps // args.evaluations)
    rows = [{"config": name, "step": 0, "loss": evaluate(engine, held_out)}]
    rank = deepspeed.comm.get_rank()
    bar = tqdm(total=args.steps, disable=None if rank == 0 else True, desc=name)
    for batch in batches(loader):
        tokens = {key: value.to(engine.device) for key, value in batch.items()}
        engine.backward(engine(**tokens).loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if not boundary:
            continue
        bar.update()
        step = engine.global_steps
        if step % interval == 0 or step == args.steps:
            rows.append({"config": name, "step": step, "loss": evaluate(engine, held_out)})
            bar.set_postfix(loss=f"{rows[-1]['loss']:.3f}", refresh=False)
        if step == args.steps:
            break
    bar.close()
    deepspeed.log_dist(f"{name}: held-out loss {rows[-1]['loss']:.3f}", ranks=[0])
    return rows


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The rows and their plot as files, and a table."""
    lines = (json.dumps(row) for row in rows)
    (args.output_dir / "rows.jsonl").write_text("\n".join(lines) + "\n")
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["config"], []).append((row["step"], row["loss"]))
    print(f"{'':20}{'held-out loss':>16}")
    for name, curve in curves.items():
        print(f"{name:20}{curve[-1][1]:16.3f}")
    line_plot(
        args.output_dir / "loss_over_steps.svg",
        curves,
        "A small GPT-2, on rows in a random order and on common bytes first",
        "steps",
        "held-out loss",
    )
    print(f"rows and plot: {args.output_dir}")


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    data = prepare(args)
    rows = [row for file in args.deepspeed_config for row in train(file, data, args)]
    if deepspeed.comm.get_rank() == 0:
        report(rows, args)
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train the same small GPT-2 once with rows in a random order, and once with the rows that
`hf-zero analyze` finds easy first. Plot their held-out losses over samples and over seconds.

    torchrun --nproc_per_node 2 run_curriculum_sampling.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from tqdm.auto import tqdm

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import VALUES, evaluate, finish, parser_of, small_gpt2  # noqa: E402

CONFIGS = ("random.json", "rarity.json")


def parse_args() -> argparse.Namespace:
    parser = parser_of(str(__doc__), [HERE / name for name in CONFIGS], steps=320)
    parser.add_argument("--seq_length", type=int, default=64, help="bytes of a row")
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
    net = small_gpt2(args, args.seq_length)
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


def train(file: Path, data: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A run with one configuration: a row for each evaluation, on every rank. Evaluations do not
    count among the seconds.
    """
    (engine, loader), name = build(file, data, args), file.stem
    _, tokens = load_rows(args.seq_length)
    held_out = {"input_ids": tokens, "labels": tokens}
    interval = max(1, args.steps // args.evaluations)

    def row(step: int, seconds: float) -> dict[str, Any]:
        samples = step * engine.train_batch_size()
        return {
            "config": name,
            "step": step,
            "samples": samples,
            "tokens": samples * args.seq_length,
            "seconds": seconds,
            "loss": evaluate(engine, held_out),
        }

    rows = [row(0, 0.0)]
    rank = deepspeed.comm.get_rank()
    bar = tqdm(total=args.steps, disable=None if rank == 0 else True, desc=name)
    seconds, began = 0.0, time.perf_counter()
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
            seconds += time.perf_counter() - began
            rows.append(row(step, seconds))
            bar.set_postfix(loss=f"{rows[-1]['loss']:.3f}", refresh=False)
            began = time.perf_counter()
        if step == args.steps:
            break
    bar.close()
    deepspeed.log_dist(f"{name}: held-out loss {rows[-1]['loss']:.3f}", ranks=[0])
    return rows


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    data = prepare(args)
    rows = [row for file in args.deepspeed_config for row in train(file, data, args)]
    title = "A small GPT-2, on rows in a random order and on common bytes first"
    finish(rows, args, title, ("samples", "seconds"))


if __name__ == "__main__":
    main()

"""Train the same small GPT-2 on the same number of samples once for each DeepSpeed configuration:
in small batches with AdamW, and in large ones with AdamW and with LAMB. Plot their held-out losses
over the samples.

    torchrun --nproc_per_node 2 run_lamb_large_batch.py
    torchrun --nproc_per_node 2 run_lamb_large_batch.py --deepspeed_config large_batch_lamb.json
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
from transformers import GPT2Config, GPT2LMHeadModel

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from plot import line_plot  # noqa: E402

CONFIGS = ("small_batch_adamw.json", "large_batch_adamw.json", "large_batch_lamb.json")
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
    parser.add_argument("--samples", type=int, default=16384, help="rows that each run reads")
    parser.add_argument("--seq_length", type=int, default=32, help="bytes of a row")
    parser.add_argument("--warmup", type=float, default=0.1, help="the share of all iterations")
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--evaluations", type=int, default=16, help="of each run, evenly apart")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/lamb-large-batch"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_text(seq_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Python's own language reference, a number a byte: what is trained on, a stream, and 64 rows
    [64, seq_length] from its held-out end.
    """
    joined = "\n".join(topics[name] for name in sorted(topics))
    stream = torch.tensor([byte for byte in joined.encode() if byte < VALUES])
    end = len(stream) * 19 // 20
    rows = stream[end:].unfold(0, seq_length, seq_length)
    return stream[:end], rows[:: len(rows) // 64][:64]


def build(file: Path, args: argparse.Namespace) -> Any:
    """An engine around a new model; whatever the file, the model begins with the same weights."""
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
    iterations = args.samples // config["train_batch_size"]

    def share(step: int) -> float:
        """Of the full learning rate, as DeepSpeed trains BERT with LAMB: up with the square of the
        iteration, then down by a tenth in each thirtieth of all.
        """
        done = (step + 1) / iterations
        if done < args.warmup:
            return (done / args.warmup) ** 2
        return 0.9 ** (30 * (done - args.warmup))

    engine, _, _, _ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, share),
    )
    return engine


@torch.no_grad()
def evaluate(engine: Any, rows: torch.Tensor) -> float:
    """Mean loss over the held-out rows, which each rank reads in full."""
    engine.eval()
    tokens = rows.to(engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss.item()
    engine.train()
    return loss


def train(file: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A run with one configuration: a row for each evaluation, on every rank."""
    engine, name = build(file, args), file.stem
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    stream, held_out = load_text(args.seq_length)
    batch, parts = engine.train_batch_size(), engine.gradient_accumulation_steps()
    micro = engine.train_micro_batch_size_per_gpu()
    iterations = args.samples // batch
    interval = max(1, iterations // args.evaluations)
    began = time.perf_counter()
    rows = [{"config": name, "samples": 0, "seconds": 0.0, "loss": evaluate(engine, held_out)}]
    bar = tqdm(total=iterations, disable=None if rank == 0 else True, desc=name)
    for step in range(1, iterations + 1):
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(stream) - args.seq_length, (batch,), generator=random)
        for part in range(parts):
            first = (part * ranks + rank) * micro
            places = starts[first : first + micro, None] + torch.arange(args.seq_length)
            tokens = stream[places].to(engine.device)  # [micro, seq_length]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        bar.update()
        if step % interval == 0 or step == iterations:
            loss, seconds = evaluate(engine, held_out), time.perf_counter() - began
            rows.append({"config": name, "samples": step * batch, "seconds": seconds, "loss": loss})
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    bar.close()
    deepspeed.log_dist(
        f"{name}: {iterations} iterations of {batch} samples, held-out loss {rows[-1]['loss']:.3f}",
        ranks=[0],
    )
    return rows


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The rows and their plot as files, and a table."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) for row in rows)
    (args.output_dir / "rows.jsonl").write_text("\n".join(lines) + "\n")
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["config"], []).append((row["samples"], row["loss"]))
    print(f"{'':20}{'seconds':>10}{'held-out loss':>16}")
    for last in {row["config"]: row for row in rows}.values():
        print(f"{last['config']:20}{last['seconds']:10.1f}{last['loss']:16.3f}")
    line_plot(
        args.output_dir / "loss_over_samples.svg",
        curves,
        "A small GPT-2, in small and in large batches",
        "samples",
        "held-out loss",
    )
    print(f"rows and plot: {args.output_dir}")


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

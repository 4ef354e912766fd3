"""Time of a training step of a BERT of 12 layers with all of them and with progressive layer
dropping at its final theta of 0.5, interleaved in one process.

    python scripts/bench/layer_drop.py --rounds 8 [--out scripts/bench/results]

A round is ``--steps`` steps of each; a figure is CPU time of the process (one thread), which does
not grow with what else the machine does, as wall time does, which is in the rows as well. Ratios
are of rounds. Raw rows with versions go to OUT as JSON lines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from versions import versions

THETA = 0.5


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def engine_of(args: argparse.Namespace, drops: bool) -> Any:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    import hf_zero

    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=2048, hidden_size=args.hidden, num_hidden_layers=12, num_attention_heads=4,
            intermediate_size=4 * args.hidden, max_position_embeddings=args.length,
        )
    )  # fmt: skip
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.rows,
        "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "pre_layer_norm": True,
    }
    if drops:  # a large gamma: theta(t) is final from the second step on
        config["progressive_layer_drop"] = {"enabled": True, "theta": THETA, "gamma": 100.0}
    return hf_zero.initialize(model=model, config=config)[0].train()


def main() -> None:
    args = parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    engines = {"all": engine_of(args, False), "drops": engine_of(args, True)}
    ids = torch.randint(2048, (args.rows, args.length))

    def step(name: str) -> None:
        engine = engines[name]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    for name in engines:
        step(name), step(name)
    rows = []
    for number in range(args.rounds):
        for name in engines if number % 2 else reversed(engines):
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(args.steps):
                step(name)
            rows.append(
                {
                    "round": number,
                    "kind": name,
                    "cpu_s": (time.process_time() - cpu) / args.steps,
                    "wall_s": (time.perf_counter() - wall) / args.steps,
                    "load": os.getloadavg()[0],
                }
            )
    expected = sum(1 - i / 12 * (1 - THETA) for i in range(1, 13)) / 12
    for clock in ("cpu_s", "wall_s"):
        of = {
            name: [row[clock] for row in rows if row["kind"] == name] for name in ("all", "drops")
        }
        ratios = [drops / whole for whole, drops in zip(of["all"], of["drops"])]
        mean = statistics.mean(of["drops"]) / statistics.mean(of["all"])
        print(
            f"{clock}: all {statistics.median(of['all']):.4f}, drops "
            f"{statistics.median(of['drops']):.4f}; ratio of means {mean:.3f}, of rounds "
            f"{min(ratios):.3f}..{statistics.median(ratios):.3f}..{max(ratios):.3f}"
        )
    print(f"layers kept on the average: {expected:.3f}")
    if args.out is not None:
        file = args.out / f"layer_drop-{datetime.date.today()}.jsonl"
        about = {
            **versions("torch", "transformers"),
            **{k: v for k, v in vars(args).items() if k != "out"},
        }
        with file.open("a") as out:
            for row in rows:
                out.write(json.dumps({**about, **row}, default=str) + "\n")


if __name__ == "__main__":
    main()

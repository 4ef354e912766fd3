"""Train the same GPT-2 of 8 layers on the same samples with layers that read all tokens, and with
middle layers that read a random part of them, which grows: a DeepSpeed configuration for each. Plot
their held-out losses over samples and over seconds.

    torchrun --nproc_per_node 2 run_random_ltd.py
    torchrun --nproc_per_node 2 run_random_ltd.py --deepspeed_config random_ltd.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import Batch, compare, load_text, parser_of, rows_of, small_gpt2  # noqa: E402

CONFIGS = [HERE / name for name in ("all_tokens.json", "random_ltd.json")]


def main() -> None:
    parser = parser_of(str(__doc__), CONFIGS, tokens=491_520)
    parser.set_defaults(num_layers=8)
    parser.add_argument("--seq_length", type=int, default=256, help="bytes of a row")
    args = parser.parse_args()
    stream, held_out = load_text(args.seq_length)

    def batch_of(count: int, random: torch.Generator) -> Batch:
        rows = rows_of(stream, args.seq_length, count, random)
        return {"input_ids": rows, "labels": rows}

    compare(
        args,
        lambda: small_gpt2(args, args.seq_length),
        batch_of,
        {"input_ids": held_out, "labels": held_out},
        f"A GPT-2 of {args.num_layers} layers, on all tokens and with random-LTD",
        ("samples", "seconds"),
    )


if __name__ == "__main__":
    main()

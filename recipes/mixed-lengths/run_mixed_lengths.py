"""Train the same small BERT on the same number of tokens with long sequences alone, and with short
ones first, as BERT was. Plot their held-out losses over tokens and seconds.

    torchrun --nproc_per_node 2 run_mixed_lengths.py
    torchrun --nproc_per_node 2 run_mixed_lengths.py --deepspeed_config mixed.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import (  # noqa: E402
    VALUES,
    Batch,
    compare,
    load_text,
    masked,
    parser_of,
    rows_of,
    small_bert,
)

CONFIGS = [HERE / name for name in ("long.json", "mixed.json")]


def main() -> None:
    parser = parser_of(str(__doc__), CONFIGS, tokens=600_000)
    parser.add_argument("--seq_length", type=int, default=256, help="bytes of a row")
    args = parser.parse_args()
    stream, held_out = load_text(args.seq_length)

    def batch_of(count: int, random: torch.Generator) -> Batch:
        return masked(rows_of(stream, args.seq_length, count, random), random)

    compare(
        args,
        lambda: small_bert(args, VALUES + 1, args.seq_length),
        batch_of,
        masked(held_out, torch.Generator().manual_seed(args.seed)),
        "A small BERT, on long sequences and on short ones first",
        ("tokens", "seconds"),
    )


if __name__ == "__main__":
    main()

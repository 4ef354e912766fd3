"""Train the same small GPT-2 on the same number of tokens with whole sequences, with sequences that
grow, and with sequences that grow and lose nothing. Plot their held-out losses over tokens and
seconds.

    torchrun --nproc_per_node 2 run_curriculum.py
    torchrun --nproc_per_node 2 run_curriculum.py --deepspeed_config truncate.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import Batch, compare, load_text, parser_of, rows_of, small_gpt2  # noqa: E402

CONFIGS = [HERE / name for name in ("whole.json", "truncate.json", "reshape.json")]


def main() -> None:
    parser = parser_of(str(__doc__), CONFIGS, tokens=600_000)
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
        "A small GPT-2, with whole sequences and with growing ones",
        ("tokens", "seconds"),
    )


if __name__ == "__main__":
    main()

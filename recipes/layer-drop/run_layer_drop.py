"""Train the same pre-LN BERT of 12 layers on the same samples with all of its layers and with
layers that each iteration leaves out at random: a DeepSpeed configuration for each. Plot their
held-out losses over samples and over seconds.

    torchrun --nproc_per_node 2 run_layer_drop.py
    torchrun --nproc_per_node 2 run_layer_drop.py --deepspeed_config layer_drop.json
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

CONFIGS = [HERE / name for name in ("all_layers.json", "layer_drop.json")]


def main() -> None:
    parser = parser_of(str(__doc__), CONFIGS, tokens=409_600)
    parser.set_defaults(num_layers=12)
    parser.add_argument("--seq_length", type=int, default=64, help="bytes of a row")
    args = parser.parse_args()
    stream, held_out = load_text(args.seq_length)

    def model_of() -> torch.nn.Module:
        spread = 0.5 * args.hidden_size**-0.5
        return small_bert(args, VALUES + 1, args.seq_length, initializer_range=spread)

    def batch_of(count: int, random: torch.Generator) -> Batch:
        return masked(rows_of(stream, args.seq_length, count, random), random)

    compare(
        args,
        model_of,
        batch_of,
        masked(held_out, torch.Generator().manual_seed(args.seed)),
        f"A BERT of {args.num_layers} layers, with and without progressive layer dropping",
        ("samples", "seconds"),
    )


if __name__ == "__main__":
    main()

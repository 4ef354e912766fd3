"""Train the same small BERT on the same number of tokens with long sequences alone, and with short
ones first, as BERT was. Plot their held-out losses over tokens and seconds.

    torchrun --nproc_per_node 2 run_mixed_lengths.py
    torchrun --nproc_per_node 2 run_mixed_lengths.py --deepspeed_config mixed.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import VALUES, Batch, compare, load_text, masked, parser_of, rows_of  # noqa: E402

CONFIGS = [HERE / name for name in ("long.json", "mixed.json")]


def main() -> None:
    parser = parser_of(str(__doc__), CONFIGS, tokens=600_000)
    parser.add_argument("--seq_length", type=int, default=256, help="bytes of a row")
    args = parser.parse_args()
    stream, held_out = load_text(args.seq_length)

    def model_of() -> torch.nn.Module:
        return BertForMaskedLM(
            BertConfig(
                vocab_size=VALUES + 1,
                hidden_size=args.hidden_size,
                num_hidden_layers=args.num_layers,
                num_attention_heads=4,
                intermediate_size=4 * args.hidden_size,
                max_position_embeddings=args.seq_length,
                pad_token_id=None,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=args.hidden_size**-0.5,
            )
        )

    def batch_of(count: int, random: torch.Generator) -> Batch:
        return masked(rows_of(stream, args.seq_length, count, random), random)

    compare(
        args,
        model_of,
        batch_of,
        masked(held_out, torch.Generator().manual_seed(args.seed)),
        "A small BERT, on long sequences and on short ones first",
        ("tokens", "seconds"),
    )


if __name__ == "__main__":
    main()

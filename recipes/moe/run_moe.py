"""Train the same small Mixtral with all experts on each rank, and with half of them on each of two
ranks, which exchange tokens. Plot their held-out losses over tokens and seconds.

    torchrun --nproc_per_node 2 run_moe.py
    torchrun --nproc_per_node 2 run_moe.py --deepspeed_config spread.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import VALUES, Batch, compare, load_text, parser_of, rows_of  # noqa: E402

CONFIGS = [HERE / name for name in ("whole.json", "spread.json")]


def main() -> None:
    parser = parser_of(str(__doc__), CONFIGS, tokens=200_000)
    parser.add_argument("--seq_length", type=int, default=64, help="bytes of a row")
    parser.add_argument("--num_experts", type=int, default=8)
    args = parser.parse_args()
    stream, held_out = load_text(args.seq_length)

    def model_of() -> torch.nn.Module:
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VALUES,
                max_position_embeddings=args.seq_length,
                hidden_size=args.hidden_size,
                intermediate_size=2 * args.hidden_size,
                num_hidden_layers=args.num_layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=args.num_experts,
                num_experts_per_tok=2,
                output_router_logits=True,
                router_aux_loss_coef=0.02,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def batch_of(count: int, random: torch.Generator) -> Batch:
        rows = rows_of(stream, args.seq_length, count, random)
        return {"input_ids": rows, "labels": rows}

    compare(
        args,
        model_of,
        batch_of,
        {"input_ids": held_out, "labels": held_out},
        "A small Mixtral, its experts on every rank and spread over two",
        ("tokens", "seconds"),
    )


if __name__ == "__main__":
    main()

"""Train a deep, narrow BERT with LAMB in a batch that grows within the run, once for each
configuration: post-LN, pre-LN, and pre-LN with layers that are dropped. Plot their held-out losses
over the tokens.

    torchrun --nproc_per_node 2 run_bert_large_batch.py
    torchrun --nproc_per_node 2 run_bert_large_batch.py --deepspeed_config pre_layer_norm.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import IGNORED, Batch, compare, parser_of, small_bert  # noqa: E402

CONFIGS = [
    HERE / name for name in ("post_layer_norm.json", "pre_layer_norm.json", "layer_drop.json")
]
WORDS = 32
LENGTH = 16


def sentences(count: int, random: torch.Generator) -> Batch:
    """A batch of a language in which each word names the next; one in five is masked, and to be
    told from its neighbors.
    """
    following = torch.randperm(WORDS, generator=torch.Generator().manual_seed(7))
    words = torch.randint(WORDS, (count, 1), generator=random)
    for _ in range(LENGTH - 1):
        words = torch.cat([words, following[words[:, -1:]]], dim=1)
    chosen = torch.rand(words.shape, generator=random) < 0.2
    return {
        "input_ids": words.masked_fill(chosen, WORDS),
        "labels": words.masked_fill(~chosen, IGNORED),
    }


def main() -> None:
    parser = parser_of(str(__doc__), CONFIGS, tokens=230_000)
    parser.set_defaults(num_layers=12, hidden_size=32)
    args = parser.parse_args()

    def model_of() -> torch.nn.Module:
        wide = 2 * args.hidden_size
        return small_bert(args, WORDS + 1, LENGTH, num_attention_heads=2, intermediate_size=wide)

    held_out = sentences(64, torch.Generator().manual_seed(args.seed))
    compare(
        args,
        model_of,
        sentences,
        held_out,
        "A deep BERT with LAMB, post-LN and pre-LN",
        ("tokens", "samples", "seconds"),
    )


if __name__ == "__main__":
    main()

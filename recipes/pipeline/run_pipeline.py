"""Train a small GPT whose layers lie on different ranks, by deepspeed.pipe: embedding and head
share their weight. Each run writes its held-out losses and the parameters of a rank, and plots the
runs that are there.

    torchrun --nproc_per_node 2 run_pipeline.py
    torchrun --nproc_per_node 2 run_pipeline.py --num_stages 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import VALUES, load_text, report_beside, rows_of  # noqa: E402

import deepspeed  # noqa: E402  isort: skip
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402  isort: skip

Batch = tuple[torch.Tensor, torch.Tensor]


class Embedding(nn.Module):
    """Tokens and positions; :func:`head` uses the same weight."""

    def __init__(self, width: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(VALUES, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions[: ids.shape[1]]


def head(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.tokens.weight.T


class Block(nn.TransformerEncoderLayer):
    """A pre-LN block in which a token sees those before it."""

    def __init__(self, width: int):
        super().__init__(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], hidden.device)
        return super().forward(hidden, src_mask=mask, is_causal=True)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gpt(args: argparse.Namespace) -> PipelineModule:
    size = args.hidden_size, args.seq_length
    return PipelineModule(
        [
            TiedLayerSpec("embedding", Embedding, *size),
            *(LayerSpec(Block, args.hidden_size) for _ in range(args.num_layers)),
            LayerSpec(nn.LayerNorm, args.hidden_size),
            TiedLayerSpec("embedding", Embedding, *size, forward_fn=head),
        ],
        num_stages=args.num_stages,
        loss_fn=loss_of,
        seed_layers=True,  # the same values whatever the number of stages
        base_seed=args.seed,
        partition_method="type:block",
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed_config", type=Path, default=HERE / "pipeline.json")
    parser.add_argument("--num_stages", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int, default=100)
    parser.add_argument("--seq_length", type=int, default=64, help="bytes of a row")
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--hidden_size", type=int, default=96)
    parser.add_argument("--evaluations", type=int, default=10, help="at equal distances")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/pipeline"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    model = gpt(args)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=str(args.deepspeed_config),
    )
    stream, held_out = load_text(args.seq_length)
    micro, parts = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    ranks = deepspeed.comm.get_world_size() // args.num_stages
    reader = deepspeed.comm.get_rank() % ranks

    def micro_batches() -> Iterator[Batch]:
        """The same samples a step for any number of stages, divided among those that read."""
        for step in range(args.max_train_steps):
            random = torch.Generator().manual_seed(args.seed + step)
            rows = rows_of(stream, args.seq_length, micro * parts * ranks, random)
            for own in rows.split(micro)[reader::ranks]:
                yield own, own

    name = f"{args.num_stages} stages" if args.num_stages > 1 else "no stages"
    kept = sum(p.numel() for p in model.parameters())
    evaluated = [(rows, rows) for rows in held_out.split(micro)]
    data, found = micro_batches(), []
    every = max(1, args.max_train_steps // args.evaluations)
    for step in range(args.max_train_steps + 1):
        if step % every == 0 or step == args.max_train_steps:
            loss = float(engine.eval_batch(iter(evaluated), num_micro_batches=len(evaluated)))
            found.append({"config": name, "step": step, "loss": loss, "parameters_of_rank": kept})
            deepspeed.log_dist(f"{name}: step {step}, held-out loss {loss:.3f}", ranks=[0])
        if step < args.max_train_steps:
            engine.train_batch(data)
    if deepspeed.comm.get_rank() == 0:
        report_beside(args.output_dir, name, found, "A GPT with its layers on one rank and on two")
    engine.destroy()


if __name__ == "__main__":
    main()

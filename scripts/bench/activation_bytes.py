"""Memory of one forward and backward on a rank, beside the figure of `hf-zero estimate --seq`.

    torchrun --nproc-per-node 2 scripts/bench/activation_bytes.py --sp 2 [--cp 2] [--stage 3]
        [--out FILE]

Bytes of tensors, from torch's profiler, on CPU ranks, for each length and each way in which the
estimate counts activations. The second of two steps counts: the first allocates the state that
stays. At stage 3 the gathered blocks are added. Rows go to FILE as JSON lines.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.planning.activation_memory import length_estimate
from hf_zero.zero.layout.engine_plan import plan


def peak_of(run: Any) -> int:
    """The most bytes of tensors that ``run`` adds at once."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [
        each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"
    ]
    held = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def model_of(args: argparse.Namespace) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=max(args.lengths),
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def measured(args: argparse.Namespace, length: int, keys: Any) -> int:
    model = model_of(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": args.stage},
        "sequence_parallel_size": args.sp,
        "context_parallel_size": args.cp,
        **keys,
    }
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    ids = torch.randint(args.vocabulary, (1, length), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    parts = hf_zero.sequence_parallel() if args.sp * args.cp > 1 else None
    if parts is not None:
        batch = parts.shard(batch)

    def run() -> None:
        loss = engine(**batch).loss
        if parts is not None:
            loss = parts.mean_loss(loss, batch["labels"])
        engine.backward(loss)

    run()
    engine.step()
    peak = peak_of(run)
    engine.step()
    engine.destroy()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    hf_zero.init_distributed()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    gathered = 0
    if args.stage == 3:
        stage = hf_zero.estimate(model_of(args), ranks, "fp32", "AdamW", 3).at(3)
        gathered = stage.tiers.device - stage.state - stage.gradient_buffers
    for length in args.lengths:
        sizes = {"sequence_parallel_size": args.sp, "context_parallel_size": args.cp}
        settings = ZeroConfig.from_dict({"train_micro_batch_size_per_gpu": 1, **sizes})
        dims = ParallelDims.over(ranks, sequence=args.sp, context=args.cp)
        own = plan(model_of(args), settings, dims)
        for way in length_estimate(own, length).ways:
            row = {
                "bench": "activation_bytes",
                "when": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
                "torch": torch.__version__,
                "ranks": ranks,
                "device": "cpu",
                "hidden_size": args.hidden_size,
                "num_layers": args.num_layers,
                "vocabulary": args.vocabulary,
                "stage": args.stage,
                "sp": args.sp,
                "cp": args.cp,
                "length": length,
                "way": way.name or "as it is",
                "foreseen": way.most,
                "gathered": gathered,
                "measured": measured(args, length, way.keys),
            }
            if rank == 0:
                print(
                    f"sp {args.sp} cp {args.cp} stage {args.stage} {length:6} {row['way']:55}"
                    f"{way.most / 2**20:8.1f} + {gathered / 2**20:.1f} MiB foreseen"
                    f"{row['measured'] / 2**20:8.1f} measured",
                    flush=True,
                )
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

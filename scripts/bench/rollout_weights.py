"""Weights of a model in training for an engine that generates, at stage 3: `engine.iter_weights`
beside TRL's loop, which gathers parameter by parameter.

    python scripts/bench/rollout_weights.py --rounds 3 [--ranks 2] [--bucket 512MiB] [--out FOLDER]

A model of the shape of Qwen2.5-0.5B with made weights in bf16, on CPU ranks over gloo; rank 0
copies each tensor into memory of its own, as the engine would. A row is one transfer: collectives
and their bytes, seconds until all ranks are through, CPU seconds and growth of the peak memory of
rank 0. Both loops run in turn in each round, in the same processes. Rows with versions go to OUT as
JSON lines.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from versions import versions

SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def peak() -> int:
    """Peak memory of this process since :func:`restart_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def restart_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def by_tensor(engine: Any) -> Iterator[tuple[str, Any]]:
    """TRL's own loop, without hf-zero's seam."""
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    import hf_zero

    backend = DistributedBackend.__new__(DistributedBackend)
    backend.zero_stage, backend.fsdp_version = 3, None
    backend.gather_params = hf_zero.GatheredParameters
    sender = VLLMGeneration.__new__(VLLMGeneration)
    sender.model, sender.mode, sender._dist = engine.module, "colocate", backend
    yield from inspect.unwrap(VLLMGeneration._iter_named_params)(sender)


def by_bucket(engine: Any, bucket: str) -> Iterator[tuple[str, Any]]:
    for each in engine.iter_weights(bucket, dtype=None, rank0_only=True):
        yield from each


def transfer(
    rank: int, engine: Any, named: Iterator[tuple[str, Any]], memory: dict[str, Any]
) -> dict[str, Any]:
    import torch.distributed as dist

    stats = engine.mesh.stats
    dist.barrier()
    counts, sizes = sum(stats.counts.values()), sum(stats.bytes.values())
    before, began, cpu = restart_peak(), time.perf_counter(), time.process_time()
    tensors = 0
    for name, value in named:
        if rank == 0:
            memory[name].copy_(value)
            tensors += 1
    dist.barrier()
    return {
        "seconds": round(time.perf_counter() - began, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "collectives": sum(stats.counts.values()) - counts,
        "bytes": sum(stats.bytes.values()) - sizes,
        "peak_growth": peak() - before,
        "tensors": tensors,
    }


def on_rank(rank: int, world: int, port: int, rounds: int, bucket: str, out: str) -> None:
    import torch
    import torch.distributed as dist
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import hf_zero

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(world), LOCAL_RANK=str(rank))  # fmt: skip
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with hf_zero.Init():
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    torch.set_default_dtype(torch.float32)
    config = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
    }
    engine = hf_zero.initialize(model=model, config=config)[0]
    empty = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    memory = {name: each.zero_() for name, each in empty.items()} if rank == 0 else {}
    ways: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
        "TRL, tensor by tensor": lambda: by_tensor(engine),
        f"iter_weights, {bucket}": lambda: by_bucket(engine, bucket),
    }
    sums: dict[str, float] = {}
    for number in range(rounds):
        for way, named in ways.items():
            row = transfer(rank, engine, named(), memory)
            if rank == 0:
                total = sum(float(each.double().sum()) for each in memory.values())
                assert sums.setdefault("first", total) == total, "other weights came"
                assert row["tensors"] == len(memory)
                with open(out, "a", encoding="utf-8") as file:
                    file.write(
                        json.dumps({"round": number, "way": way, "ranks": world, **row}) + "\n"
                    )
                print(way, row, flush=True)
                for each in memory.values():
                    each.zero_()
    dist.destroy_process_group()


def main() -> None:
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket", default="512MiB")
    parser.add_argument("--out", type=Path, default=Path("scripts/bench/results"))
    given = parser.parse_args()
    args = given
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / f"rollout_weights-{datetime.date.today()}.jsonl"
    head = {
        "versions": versions("torch", "transformers", "trl"),
        "shape": SHAPE,
        "bucket": args.bucket,
    }
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(head) + "\n")
    port = TCPStore("127.0.0.1", 0, is_master=True).port  # free by now
    mp.spawn(on_rank, (args.ranks, port, args.rounds, args.bucket, str(out)), args.ranks)


if __name__ == "__main__":
    main()

"""Memory and time of a training step with activations kept, recomputed, or in host memory; each way
in a fresh process.

    python scripts/bench/activations.py [--rounds 3] [--ways none,blocks] [--compile] [--out
    scripts/bench/results]

The work is a Llama of transformers in bf16 with AdamW at stage 2 on one rank: on a GPU of 1.2B
parameters with 4 x 2048 tokens, on the CPU of 38M with 8 x 128. Gradients of every way are compared
with those of "none" before anything is measured. ``peak`` is the most memory of tensors during
forward and backward, above what lies there before: the allocator's count on a GPU, on the CPU the
sum of the profiler's allocations. ``step`` is the median of the best round. On the CPU nothing can
leave the device, and those ways are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}
LARGE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
BATCH = {"cpu": (8, 128), "cuda": (4, 2048)}
CHECKED = 2  # layers of the model whose gradients are compared
TOLERANCE = 1e-2  # of the norm: bf16 kernels of a GPU may add up in another order
CHECKPOINTING, OFFLOAD = "activation_checkpointing", "activation_offload"
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks": {CHECKPOINTING: {"blocks": True}},
    "half of the blocks": {CHECKPOINTING: {"blocks": "half"}},
    "selective": {CHECKPOINTING: {"blocks": "selective"}},
    "blocks, inputs on host": {CHECKPOINTING: {"blocks": True, "cpu_checkpointing": True}},
    "selective, rest on host": {CHECKPOINTING: {"blocks": "selective"}, OFFLOAD: True},
    "all on host": {OFFLOAD: True},
}


def config_of(way: str, layers: int, rows: int) -> dict[str, Any]:
    config = json.loads(json.dumps(WAYS[way]))
    if config.get(CHECKPOINTING, {}).get("blocks") == "half":
        config[CHECKPOINTING]["blocks"] = layers // 2
    return {
        "train_micro_batch_size_per_gpu": rows,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        **config,
    }


def engine_of(way: str, shape: dict[str, int], rows: int, length: int) -> Any:
    import torch
    import transformers

    import hf_zero

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, max_position_embeddings=length, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return hf_zero.initialize(
        model=model, optimizer=optimizer, config=config_of(way, shape["num_hidden_layers"], rows)
    )[0]


def gradients(way: str, shape: dict[str, int], device: str) -> list[Any]:
    import torch

    import hf_zero

    engine = engine_of(way, {**shape, "num_hidden_layers": CHECKED}, 2, 64)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape["vocab_size"], (2, 64), generator=generator).to(device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    found = [hf_zero.safe_get_full_grad(p).float().clone() for p in engine.module.parameters()]
    engine.destroy()
    return found


def apart(got: list[Any], want: list[Any]) -> float:
    return max(
        float((a - b).norm() / b.norm().clamp(min=1e-20)) for a, b in zip(got, want, strict=True)
    )


def profiled_peak(run: Any) -> int:
    """The most bytes of tensors that ``run`` holds at once on the CPU."""
    import torch

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = most = 0
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(way: str, steps: int, compiled: bool) -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, (rows, length) = (LARGE if device == "cuda" else SMALL), BATCH[device]
    error = apart(gradients(way, shape, device), gradients("none", shape, device))
    if not error <= TOLERANCE:
        raise SystemExit(f"{way}: gradients are off by {error:.2e} of their norm")
    engine = engine_of(way, shape, rows, length)
    engine.train()
    if compiled:
        engine.compile()
    ids = torch.randint(0, shape["vocab_size"], (rows, length), device=device)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def pass_() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)

    seconds, peak = [], 0
    for step in range(steps + 2):
        wait()
        start = time.perf_counter()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            pass_()
            wait()
            peak = torch.cuda.max_memory_allocated() - before
        elif step == 1:
            peak = profiled_peak(pass_)
        else:
            pass_()
        engine.step()
        wait()
        if step > 1:
            seconds.append(time.perf_counter() - start)
    offload = engine.feature_set.by_name["activations"].activations.offload
    row = {
        "way": way,
        "compiled": compiled,
        "step": statistics.median(seconds),
        "peak": peak,
        "host": offload.slabs.nbytes if offload is not None else 0,
        "gradient_error": error,
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "tokens": rows * length,
        "shape": shape,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    engine.destroy()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--ways",
        default=",".join(WAYS).replace(", ", "; "),
        help="separated by commas; a comma in a name is written as ;",
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.steps, arguments.compile)))
        return

    import torch

    ways = [way.strip().replace("; ", ", ") for way in arguments.ways.split(",")]
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        parser.error(f"unknown ways {unknown}; choose among {list(WAYS)}")
    if not torch.cuda.is_available():
        ways = [way for way in ways if "host" not in way]
    best: dict[str, dict[str, Any]] = {}
    for _ in range(arguments.rounds):
        for way in ways:
            command = [
                sys.executable,
                __file__,
                "--one",
                way,
                "--steps",
                str(arguments.steps),
                *(["--compile"] if arguments.compile else []),
            ]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=os.environ | {"HF_ZERO_LOG_LEVEL": "WARNING"},
            )
            if done.returncode:
                print(f"{way}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
                continue
            row = json.loads(done.stdout.strip().splitlines()[-1])
            if way not in best or row["step"] < best[way]["step"]:
                best[way] = row
    for way, row in best.items():
        print(
            f"{way:26}  step {row['step'] * 1e3:9.1f} ms   peak {row['peak'] / 2**20:9.1f} MiB   "
            f"host {row['host'] / 2**20:9.1f} MiB"
        )
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        kind = "gpu" if torch.cuda.is_available() else "cpu"
        (
            arguments.out / f"activations_{kind}{'_compiled' if arguments.compile else ''}.json"
        ).write_text(json.dumps(list(best.values()), indent=1) + "\n")


if __name__ == "__main__":
    main()

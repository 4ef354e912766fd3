"""Whole training steps on one GPU: plain Hugging Face, torch.compile, Liger, FSDP2, DeepSpeed and
hf-zero, each in a process of its own.

    python scripts/bench/train_gpu.py --work bert-large,256,128 --of hf,hf-compile,ds1,hfz1+all
    --rounds 2 [--budget 500] [--out scripts/bench/results] python scripts/bench/train_gpu.py --work
    tiny-llama,2,64 --of hf,hfz1+all,hfz3+all --device cpu          # does it run?

A contender's figure is the median of STEPS steps after WARM_UP, best of the rounds; rounds are
interleaved. Weights are random, tokens too; bf16, AdamW, clipping 1.0. `hf` trains fp32 weights
under autocast, as the Trainer does; `-compile` compiles the model, of FSDP2 each layer, `hf-float8`
has torchao's float8 in layers that are compiled one by one, and `fsdp2-liger` the kernels of Liger,
`fsdp2-liger-compile` both. `hfzN` is stage N; `+all` asks for `kernels: auto` and `compile:
blocks`, `+kernels` and `+compile` for one of them; what else stands behind a `+` is in EXTRAS.
Liger is taken if it is installed, DeepSpeed from the folder that is given. `first_step_s` is from
the built model, before `initialize`, to the end of its first step. With `--profile` a row says
where further steps go (step_breakdown.py). Rows go to OUT as JSON lines, with versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from step_breakdown import Breakdown, break_down, read, table
from versions import versions

WARM_UP, STEPS, MASKED, LEARNING_RATE = 5, 10, 0.15, 1e-5
OFFLOADED_WARM_UP, OFFLOADED_STEPS = 2, 5
PROFILED = 3  # steps in a trace
EIGHT_BITS = {"type": "AdamW8bit", "params": {"lr": LEARNING_RATE}}
ON_CPU = {"device": "cpu", "pin_memory": True}
EXTRAS: dict[str, dict[str, Any]] = {
    "kernels": {"kernels": "auto"},
    "compile": {"compile": "blocks"},
    "all": {"kernels": "auto", "compile": "blocks"},
    "capture": {"compile": {"blocks": True, "capture": "step"}},  # after "all"
    "flash": {"attention_backend": "flash"},
    "cudnn": {"attention_backend": "cudnn"},
    "ckpt": {"activation_checkpointing": {"blocks": True}},
    "selective": {"activation_checkpointing": {"blocks": "selective"}},
    "activations": {"activation_offload": True},
    "offload": {"zero_optimization": {"offload_optimizer": ON_CPU}},
    # four fifths of the optimizer on the CPU
    "most": {"zero_optimization": {"offload_optimizer": {**ON_CPU, "ratio": 0.8}}},
    "8bit": {"optimizer": EIGHT_BITS},
    "float8": {"float8_training": {"recipe": "tensorwise"}},
    "float8gather": {"float8_training": {"recipe": "tensorwise", "gather_weights": True}},
    # weights, gradients and their masters in 2 bytes each, moments in 2 bytes together
    "16bit": {
        "optimizer": EIGHT_BITS,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    },
}
LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "use_cache": False,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-large": ("bert", {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096}),
    "tiny-bert": ("bert", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 1000}),
    "llama-1b": ("llama", dict(
        LLAMA, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=8192,
        tie_word_embeddings=True,
    )),
    "llama-3b": ("llama", dict(
        LLAMA, hidden_size=3072, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, intermediate_size=8192,
        tie_word_embeddings=True,
    )),
    "llama-8b": ("llama", dict(
        LLAMA, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336,
        tie_word_embeddings=False,
    )),
    "tiny-llama": ("llama", {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
        "tie_word_embeddings": True, "use_cache": False,
    }),
}  # fmt: skip
VERSIONS = ("torch", "triton", "transformers", "torchao", "liger_kernel", "deepspeed")


def build(shape: str, device: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    family, settings = SHAPES[shape]
    made = {"bert": transformers.BertConfig, "llama": transformers.LlamaConfig}[family](**settings)
    made._attn_implementation = "sdpa"
    with torch.device(device):
        return {"bert": transformers.BertForMaskedLM, "llama": transformers.LlamaForCausalLM}[
            family
        ](made).train()


def flops_per_token(model: Any, length: int) -> float:
    """Return the FLOPs per token of a forward and a backward. A tied embedding counts once, as the
    head's product; causal attention counts half.
    """
    settings, embedding = model.config, model.get_input_embeddings().weight
    weights = sum(p.numel() for p in model.parameters()) - (
        0 if settings.tie_word_embeddings else embedding.numel()
    )
    causal = settings.model_type == "llama"
    return 6 * weights + 12 * settings.num_hidden_layers * settings.hidden_size * length * (
        0.5 if causal else 1.0
    )


def batch_of(model: Any, rows: int, length: int, device: str) -> dict[str, Any]:
    import torch

    ids = torch.randint(5, model.config.vocab_size, (rows, length), device=device)
    if model.config.model_type == "llama":
        return {"input_ids": ids, "labels": ids}
    labels = ids.masked_fill(torch.rand(rows, length, device=device) > MASKED, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def in_float8(model: Any, device: str) -> None:
    """Convert the linear layers of ``model``'s layers by torchao, and compile each layer."""
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_inside(module: Any, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and ".layer" in name

    recipe = Float8LinearConfig(emulate=device == "cpu")
    convert_to_float8_training(model, config=recipe, module_filter_fn=is_inside)
    for layer in layers_of(model) if device != "cpu" else ():
        layer.compile()


def layers_of(model: Any) -> Any:
    return model.model.layers if model.config.model_type == "llama" else model.bert.encoder.layer


def plain(model: Any, batch: dict[str, Any], device: str, compiled: bool) -> Callable[[], Any]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    forward = torch.compile(model) if compiled else model

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def sharded(model: Any, batch: dict[str, Any], device: str, compiled: bool) -> Callable[[], Any]:
    """FSDP2, each layer and the rest a unit, bf16 for compute and fp32 for the weights; compiled,
    each layer by itself.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    how = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for layer in layers_of(model):
        if compiled:
            layer.compile()
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> Any:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def engine_of(
    library: Any, model: Any, batch: dict[str, Any], stage: int, more: dict[str, Any]
) -> Callable[[], Any]:
    zero = {"stage": stage, **more.get("zero_optimization", {})}
    config = {
        "train_micro_batch_size_per_gpu": len(batch["input_ids"]),
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "steps_per_print": 10**9,
        **more,
        "zero_optimization": zero,
    }
    engine = library.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )[0]

    def step() -> Any:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def asked_by(kind: str) -> dict[str, Any]:
    """Return the configuration that the extras of ``kind`` ask for."""
    asked: dict[str, Any] = {}
    for extra in kind.split("+")[1:]:
        asked |= EXTRAS[extra]
    return asked


def contender(
    kind: str, shape: str, rows: int, length: int, device: str
) -> tuple[Any, Callable[[], Callable[[], Any]]]:
    """Return the model of ``kind``, and the call that prepares its training and returns a step."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    if "liger" in kind:
        import liger_kernel.transformers as liger

        {"bert": lambda: None, "llama": liger.apply_liger_kernel_to_llama}[SHAPES[shape][0]]()
    if kind.startswith("ds"):
        import deepspeed

        # DeepSpeed casts a model it is given; an equal start
        torch.set_default_dtype(torch.bfloat16)
        model = build(shape, device)
        torch.set_default_dtype(torch.float32)
        batch = batch_of(model, rows, length, device)
        return model, partial(engine_of, deepspeed, model, batch, int(kind[2]), asked_by(kind))
    model = build(shape, device)
    batch = batch_of(model, rows, length, device)
    if kind.startswith("hfz"):
        import hf_zero

        return model, partial(engine_of, hf_zero, model, batch, int(kind[3]), asked_by(kind))
    if kind.startswith("fsdp2"):
        return model, partial(sharded, model, batch, device, compiled="compile" in kind)
    if "float8" in kind:
        in_float8(model, device)
    return model, partial(plain, model, batch, device, compiled="compile" in kind)


def profiled(step: Callable[[], Any], wait: Callable[[], None], on_gpu: bool) -> Breakdown:
    """Return where the time of some steps goes."""
    from torch.profiler import ProfilerActivity, profile

    chosen = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=chosen) as seen:
        for _ in range(PROFILED):
            step()
        wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        return break_down(read(file), PROFILED)


def measure(
    kind: str, shape: str, rows: int, length: int, device: str, profile: bool
) -> dict[str, Any]:
    import torch

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    begun = time.perf_counter()
    model, start = contender(kind, shape, rows, length, device)
    flops = flops_per_token(model, length)
    built = time.perf_counter()
    step = start()
    started = time.perf_counter() - begun
    offloaded = bool({"offload", "most"} & {*kind.split("+")})
    warm_up, steps = (OFFLOADED_WARM_UP, OFFLOADED_STEPS) if offloaded else (WARM_UP, STEPS)
    loss = step()
    wait()
    first = time.perf_counter() - built
    for _ in range(warm_up - 1):
        loss = step()
    wait()
    warm = time.perf_counter() - begun - started
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, host, cpu = [], [], time.process_time()
    for _ in range(steps):
        begun = time.perf_counter()
        loss = step()
        host.append(time.perf_counter() - begun)
        wait()
        times.append(time.perf_counter() - begun)
    cpu = (time.process_time() - cpu) / steps
    taken = statistics.median(times)
    row = {
        "kind": kind, "shape": shape, "rows": rows, "length": length, "step_s": taken,
        "least_s": min(times), "most_s": max(times), "host_s": statistics.median(host),
        "tokens_s": rows * length / taken, "tflops": rows * length * flops / taken / 1e12,
        "steps": warm_up + steps, "loss": float(loss.detach()), "cpu_s": cpu,
        "start_s": started, "first_step_s": first, "warm_up_s": warm,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
    }  # fmt: skip
    if profile:
        found = profiled(step, wait, on_gpu)
        print(table(found, names=40))
        row["breakdown"] = [*found.rows(), *found.rest(15)]
    return row


def environment(kind: str, deepspeed: str | None) -> dict[str, str]:
    """Beside hf-zero an installed DeepSpeed would be hidden by it, so it has a folder, and a
    process, of its own.
    """
    if not kind.startswith("ds") or deepspeed is None:
        return {**os.environ}
    paths = [deepspeed, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "HF_ZERO_AUTOLOAD": "0", "PYTHONPATH": os.pathsep.join(paths)}


def run_one(
    kind: str, work: str, device: str, profile: bool, limit: float, deepspeed: str | None
) -> dict[str, Any] | None:
    command = [
        sys.executable,
        __file__,
        "--one",
        kind,
        "--work",
        work,
        "--device",
        device,
        *(["--profile"] if profile else []),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=environment(kind, deepspeed)
        )
    except subprocess.TimeoutExpired:
        print(f"{kind} {work}: no figure within {limit:.0f} s", flush=True)
        return None
    lines = done.stdout.splitlines()
    found = [json.loads(line.removeprefix("ROW ")) for line in lines if line.startswith("ROW ")]
    if profile:
        print("\n".join(line for line in lines if not line.startswith("ROW ")), flush=True)
    if not found:
        print(f"{kind} {work}: failed\n{(done.stderr or done.stdout)[-3000:]}", flush=True)
        return None
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        nargs="+",
        default=["bert-large,256,128", "bert-large,64,512", "llama-1b,4,4096"],
        help="SHAPE,ROWS,LENGTH",
    )
    parser.add_argument(
        "--of", default="hf,hf-compile,liger,ds1,ds3,hfz1,hfz1+compile,hfz1+all,hfz3+all"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--budget",
        type=float,
        default=3600.0,
        help="seconds for the whole run; what does not fit is said",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--deepspeed",
        metavar="FOLDER",
        help="what `pip install --target FOLDER --no-deps deepspeed hjson …` made",
    )
    parser.add_argument(
        "--profile", action="store_true", help="print a profile of one step of each"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        shape, rows, length = chosen.work[0].split(",")
        print(
            "ROW "
            + json.dumps(
                measure(chosen.one, shape, int(rows), int(length), chosen.device, chosen.profile)
            ),
            flush=True,
        )
        return
    begun, best, facts = (
        time.perf_counter(),
        {},
        {"at": datetime.datetime.now().isoformat(timespec="seconds"), **versions(*VERSIONS)},
    )
    for number in range(chosen.rounds):
        for work in chosen.work:
            for kind in chosen.of.split(","):
                if (kind == "liger" and "llama" not in work) or (
                    kind.startswith("ds") and chosen.deepspeed is None
                ):
                    continue
                left = chosen.budget - (time.perf_counter() - begun)
                if left < 15:
                    print(f"{kind} {work}: left out, no time", flush=True)
                    continue
                row = run_one(
                    kind,
                    work,
                    chosen.device,
                    chosen.profile and number == 0,
                    left,
                    chosen.deepspeed,
                )
                if row is None:
                    continue
                if chosen.out:
                    chosen.out.mkdir(parents=True, exist_ok=True)
                    with (chosen.out / "train_gpu.jsonl").open("a") as file:
                        file.write(json.dumps({**row, "round": number, **facts}) + "\n")
                if (work, kind) not in best or row["step_s"] < best[work, kind]["step_s"]:
                    best[work, kind] = row
                print(f"{kind:14} {work:20} {row['step_s']:.4f} s  host {row['host_s']:.4f}  "
                      f"{row['tflops']:.0f} TFLOP/s  "
                      f"{row['peak_gib'] or 0:.1f} GiB  start {row['start_s']:.0f} s  warm "
                      f"{row['warm_up_s']:.0f} s  loss {row['loss']:.3f}", flush=True)  # fmt: skip
    print(
        "\n| work | contender | step s | over the best peer | TFLOP/s | peak GiB |\n| --- | --- | "
        "--- | --- | --- | --- |"
    )
    for (work, kind), row in best.items():
        peers = [
            other["step_s"]
            for (at, who), other in best.items()
            if at == work and not who.startswith("hfz")
        ]
        over = f"{row['step_s'] / min(peers):.3f}" if peers else "-"
        print(
            f"| {work} | {kind} | {row['step_s']:.4f} | {over} | {row['tflops']:.0f} | "
            f"{row['peak_gib'] or 0:.1f} |"
        )


if __name__ == "__main__":
    main()

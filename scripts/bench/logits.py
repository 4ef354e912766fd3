"""Time and peak memory of a training step in which logits are a large tensor, with and without the
kernel ``loss``.

    python scripts/bench/logits.py [--shape llama] [--rounds 3] [--threads 1] [--out FILE]

``llama``: two layers, hidden 512, a vocabulary of 248,000, 2,048 tokens, plain SGD. ``bert``: eight
layers, hidden 512, a vocabulary of 30,522, 8 × 128 tokens of which 15% are masked, AdamW. ``gpt2``:
two layers, hidden 768, a vocabulary of 50,257, 4 × 512 tokens, AdamW. fp32, on the CPU; the
optimizer is the same in each way.

Each way has a process of its own. A round runs one step of each, one after the other, so that other
work on the machine slows all of them; figures are medians of the rounds, and of each round's ratio
to plain. ``cpu`` is CPU time, which threads that wait for each other inflate on a busy machine: use
``--threads 1`` there. ``peak`` is resident memory over what was there before forward and backward,
from VmHWM of Linux. A first step, whose losses must agree, is not counted. "chunks by hand" is
torch alone: a script that checkpoints the head and the loss of each stretch of tokens. "compiled"
is torch.compile of the model. "liger" is the fused linear cross-entropy of Liger, whose kernels
need a GPU. Rows go to FILE as JSON lines.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WAYS = ("plain", "hf_zero", "chunks by hand", "compiled", "liger")
STRETCH = 64  # tokens of a chunk by hand
# rows, tokens of a row, vocabulary
SHAPES = {"llama": (1, 2048, 248_000), "bert": (8, 128, 30_522), "gpt2": (4, 512, 50_257)}


def model_of(args: argparse.Namespace) -> Any:
    import transformers

    torch.manual_seed(0)
    if args.shape == "bert":
        bert = transformers.BertConfig(
            hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048,
            vocab_size=args.vocabulary, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.BertForMaskedLM(bert).train()
    if args.shape == "gpt2":
        gpt2 = transformers.GPT2Config(
            vocab_size=args.vocabulary, n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(gpt2).train()
    llama = transformers.LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=512, intermediate_size=2048, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=args.tokens,
        use_cache=False, tie_word_embeddings=args.tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(llama).train()


def batch_of(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (SHAPES[args.shape][0], args.tokens)
    ids = torch.randint(5, args.vocabulary, shape, generator=generator)
    if args.shape == "bert":
        return ids, ids.where(torch.rand(shape, generator=generator) < 0.15, -100)
    return ids, ids


def rows_of_head(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """Return hidden states and labels of the rows whose logits the loss reads, as a script does."""
    hidden = model.base_model(input_ids=ids).last_hidden_state
    if hasattr(model, "cls"):
        rows = labels != -100
        return model.cls.predictions.transform(hidden[rows]), labels[rows]
    return hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def by_hand(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    head = model.get_output_embeddings()

    def summed(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(rows), labels, reduction="sum")

    hidden, labels = rows_of_head(model, ids, labels)
    parts = zip(hidden.split(STRETCH), labels.split(STRETCH))
    return sum(checkpoint(summed, *part, use_reentrant=False) for part in parts) / len(labels)  # type: ignore[return-value]


def by_liger(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    head = model.get_output_embeddings()
    hidden, labels = rows_of_head(model, ids, labels)
    return LigerFusedLinearCrossEntropyLoss()(head.weight, hidden, labels, head.bias)


def loss_of(args: argparse.Namespace, model: Any) -> Callable[..., torch.Tensor]:
    if args.way in ("chunks by hand", "liger"):
        way = by_hand if args.way == "chunks by hand" else by_liger
        return lambda ids, labels: way(model, ids, labels)
    if args.way == "hf_zero":
        import hf_zero

        hf_zero.optimize(model, ["loss"])
    called = torch.compile(model) if args.way == "compiled" else model
    return lambda ids, labels: called(input_ids=ids, labels=labels).loss  # type: ignore[no-any-return]


def resident(name: str) -> int:
    """Return a field of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def work(args: argparse.Namespace) -> None:
    """Print a step's time, peak and loss for each line of standard input."""
    torch.set_num_threads(args.threads)
    model = model_of(args)
    ids, labels = batch_of(args)
    loss_function = loss_of(args, model)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=1e-3)
        if args.shape == "llama"
        else torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    )
    for _ in sys.stdin:
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        start, cpu = time.perf_counter(), time.process_time()
        loss = loss_function(ids, labels)
        loss.backward()
        peak = resident("VmHWM") - before
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        row = {"seconds": seconds, "cpu": time.process_time() - cpu, "peak": peak}
        row["loss"] = float(loss.detach())
        print(json.dumps(row), flush=True)


def missing(way: str) -> str:
    """Return why ``way`` cannot run here, or ""."""
    if way != "liger":
        return ""
    if not torch.cuda.is_available():
        return "its Triton kernels need a GPU"
    return "" if importlib.util.find_spec("liger_kernel") else "liger_kernel is not installed"


def interleaved(
    workers: dict[str, subprocess.Popen[str]], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the steps of each way; the first is not among them."""
    steps: dict[str, list[dict[str, Any]]] = {way: [] for way in workers}
    first: dict[str, Any] = {}
    for number in range(rounds + 1):
        for way, worker in workers.items():
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write("step\n")
            worker.stdin.flush()
            row = json.loads(worker.stdout.readline())
            if number:
                steps[way].append(row)
                continue
            first = first or row
            if abs(row["loss"] - first["loss"]) > 1e-4 * first["loss"]:
                raise SystemExit(f"{way} has the loss {row['loss']}, not {first['loss']}")
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--vocabulary", type=int, help="in place of the shape's")
    parser.add_argument("--tokens", type=int, help="of a row, in place of the shape's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tied", action="store_true", help="for llama; the others are")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--ways", default=",".join(WAYS), help="separated by commas, plain first")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    _, tokens, vocabulary = SHAPES[args.shape]
    args.tokens, args.vocabulary = args.tokens or tokens, args.vocabulary or vocabulary
    if args.way:
        work(args)
        return
    ways = args.ways.split(",")
    left_out = {way: missing(way) for way in ways if missing(way)}
    workers = {
        way: subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--way", way],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for way in ways if way not in left_out
    }  # fmt: skip
    try:
        steps = interleaved(workers, args.rounds)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    rows = []
    for way, measured in steps.items():
        row: dict[str, Any] = {"way": way, "shape": args.shape, "rounds": args.rounds}
        for key in ("seconds", "cpu", "peak"):
            plain = [step[key] for step in steps["plain"]]
            own = [step[key] for step in measured]
            row[key] = statistics.median(own)
            row[f"{key}_of_plain"] = statistics.median(a / b for a, b in zip(own, plain))
        row |= {"vocabulary": args.vocabulary, "tokens": args.tokens, "tied": args.tied}
        row |= {"threads": args.threads, "torch": torch.__version__}
        rows.append(row)
        print(
            f"{way:16} {row['seconds']:8.2f} s ({row['seconds_of_plain']:.2f} ×)  "
            f"{row['cpu']:8.2f} s of CPU ({row['cpu_of_plain']:.2f} ×)  "
            f"{row['peak'] / 2**20:9.0f} MiB ({row['peak_of_plain']:.2f} ×)"
        )
    for way, reason in left_out.items():
        rows.append({"way": way, "shape": args.shape, "not_run": reason})
        print(f"{way:16} not run: {reason}")
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()

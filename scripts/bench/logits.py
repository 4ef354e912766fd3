"""Time and peak memory of a training step in which logits are the largest tensor, with and without
the kernel ``loss``.

    python scripts/bench/logits.py [--vocabulary 248000] [--tokens 2048] [--rounds 3] [--out FILE]

A Llama of two layers, fp32, plain SGD, on the CPU. Each way runs in a process of its own and checks
its loss against the others'. ``peak`` is resident memory over what was there before the step, from
VmHWM of Linux. "chunks by hand" is torch alone: a script that checkpoints the head and the loss of
each stretch of tokens. Rows go to FILE as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WAYS = ("plain", "hf_zero", "chunks by hand", "compiled")
STRETCH = 64  # tokens of a chunk by hand


def model_of(args: argparse.Namespace) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=512, intermediate_size=2048, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=args.tokens,
        use_cache=False, tie_word_embeddings=args.tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def by_hand(model: Any, ids: torch.Tensor) -> torch.Tensor:
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)

    def summed(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(rows), labels, reduction="sum")

    labels = ids[:, 1:].flatten()
    parts = zip(hidden.split(STRETCH), labels.split(STRETCH))
    return sum(checkpoint(summed, *part, use_reentrant=False) for part in parts) / len(labels)  # type: ignore[return-value]


def resident(name: str) -> int:
    """Return a field of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = model_of(args)
    ids = torch.randint(0, args.vocabulary, (1, args.tokens))
    if args.way == "hf_zero":
        import hf_zero

        hf_zero.optimize(model, ["loss"])
    called = torch.compile(model) if args.way == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds, peaks, loss = [], [], torch.zeros(())
    for _ in range(args.rounds):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        start = time.perf_counter()
        if args.way == "chunks by hand":
            loss = by_hand(model, ids)
        else:
            loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
        peaks.append(resident("VmHWM") - before)
    return {
        "way": args.way, "vocabulary": args.vocabulary, "tokens": args.tokens, "tied": args.tied,
        "threads": torch.get_num_threads(), "seconds": min(seconds), "peak": max(peaks),
        "loss": float(loss.detach()), "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=248_000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--ways", default=",".join(WAYS), help="separated by commas")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return
    rows = []
    for way in args.ways.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(made.stdout.splitlines()[-1]))
        if abs(rows[-1]["loss"] - rows[0]["loss"]) > 1e-4 * rows[0]["loss"]:
            raise SystemExit(f"{way} has the loss {rows[-1]['loss']}, not {rows[0]['loss']}")
        ratio = [rows[-1][key] / rows[0][key] for key in ("seconds", "peak")]
        print(
            f"{way:16} {rows[-1]['seconds']:8.2f} s ({ratio[0]:.2f} ×)  "
            f"{rows[-1]['peak'] / 2**20:9.0f} MiB ({ratio[1]:.2f} ×)",
            flush=True,
        )
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()

"""Whole training steps on a CPU with and without fused heads: BERT's masked language model and
GPT-2's shape, interleaved in one run.

    python scripts/bench/heads_cpu.py --rounds 7 [--threads 2] [--out scripts/bench/results]

BERT: 8 layers, hidden 512, vocabulary 30,522, 8 x 128 tokens, 15% of them masked. GPT-2: hidden
768, vocabulary 50,257, 4 x 512 tokens, as many layers as --gpt2-layers says (2: with 12 their
activations are most of the memory, and the head changes nothing about those). fp32, AdamW, clipping
1.0. "plain" is transformers with torch's AdamW as it comes, "plain-fused-adamw" with fused=True,
"ours" has the fused head and fused=True. Every round runs a few steps of every contender, one after
the other, each in a process of its own; a contender's figure is the best round's median. Peak
memory is that of forward and backward above what the process held with the model built, so
gradients count and optimizer states do not; it is measured in processes of its own. First all are
checked to give the same loss and gradients. Raw rows with versions go to OUT as JSON lines.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = ("bert", "gpt2")
KINDS = ("plain", "plain-fused-adamw", "ours")
BARS = {"bert": (0.68, None), "gpt2": (1.0, 0.5)}


def build(case: str, layers: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    if case == "bert":
        config = transformers.BertConfig(
            hidden_size=512, num_hidden_layers=layers, num_attention_heads=8,
            intermediate_size=2048, vocab_size=30_522,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config).train()
    config = transformers.GPT2Config(
        n_layer=layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).train()


def batches(case: str, count: int = 4) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        shape, vocabulary = ((8, 128), 30_522) if case == "bert" else ((4, 512), 50_257)
        ids = torch.randint(5, vocabulary, shape, generator=generator)
        labels = (
            ids.where(torch.rand(shape, generator=generator) < 0.15, -100)
            if case == "bert"
            else ids
        )
        made.append({"input_ids": ids, "labels": labels})
    return made


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process in memory now, or (VmHWM) at most since :func:`forget_peak`."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def work(case: str, kind: str, threads: int, layers: int) -> None:
    """One contender: answers "step N", "memory" and "check" from standard input on standard
    output.
    """
    import torch

    torch.set_num_threads(threads)
    model = build(case, layers)
    if kind == "ours":
        from hf_zero.integrations.fused.heads import fuse_head

        fused = fuse_head(model)
        assert not isinstance(fused, str), fused
    given = batches(case)
    weights = resident()
    optimizer: Any = None
    done = 0
    print("@ready", flush=True)
    for line in sys.stdin:
        task, count = line.split()
        answer: dict[str, Any] = {}
        if task == "step":
            optimizer = optimizer or torch.optim.AdamW(
                model.parameters(), lr=1e-4, fused=True if kind != "plain" else None
            )
            times, cpu = [], []
            for _ in range(int(count)):
                started, used = time.perf_counter(), time.process_time()
                loss = model(**given[done % 4]).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                times.append(time.perf_counter() - started)
                cpu.append(time.process_time() - used)
                done += 1
            answer = {"times": times, "cpu": cpu, "loss": float(loss.detach())}
        elif task == "memory":
            peaks = []
            for number in range(int(count)):
                forget_peak()
                model(**given[number % 4]).loss.backward()
                peaks.append(resident("VmHWM") - weights)
                model.zero_grad()
            answer = {
                "bytes": max(peaks),
                "weights": sum(each.nbytes for each in model.parameters()),
            }
        elif task == "check":
            loss = model(**given[0]).loss
            loss.backward()
            norms = [
                float(each.grad.double().norm())
                for each in model.parameters()
                if each.grad is not None
            ]
            answer = {"loss": float(loss.detach()), "norms": norms}
            model.zero_grad()
        print("@" + json.dumps(answer), flush=True)


class Contender:
    def __init__(self, case: str, kind: str, threads: int, layers: int):
        self.case, self.kind = case, kind
        env = dict(
            os.environ,
            OMP_NUM_THREADS=str(threads),
            HF_HUB_OFFLINE="1",
            TRANSFORMERS_VERBOSITY="error",
            TRITON_INTERPRET="0",
        )
        command = [sys.executable, __file__, "--work", case, kind, str(threads), str(layers)]
        self.process: Any = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def _answer(self) -> str:
        for line in self.process.stdout:
            if line.startswith("@"):
                return line[1:]
        raise SystemExit(
            f"{self.kind} of {self.case} ended with code {self.process.wait()}; "
            "its error stands above"
        )

    def ask(self, task: str, count: int) -> dict[str, Any]:
        self.process.stdin.write(f"{task} {count}\n")
        self.process.stdin.flush()
        return json.loads(self._answer())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def agree(answers: dict[str, dict[str, Any]]) -> None:
    """Ends the run where a contender's loss or a gradient's norm is not that of plain
    transformers.
    """
    plain = answers["plain"]
    largest = max(plain["norms"])
    for kind, answer in answers.items():
        pairs = list(zip([answer["loss"], *answer["norms"]], [plain["loss"], *plain["norms"]]))
        if len(answer["norms"]) != len(plain["norms"]) or any(
            abs(one - other) > 1e-4 * abs(other) + 1e-6 * largest for one, other in pairs
        ):
            raise SystemExit(f"{kind} does not compute what plain transformers does: {pairs[:3]} …")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of each contender in a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--gpt2-layers", type=int, default=2)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        case, kind, threads, layers = options.work
        return work(case, kind, int(threads), int(layers))

    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in ("torch",
        "transformers")} | {"python": platform.python_version()},
        "cores": os.cpu_count(), "threads": options.threads, "gpt2_layers": options.gpt2_layers,
    }  # fmt: skip
    print(
        f"{'case':6}{'kind':20}{'best s/step':>12}{'median':>9}{'vs plain':>9}"
        f"{'CPU s':>9}{'vs plain':>9}{'MB above':>10}{'vs plain':>9}"
    )
    for case in options.only.split(","):
        layers = 8 if case == "bert" else options.gpt2_layers
        peaks: dict[str, int] = {}
        checks = {}
        for kind in KINDS:  # memory in processes that have done nothing else
            one = Contender(case, kind, options.threads, layers)
            peaks[kind] = one.ask("memory", 3)["bytes"]
            checks[kind] = one.ask("check", 1)
            one.close()
        agree(checks)
        contenders = [Contender(case, kind, options.threads, layers) for kind in KINDS]
        for number in range(options.rounds + 1):  # round 0 warms up
            for place in range(len(contenders)):
                # so that none always follows the same one
                one = contenders[(place + number) % len(contenders)]
                answer = one.ask("step", options.steps)
                if number:
                    rows.append(
                        {
                            "case": case,
                            "round": number,
                            "kind": one.kind,
                            "median": statistics.median(answer["times"]),
                            **answer,
                        }
                    )
            print(f"{case}: round {number} of {options.rounds}", file=sys.stderr, flush=True)
        for one in contenders:
            one.close()
        medians = {
            kind: [row["median"] for row in rows if row["case"] == case and row["kind"] == kind]
            for kind in KINDS
        }
        best = {kind: min(each) for kind, each in medians.items()}
        # Seconds of all threads together: what is left to compare where others use the machine too.
        cpu = {
            kind: min(
                min(row["cpu"]) for row in rows if row["case"] == case and row["kind"] == kind
            )
            for kind in KINDS
        }
        facts[case] = {"best": best, "cpu": cpu, "bytes": peaks}
        for kind in KINDS:
            median = statistics.median(medians[kind])
            times = f"{best[kind]:12.4f}{median:9.4f}{best[kind] / best['plain']:9.3f}"
            seconds = f"{cpu[kind]:9.3f}{cpu[kind] / cpu['plain']:9.3f}"
            memory = f"{peaks[kind] / 2**20:10.0f}{peaks[kind] / peaks['plain']:9.3f}"
            print(f"{case:6}{kind:20}{times}{seconds}{memory}", flush=True)
        time_bar, memory_bar = BARS[case]
        print(
            f"{case:6}bars: time ≤ {time_bar} × plain"
            + ("" if memory_bar is None else f", memory ≤ {memory_bar} × plain"),
            flush=True,
        )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = options.out / f"heads_cpu-{datetime.date.today()}.jsonl"
        with name.open("w") as file:
            for row in [facts, *rows]:
                file.write(json.dumps(row) + "\n")
        print(f"rows: {name}")


if __name__ == "__main__":
    main()

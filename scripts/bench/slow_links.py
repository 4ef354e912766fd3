"""Step time over a slow link: dense collectives and such of few bits, interleaved in one run.

    python scripts/bench/slow_links.py --rounds 3 [--ranks 2] [--rates 100,500,1000] [--out FOLDER]

Ranks in network namespaces of their own, each joined to a bridge by a pair of virtual devices whose
rate `tc … tbf` limits in both directions (root alone may do that). Every round tries every rate,
and at every rate a few steps of every contender, one after the other; a contender's figure is the
median over rounds of its ratio to the dense one beside it. The work is a GPT-2 of 8 layers (hidden
256, 1 x 64 tokens a rank, 8.4M parameters) in bf16 with AdamW. Raw rows with versions and bytes go
to FOLDER as JSON lines.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes"))
from namespaces import Link

LENGTH, VOCABULARY = 64, 8192
ONE = {"compressed_communication": {"bits": 1, "freeze_step": 1}}
FOUR = {"compressed_communication": {"bits": 4}}
UP, DOWN = {"zero_quantized_gradients": True}, {"zero_quantized_weights": True}
# stage, keys of zero_optimization, other keys; each is compared with the dense one of its stage
KINDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stage 1, dense": (1, {}, {}),
    "stage 1, 1 bit": (1, {}, ONE),
    "stage 2, dense": (2, {}, {}),
    "stage 2, 4 bits": (2, {}, FOUR),
    "stage 3, dense": (3, {}, {}),
    "stage 3, 8 and 4 bits": (3, {**UP, **DOWN}, {}),
}


def contender(kind: str) -> Any:
    """A function that does one step and returns its loss and the bytes of its collectives."""
    import torch
    import transformers

    import hf_zero

    stage, zero, more = KINDS[kind]
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=256, n_layer=8, n_head=8, vocab_size=VOCABULARY, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    engine = hf_zero.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, **zero},
            **more,
        },
    )[0]

    def step(ids: torch.Tensor) -> tuple[float, int]:
        engine.mesh.stats.bytes.clear()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach()), sum(engine.mesh.stats.bytes.values())

    return step


def work() -> None:
    """A rank: does what lines on its standard input say, and answers in lines that begin with @."""
    import torch

    import hf_zero

    torch.set_num_threads(1)
    hf_zero.init_distributed()
    rank = int(os.environ["RANK"])
    steps = {kind: contender(kind) for kind in KINDS}
    print("@ready", flush=True)
    generator = torch.Generator().manual_seed(rank)
    for line in sys.stdin:
        kind, _, count = line.strip().rpartition(" ")
        times, answer = [], (0.0, 0)
        for _ in range(int(count)):
            ids = torch.randint(VOCABULARY, (1, LENGTH), generator=generator)
            torch.distributed.barrier()
            before = time.perf_counter()
            answer = steps[kind](ids)
            times.append(time.perf_counter() - before)
        said = {"times": times, "loss": answer[0], "bytes": answer[1]}
        print(f"@{json.dumps(said)}", flush=True)


@contextmanager
def ranks(link: Link) -> Iterator[list[Any]]:
    """The processes, which have built their engines."""
    started = []
    try:
        for rank, name in enumerate(link.names):
            env = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(len(link.names)),
                "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": link.addresses[0], "MASTER_PORT": "29400", "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": link.devices[rank], "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_VERBOSITY": "error", "HF_ZERO_LOG_LEVEL": "WARNING",
            }  # fmt: skip
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, sys.executable, __file__, "--work"],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sys.stderr if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )
        for process in started:
            answer(process)
        yield started
    finally:
        for process in started:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def answer(process: Any) -> str:
    for line in process.stdout:
        if line.startswith("@"):
            return str(line[1:])
    raise SystemExit(f"a rank ended with code {process.wait()}; its error stands above")


def run(processes: list[Any], kind: str, count: int) -> dict[str, Any]:
    for process in processes:
        process.stdin.write(f"{kind} {count}\n")
        process.stdin.flush()
    answers = [json.loads(answer(process)) for process in processes]
    return dict(answers[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--rates", default="100,500,1000", help="Mbit/s")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work()
    rates, rows = [int(each) for each in options.rates.split(",")], []
    link = Link(options.ranks)
    try:
        link.make()
    except (OSError, subprocess.CalledProcessError) as error:
        link.remove()
        raise SystemExit(f"no network namespaces here: {error}") from None
    try:
        with ranks(link) as processes:
            for kind in KINDS:
                run(processes, kind, 2)  # warms up and records the orders
            for number in range(1, options.rounds + 1):
                for rate in rates:
                    link.limit(rate)
                    for kind in KINDS:
                        found = run(processes, kind, options.steps)
                        median = statistics.median(found["times"])
                        rows.append(
                            {"round": number, "rate": rate, "kind": kind, "median": median, **found}
                        )
                print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
    finally:
        link.remove()
    report(rows, rates)
    if options.out:
        save(rows, options)


def report(rows: list[dict[str, Any]], rates: list[int]) -> None:
    def of(rate: int, kind: str) -> list[float]:
        return [row["median"] for row in rows if (row["rate"], row["kind"]) == (rate, kind)]

    print(f"{'Mbit/s':>7}  {'kind':24}{'s/step':>8}{'to dense':>10}{'bytes':>12}")
    for rate in rates:
        for kind in KINDS:
            ours, dense = of(rate, kind), of(rate, f"{kind[:7]}, dense")
            ratio = statistics.median(a / b for a, b in zip(ours, dense))
            sent = next(row["bytes"] for row in rows if row["kind"] == kind)
            print(f"{rate:7}  {kind:24}{statistics.median(ours):8.3f}{ratio:10.2f}{sent:12,}")


def save(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    folder = options.out
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions = {**found, "python": platform.python_version()}
    facts = {"versions": versions, "cores": os.cpu_count(), "ranks": options.ranks}
    path = folder / f"slow_links-{datetime.date.today()}-{options.ranks}-ranks.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [facts, *rows]))
    print(f"rows: {path}")


if __name__ == "__main__":
    main()

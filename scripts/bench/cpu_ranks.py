"""Step time of DDP, FSDP2, DeepSpeed (where a folder with it is given) and hf-zero on CPU ranks,
interleaved in one run.

    python scripts/bench/cpu_ranks.py --rounds 7 [--deepspeed FOLDER] [--ranks 2] [--out
    scripts/bench/results]

Every round runs a few steps of every contender, one after the other; a contender's figure is the
best round's median step. The work is an 8-layer BERT (hidden 512, 8 x 128 tokens a rank) in fp32
with fused AdamW and clipping 1.0. FOLDER is what `pip install --target FOLDER deepspeed` made:
installed beside hf-zero it would answer in its place, so it runs in processes of its own. Raw rows
with versions go to OUT as JSON lines.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BATCH, LENGTH, VOCABULARY, LEARNING_RATE = 8, 128, 8192, 1e-4
OURS = ("hfz0", "hfz1", "hfz2", "hfz3")
PEERS = ("ddp", "fsdp2")
DEEPSPEED = ("ds0", "ds1", "ds2", "ds3")


def build_model() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).train()


def contender(kind: str) -> Any:
    """A function that does one training step on a batch of token ids and returns the loss."""
    import torch
    import torch.distributed as dist

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    if kind.startswith(("hfz", "ds")):
        if kind.startswith("hfz"):
            import hf_zero as library
        else:
            import deepspeed as library
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            # sharded as FSDP shards them, small parameters too
            "zero_optimization": {
                "stage": int(kind[-1]),
                "stage3_param_persistence_threshold": 0,
            },
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        engine = library.initialize(model=model, optimizer=optimizer, config=config)[0]

        def engine_step(ids: torch.Tensor) -> torch.Tensor:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return loss

        return engine_step
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def plain_step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_step


def work(kinds: list[str]) -> None:
    """A rank: builds its contenders, then runs what standard input asks for and answers on
    standard output.
    """
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if kinds[0].startswith("ds"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(100 + rank)
    batches = [torch.randint(5, VOCABULARY, (BATCH, LENGTH)) for _ in range(4)]
    steps = {kind: contender(kind) for kind in kinds}
    done = dict.fromkeys(kinds, 0)
    print("@ready", flush=True)
    for line in sys.stdin:
        kind, count = line.split()
        torch.distributed.barrier()
        times = []
        for _ in range(int(count)):
            started = time.perf_counter()
            loss = steps[kind](batches[done[kind] % 4])
            times.append(time.perf_counter() - started)
            done[kind] += 1
        print(
            "@" + json.dumps({"times": times, "loss": float(loss.detach()), "steps": done[kind]}),
            flush=True,
        )


class Job:
    """The ranks of one group of contenders."""

    def __init__(self, kinds: tuple[str, ...], ranks: int, path: str | None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.kinds = kinds
        self.processes = []
        for rank in range(ranks):
            env = dict(
                os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
                HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
            )  # fmt: skip
            if path is not None:
                env.update(
                    PYTHONPATH=path, HF_ZERO_AUTOLOAD="0", DS_ACCELERATOR="cpu", DS_BUILD_OPS="0"
                )
            command = [sys.executable, __file__, "--work", ",".join(kinds)]
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sys.stderr if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )
        for process in self.processes:
            self._answer(process)

    def _answer(self, process: Any) -> str:
        for line in process.stdout:
            if line.startswith("@"):
                return line[1:]
        raise SystemExit(
            f"a rank of {self.kinds} ended with code {process.wait()}; its error stands above"
        )

    def run(self, kind: str, count: int) -> dict[str, Any]:
        for process in self.processes:
            process.stdin.write(f"{kind} {count}\n")
            process.stdin.flush()
        answers = [json.loads(self._answer(process)) for process in self.processes]
        return answers[0]

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def versions(folder: str | None) -> dict[str, str]:
    found = {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "hf-zero")
    }
    if folder is not None:
        found["deepspeed"] = next(
            iter(importlib.metadata.distributions(name="deepspeed", path=[folder]))
        ).version
    return {**found, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of each contender in a round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default=",".join(PEERS + OURS))
    parser.add_argument("--deepspeed", metavar="FOLDER")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work.split(","))

    jobs = [Job(tuple(options.only.split(",")), options.ranks, None)]
    if options.deepspeed:
        jobs.append(Job(DEEPSPEED, options.ranks, options.deepspeed))
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds + 1):  # round 0 warms up and records the orders
        for job in jobs:
            # The order turns with the round, so that no contender always follows the same one.
            for place in range(len(job.kinds)):
                kind = job.kinds[(place + number) % len(job.kinds)]
                answer = job.run(kind, options.steps)
                if number:
                    rows.append(
                        {
                            "round": number,
                            "kind": kind,
                            "median": statistics.median(answer["times"]),
                            **answer,
                        }
                    )
        print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
    for job in jobs:
        job.close()

    best = {
        kind: min(row["median"] for row in rows if row["kind"] == kind)
        for kind in dict.fromkeys(row["kind"] for row in rows)
    }
    middle = {
        kind: statistics.median(row["median"] for row in rows if row["kind"] == kind)
        for kind in best
    }
    print(f"{'kind':8}{'best s/step':>12}{'median':>9}{'vs ddp':>8}{'vs fsdp2':>9}{'loss':>10}")
    for kind, seconds in best.items():
        loss = [row["loss"] for row in rows if row["kind"] == kind][-1]
        against = [f"{seconds / best[peer]:.3f}" if peer in best else "-" for peer in PEERS]
        print(
            f"{kind:8}{seconds:12.4f}{middle[kind]:9.4f}{against[0]:>8}{against[1]:>9}{loss:10.4f}"
        )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = options.out / f"cpu_ranks-{datetime.date.today()}.jsonl"
        facts = {
            "versions": versions(options.deepspeed),
            "cores": os.cpu_count(),
            "ranks": options.ranks,
            "best": best,
            "median": middle,
        }
        with name.open("w") as file:
            for row in [facts, *rows]:
                file.write(json.dumps(row) + "\n")
        print(f"rows: {name}")


if __name__ == "__main__":
    main()

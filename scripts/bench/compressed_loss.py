"""Cost of few bits in loss: small models on text, dense and compressed, with the same batches.

    python scripts/bench/compressed_loss.py --ranks 2,4,8 --seeds 3 [--models gpt2,bert]

A GPT-2 and a BERT with masked tokens (2 layers, hidden 96, 128 byte values; 2 x 64 bytes a rank and
step of the topics of Python's own help) for 600 steps in fp32: AdamW, betas (0.9, 0.99), lr 1.5e-3
warmed up over a tenth of the steps and then by a cosine to a tenth. Contenders: dense stage 1; four
bits both ways at stage 2; 1-bit Adam frozen after a fifth of the steps; the paper's 1-bit Adam
on whole tensors without ZeRO (every rank keeps all moments); 0/1 Adam whose variance is frozen
then, and the same with local steps: from a sixth of the steps later on ranks synchronise every
second step, from another sixth later every fourth. The figure of a run is the mean loss
of all ranks over its last 50 steps. Raw rows with the curves go to --out as JSON lines; runs that
are in there are not made again; a plot for each model lies beside them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LENGTH, ROWS, LAST = 64, 2, 50
BETAS, EPS, MASK = (0.9, 0.99), 1e-8, 127
KINDS = ("dense", "4 bits", "1 bit", "1 bit, the paper's", "0/1", "0/1, local steps")


def text() -> torch.Tensor:
    from pydoc_data.topics import topics

    joined = "".join(topics[name] for name in sorted(topics))
    return torch.tensor([byte for byte in joined.encode() if byte < MASK])


def model_of(name: str, seed: int) -> torch.nn.Module:
    import transformers

    torch.manual_seed(seed)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=96, n_layer=2, n_head=4, vocab_size=128, n_positions=LENGTH,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=384,
            vocab_size=128, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def batch(name: str, data: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    places = torch.randint(len(data) - LENGTH, (ROWS,), generator=generator).tolist()
    ids = torch.stack([data[at : at + LENGTH] for at in places])
    if name == "gpt2":
        return {"input_ids": ids, "labels": ids}
    hidden = torch.rand(ids.shape, generator=generator) < 0.15
    return {"input_ids": ids.masked_fill(hidden, MASK), "labels": ids.masked_fill(~hidden, -100)}


def rate_of(step: int, steps: int, rate: float) -> float:
    warm = steps // 10
    if step < warm:
        return rate * (step + 1) / warm
    return rate * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / (steps - warm)))


class Paper:
    """1-bit Adam of arXiv:2102.02888, whole on every rank: one scale a tensor, its mean square's
    root. All tensors travel in one message.
    """

    def __init__(self, model: torch.nn.Module, freeze: int):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.freeze, self.made = freeze, 0
        self.sizes = [p.numel() for p in self.parameters]
        flats = torch.zeros(4, sum(self.sizes)).unbind()
        self.mean, self.square, self.error, self.left = flats

    def step(self, lr: float) -> None:
        self.made += 1
        world, (b1, b2) = dist.get_world_size(), BETAS
        gradient = torch.cat([p.grad.view(-1) for p in self.parameters])
        if self.made <= self.freeze:
            dist.all_reduce(gradient.div_(world))
            self.mean.lerp_(gradient, 1 - b1)
            self.square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        else:
            wanted = self.error.add_(self.mean, alpha=b1).add_(gradient, alpha=1 - b1)
            sent = self.compressed(wanted)
            self.error.sub_(sent)
            dist.all_reduce(sent.div_(world))
            self.left.add_(sent)
            self.mean.copy_(self.compressed(self.left))
            self.left.sub_(self.mean)
        corrected = self.square / (1 - b2 ** min(self.made, self.freeze))
        update = (self.mean / corrected.sqrt_().add_(EPS)).split(self.sizes)
        for parameter, part in zip(self.parameters, update):
            parameter.data.sub_(part.view_as(parameter), alpha=lr / (1 - b1**self.made))
            parameter.grad = None

    def compressed(self, values: torch.Tensor) -> torch.Tensor:
        scales = torch.stack([each.square().mean().sqrt() for each in values.split(self.sizes)])
        return torch.where(values >= 0, 1.0, -1.0) * scales.repeat_interleave(
            torch.tensor(self.sizes)
        )


def losses(
    kind: str, name: str, seed: int, options: argparse.Namespace, data: torch.Tensor
) -> list[float]:
    """The mean over the ranks, for each step."""
    import hf_zero
    from hf_zero.optim import OneBitAdam, ZeroOneAdam

    model, rank, steps = model_of(name, seed).train(), dist.get_rank(), options.steps
    freeze = round(steps * options.freeze)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    engine: Any = None
    if kind != KINDS[3]:
        settings: dict[str, Any] = {
            "lr": options.rate,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": 0.0,
        }
        adam, more = torch.optim.AdamW, dict[str, int]()
        if kind == "1 bit":
            adam, more = OneBitAdam, {"freeze_step": freeze}
        elif kind.startswith("0/1"):
            every = 4 if kind == KINDS[5] else 1
            more = {"var_freeze_step": freeze, "local_step_scaler": steps // 6}
            adam, more = ZeroOneAdam, {**more, "local_step_clipper": every}
        optimizer = adam(model.parameters(), **settings, **more)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": 2 if kind == "4 bits" else 1},
            **({"compressed_communication": {"bits": 4}} if kind == "4 bits" else {}),
        }
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    paper, seen = Paper(model, freeze), []
    for step in range(steps):
        lr, given = rate_of(step, steps, options.rate), batch(name, data, generator)
        if engine is None:
            loss = model(**given).loss
            loss.backward()
            paper.step(lr)
        else:
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = engine(**given).loss
            engine.backward(loss)
            engine.step()
        seen.append(loss.detach())
    whole = torch.stack(seen)
    dist.all_reduce(whole.div_(dist.get_world_size()))
    if engine is not None:
        engine.destroy()
    return whole.tolist()


def work(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "HF_ZERO_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import hf_zero

    torch.set_num_threads(1)
    hf_zero.init_distributed()
    data, path = text(), Path(options.file)
    done = {_run(row) for row in rows_of(path)}
    dist.barrier()  # before rank 0 adds others
    for seed in range(options.seeds):
        for name in options.models.split(","):
            for kind in options.kinds.split(";"):
                if (name, world, seed, kind) in done:
                    continue
                began = time.monotonic()
                found = losses(kind, name, seed, options, data)
                if rank == 0:
                    row = {"model": name, "ranks": world, "seed": seed, "kind": kind}
                    row["loss"] = sum(found[-LAST:]) / LAST
                    row["curve"] = [
                        round(sum(found[at : at + 10]) / 10, 4) for at in range(0, len(found), 10)
                    ]
                    row["seconds"] = round(time.monotonic() - began, 1)
                    with path.open("a") as file:
                        file.write(f"{json.dumps(row)}\n")
                    print(
                        f"{world} ranks, {name}, seed {seed}, {kind}: {row['loss']:.4f}", flush=True
                    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def _run(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["ranks"], row["seed"], row["kind"]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def report(rows: list[dict[str, Any]]) -> None:
    print(f"{'model':6}{'ranks':>6}  {'kind':20}{'loss':>8}{'to dense':>10}{'each seed':>30}")
    for model, ranks in sorted({(row["model"], row["ranks"]) for row in rows}):
        cell = [row for row in rows if (row["model"], row["ranks"]) == (model, ranks)]
        dense = {row["seed"]: row["loss"] for row in cell if row["kind"] == "dense"}
        for kind in KINDS:
            ours = {row["seed"]: row["loss"] for row in cell if row["kind"] == kind}
            off = [ours[seed] - dense[seed] for seed in ours if seed in dense]
            if off:
                each = " ".join(f"{value:+.4f}" for value in off)
                mean = statistics.mean(ours.values())
                print(
                    f"{model:6}{ranks:6}  {kind:20}{mean:8.3f}"
                    f"{statistics.mean(off):+10.4f}{each:>30}"
                )


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """A plot for each model: mean losses over the seeds, on the most ranks there are of it."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes"))
    from plot import line_plot

    for model in sorted({row["model"] for row in rows}):
        ranks = max(row["ranks"] for row in rows if row["model"] == model)
        curves = {}
        for kind in KINDS:
            runs = [r["curve"] for r in rows if _run(r)[:2] == (model, ranks) and r["kind"] == kind]
            mean = [statistics.mean(values) for values in zip(*runs)]
            # the first steps are the same in all, and far above
            curves[kind] = [(10.0 * at, value) for at, value in enumerate(mean) if at >= 10]
        path = folder / f"compressed_loss-{model}.svg"
        title = f"{model} on {ranks} ranks: loss in few bits"
        line_plot(path, curves, title, "steps", "loss, mean of ten steps and the seeds")
        print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", default="gpt2,bert")
    parser.add_argument("--kinds", default=";".join(KINDS), help="separated by semicolons")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="the largest learning rate")
    parser.add_argument("--freeze", type=float, default=0.2, help="after which part of the steps")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--report", type=Path, help="only print the table of these rows")
    options = parser.parse_args()
    if options.report is None:
        options.out.mkdir(parents=True, exist_ok=True)
        options.report = options.out / f"compressed_loss-{datetime.date.today()}.jsonl"
        options.file = str(options.report)
        if not options.report.exists():
            found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
            facts = {
                "versions": {**found, "python": platform.python_version()},
                "steps": options.steps,
                "rate": options.rate,
                "freeze": options.freeze,
            }
            options.report.write_text(f"{json.dumps(facts)}\n")
        for world in map(int, options.ranks.split(",")):
            mp.spawn(work, (world, free_port(), options), world)
    report(rows_of(options.report))
    plot(rows_of(options.report), options.report.parent)
    print(f"rows: {options.report}")


if __name__ == "__main__":
    main()

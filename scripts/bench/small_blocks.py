"""Host time of a step of many blocks of almost no compute: plain PyTorch, DDP, FSDP2 and hf-zero on
CPU ranks, interleaved in one run.

    python scripts/bench/small_blocks.py --rounds 7 [--ranks 2] [--out scripts/bench/results]

Two cases. `all`: 64 residual blocks of width 32, all used. `one`: 300 blocks of which a step uses
one, another one each time; DDP runs it with `find_unused_parameters`. A figure is CPU time of a
process (all of its threads) for one step, the smallest median of a round: it does not grow with
what else the machine does, as wall time does, which is in the rows as well. Ratios are of rounds,
the median of them. Raw rows with versions go to OUT as JSON lines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from versions import versions

WIDTH, ROWS, LEARNING_RATE = 32, 4, 1e-3
OURS = ("hfz0", "hfz1", "hfz2", "hfz3")
CASES = {"all": (64, ("plain", "ddp", "fsdp2", *OURS)), "one": (300, ("plain", "ddp", *OURS))}
GOALS = {"hfz0": ("ddp", 1.5), "hfz1": ("ddp", 1.5), "hfz2": ("ddp", 1.5), "hfz3": ("fsdp2", 0.2)}
Step = Callable[[int], None]


def build(blocks: int) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: torch.Tensor, chosen: tuple[int, ...] | None) -> torch.Tensor:
            x = self.enter(x)
            for block in (
                self.blocks if chosen is None else [self.blocks[index] for index in chosen]
            ):
                x = block(x)
            return x

    torch.manual_seed(0)
    return Blocks()


def contender(kind: str, case: str) -> Step:
    import torch
    import torch.distributed as dist

    blocks, _ = CASES[case]
    model = build(blocks)
    batch = torch.randn(ROWS, WIDTH)

    def chosen(number: int) -> tuple[int, ...] | None:
        return None if case == "all" else (number * 7 % blocks,)

    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    if kind.startswith("hfz"):
        import hf_zero

        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            # sharded as FSDP shards them, small parameters too
            "zero_optimization": {
                "stage": int(kind[-1]),
                "stage3_param_persistence_threshold": 0,
            },
        }
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

        def engine_step(number: int) -> None:
            engine.backward(engine(batch, chosen(number)).square().mean())
            engine.step()

        return engine_step
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=case == "one"
        )

    def plain_step(number: int) -> None:
        model(batch, chosen(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return plain_step


def work(
    rank: int,
    ranks: int,
    cases: list[str],
    kinds: list[str],
    rounds: int,
    steps: int,
    folder: str,
    results: Any,
) -> None:
    """One rank: every round runs a few steps of every contender, in an order that turns with the
    round.
    """
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    for case in cases:
        chosen = [kind for kind in CASES[case][1] if kind in kinds]
        made = {kind: contender(kind, case) for kind in chosen}
        done = dict.fromkeys(chosen, 0)
        for number in range(rounds + 1):  # round 0 warms up and records the orders
            for place in range(len(chosen)):
                kind = chosen[(place + number) % len(chosen)]
                torch.distributed.barrier()
                cpu, wall = [], []
                for _ in range(steps):
                    before = time.process_time(), time.perf_counter()
                    made[kind](done[kind])
                    done[kind] += 1
                    cpu.append(time.process_time() - before[0])
                    wall.append(time.perf_counter() - before[1])
                if number and rank == 0:
                    row = {
                        "case": case,
                        "round": number,
                        "kind": kind,
                        "cpu": statistics.median(cpu),
                        "wall": statistics.median(wall),
                    }
                    results.put(row)
        del made
    if rank == 0:
        results.put(None)
    torch.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=7, help="steps of each contender in a round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument(
        "--only",
        default=",".join(dict.fromkeys(kind for _, kinds in CASES.values() for kind in kinds)),
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    import tempfile

    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        results = processes.get_context("spawn").SimpleQueue()
        told = (
            options.ranks,
            options.cases.split(","),
            options.only.split(","),
            options.rounds,
            options.steps,
            folder,
            results,
        )
        started = processes.spawn(work, told, nprocs=options.ranks, join=False)
        rows = list(iter(results.get, None))
        started.join()

    print(f"{'case':6}{'kind':8}{'cpu ms':>9}{'wall ms':>9}{'vs ddp':>8}{'vs fsdp2':>10}  goal")
    for case in options.cases.split(","):
        of = {
            kind: [row for row in rows if (row["case"], row["kind"]) == (case, kind)]
            for kind in CASES[case][1]
        }
        for kind, own in of.items():
            if not own:
                continue

            def against(
                peer: str, own: list[dict[str, Any]] = own, of: dict[str, list[dict[str, Any]]] = of
            ) -> float | None:
                pairs = list(zip(own, of.get(peer, ())))
                return (
                    statistics.median(mine["cpu"] / theirs["cpu"] for mine, theirs in pairs)
                    if pairs
                    else None
                )

            ratios = [
                f"{ratio:.2f}" if (ratio := against(peer)) is not None else "-"
                for peer in ("ddp", "fsdp2")
            ]
            goal = ""
            if case == "all" and kind in GOALS and (ratio := against(GOALS[kind][0])) is not None:
                goal = (
                    f"<= {GOALS[kind][1]} x {GOALS[kind][0]}: "
                    f"{'met' if ratio <= GOALS[kind][1] else 'not met'}"
                )
            best = [1e3 * min(row[what] for row in own) for what in ("cpu", "wall")]
            print(
                f"{case:6}{kind:8}{best[0]:9.2f}{best[1]:9.2f}{ratios[0]:>8}{ratios[1]:>10}  {goal}"
            )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = options.out / f"small_blocks-{datetime.date.today()}.jsonl"
        facts = {
            "versions": versions("torch", "hf-zero"),
            "cores": os.cpu_count(),
            "ranks": options.ranks,
        }
        name.write_text("".join(json.dumps(row) + "\n" for row in [facts, *rows]))
        print(f"rows: {name}")


if __name__ == "__main__":
    main()

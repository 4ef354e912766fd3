"""Growth of costs with parameters and ranks, beside DDP, FSDP2 and torch.distributed.checkpoint.

    python scripts/bench/growth.py --parameters 1250,5000,20000 --ranks 2 [--rounds 3]
    python scripts/bench/growth.py --parameters 64 --ranks 2,4,8,16 [--out scripts/bench/results]

The model has that many small parameters, in blocks of 20. Contenders (`hf-zero 1`, `hf-zero 3`,
`ddp`, `fsdp2`) take turns in every round, each in fresh processes of the CPU. Columns: CPU seconds
of a rank's process for `initialize` (or the wrappers' constructors), a step (the best of three),
the whole `state_dict` and a blocking save (torch.distributed.checkpoint for the peers); the TCP
segments with data and the bytes that it sends in the save, and the descriptors and threads that it
has more after three steps than with torch's group alone. Figures are those of the largest rank, of
the best round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload import environment, rows_of_all_ranks

CONTENDERS = ("hf-zero 1", "hf-zero 3", "ddp", "fsdp2")
COLUMNS = (
    "initialize", "step", "state_dict", "save", "segments", "bytes", "descriptors", "threads",
)  # fmt: skip
WIDTH, BLOCK, LIMIT = 16, 10, 300  # LIMIT: seconds of a contender
SEGMENTS_OUT, BYTES_SENT = 156, 200  # offsets of tcpi_data_segs_out and tcpi_bytes_sent


def sent() -> tuple[int, int]:
    """Return the TCP segments with data and the bytes that this process has sent."""
    segments = nbytes = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.type != socket.SOCK_STREAM or each.family == socket.AF_UNIX:
                    continue
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                segments += struct.unpack_from("I", info, SEGMENTS_OUT)[0]
                nbytes += struct.unpack_from("Q", info, BYTES_SENT)[0]
        except OSError:  # closed meanwhile
            continue
    return segments, nbytes


def held() -> tuple[int, int]:
    """Return the descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Job:
    """A contender's model and optimizer on this rank, made by the constructor."""

    def __init__(self, name: str, parameters: int):
        import torch
        from torch import nn

        torch.manual_seed(0)
        self.model: Any = nn.Sequential(
            *(
                nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCK)))
                for _ in range(max(1, parameters // (2 * BLOCK)))
            )
        )
        self.build = {"ddp": self._ddp, "fsdp2": self._fsdp2}.get(name, self._hf_zero)
        self.stage = int(name.split()[1]) if name.startswith("hf-zero") else 0

    def _hf_zero(self) -> None:
        import torch

        import hf_zero

        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
        }
        optimizer = torch.optim.AdamW(self.model.parameters())
        engine = hf_zero.initialize(model=self.model, optimizer=optimizer, config=config)[0]
        self.forward, self.backward, self.update = engine, engine.backward, engine.step
        self.state_dict: Callable[[], Any] = engine.state_dict
        self.save: Callable[[str], Any] = engine.save_checkpoint

    def _ddp(self) -> None:
        import torch

        self._plain(torch.nn.parallel.DistributedDataParallel(self.model))

    def _fsdp2(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in self.model:
            fully_shard(block)
        self._plain(fully_shard(self.model))

    def _plain(self, model: Any) -> None:
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_state_dict,
        )

        optimizer = torch.optim.AdamW(model.parameters())

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        def save(folder: str) -> None:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)

        whole = StateDictOptions(full_state_dict=True)
        self.forward, self.backward, self.update, self.save = model, _backward, update, save
        self.state_dict = lambda: get_model_state_dict(model, options=whole)

    def step(self) -> None:
        import torch

        self.backward(self.forward(torch.randn(4, WIDTH)).square().mean())
        self.update()


def _backward(loss: Any) -> None:
    loss.backward()


def seconds(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of this process in ``call``, which all ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    begun = time.process_time()
    call()
    return time.process_time() - begun


def work(name: str, parameters: int, folder: str) -> None:
    """A rank: trains, and prints what it took."""
    import torch.distributed as dist
    import torch.distributed.fsdp  # noqa: F401

    import hf_zero.engine  # noqa: F401

    dist.init_process_group("gloo")
    dist.barrier()
    before, job = held(), Job(name, parameters)
    row = {"initialize": seconds(job.build)}
    row["step"] = min(seconds(job.step) for _ in range(3))
    row["descriptors"], row["threads"] = (
        now - was for now, was in zip(held(), before, strict=True)
    )
    row["state_dict"] = seconds(job.state_dict)
    time.sleep(0.3)  # for what is on the wire
    was = sent()
    row["save"] = seconds(lambda: job.save(f"{folder}/{name}"))
    row["segments"], row["bytes"] = (now - old for now, old in zip(sent(), was, strict=True))
    print("@" + json.dumps(row), flush=True)
    dist.barrier()
    os._exit(0)  # threads of some contenders abort the process at its end


def run(name: str, parameters: int, ranks: int) -> list[dict[str, Any]]:
    """Return the rows of all ranks of a contender."""
    folder = tempfile.mkdtemp(prefix="hf-zero-bench-")
    command = [sys.executable, __file__, "--work", name, "--parameters", str(parameters)]
    try:
        env = {**environment(ranks, threads=1), "HF_ZERO_LOG_LEVEL": "ERROR"}
        return rows_of_all_ranks(name, [*command, "--folder", folder], ranks, env, LIMIT)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", default="1250,5000")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, int(options.parameters), options.folder)

    names, rows = options.only.split(","), list[dict[str, Any]]()
    path = options.out and options.out / f"growth-{datetime.date.today()}.jsonl"
    cells = [
        (parameters, ranks)
        for parameters in map(int, options.parameters.split(","))
        for ranks in map(int, options.ranks.split(","))
    ]
    for number in range(options.rounds):
        for parameters, ranks in cells:
            for place in range(len(names)):  # the order turns
                name = names[(place + number) % len(names)]
                for rank, row in enumerate(run(name, parameters, ranks)):
                    facts = {"contender": name, "parameters": parameters, "ranks": ranks}
                    facts |= {"round": number, "rank": rank, "load": os.getloadavg()[0]}
                    rows.append({**facts, **row})
                    if path is not None:  # a run that is cut off leaves what it has measured
                        with path.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
    print(f"{'contender':12}{'of':>8}{'ranks':>6}" + "".join(f"{each:>12}" for each in COLUMNS))
    for parameters, ranks in cells:
        for name in sorted(names):
            best = []
            for column in COLUMNS:
                largest: dict[int, float] = {}
                for row in rows:
                    if (row["contender"], row["parameters"], row["ranks"]) == (
                        name, parameters, ranks,
                    ):  # fmt: skip
                        largest[row["round"]] = max(largest.get(row["round"], 0), row[column])
                best.append(min(largest.values()))
            print(f"{name:12}{parameters:>8}{ranks:>6}" + "".join(f"{x:12.6g}" for x in best))
    if path is not None:
        print(f"rows: {path}")


if __name__ == "__main__":
    main()

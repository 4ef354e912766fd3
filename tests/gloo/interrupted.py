"""Pairs of ranks of which one is interrupted at a line of a save or a load, catches that, and saves
or loads again. One import for all: the processes are forked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo

import hf_zero
import hf_zero.engine
from hf_zero.launch.hosts import free_port

PACKAGE = os.path.dirname(hf_zero.__file__)
LIMIT, AT_ONCE = 200.0, 4  # seconds in which a pair ends, far below its timeout; pairs at once


class Interrupt:
    """The trace function of a thread: counts the package's lines, and interrupts at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.count, self.where = at, 0, ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.count += event == "line"
        if event == "line" and self.count == self.at:
            name = os.path.relpath(frame.f_code.co_filename, PACKAGE)
            self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._line

    def over(self, call: Callable[[], None]) -> None:
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)


def train(folder: Path, kind: str, part: float, rank: int, interrupt: Interrupt) -> None:
    hf_zero.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    zero = {"stage": 1}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "timeout": 1000}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, "before")

    def change(tag: str) -> None:
        if kind == "load":
            engine.load_checkpoint(folder, "before")
        else:
            engine.save_checkpoint(folder, tag, blocking=kind == "save")

    counted = Interrupt()
    counted.over(lambda: change("first"))
    engine.wait_for_checkpoint()
    if rank == 1:
        interrupt.at = 1 + int(part * counted.count)
        interrupt.over(lambda: change("second"))
    else:
        change("second")
    change("third")
    engine.wait_for_checkpoint()


def run_rank(folder: Path, kind: str, part: float, rank: int, port: int) -> None:
    """Train, and write what became of this rank into ``folder``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    interrupt, became = Interrupt(), "done"
    try:
        train(folder / "run", kind, part, rank, interrupt)
    except hf_zero.HfZeroError as error:
        became = f"refused: {error}"
    except BaseException as error:
        became = f"{type(error).__name__}: {error}"
    path = folder / f"rank-{rank}"
    path.with_suffix(".new").write_text(json.dumps([became, interrupt.where]))
    path.with_suffix(".new").rename(path)
    while not (folder / f"rank-{1 - rank}").exists():  # this one's end would end the other's wait
        time.sleep(0.05)
    os._exit(0)


def main() -> None:
    base, left, running = Path(sys.argv[1]), json.loads(sys.argv[2]), []
    while left or running:
        if left and len(running) < AT_ONCE:
            kind, part = left.pop(0)
            folder, port = base / f"{kind} {part:.3f}", free_port()
            folder.mkdir()
            children = []
            for rank in range(2):
                children.append(os.fork())
                if children[-1] == 0:
                    run_rank(folder, kind, part, rank, port)
            running.append((children, time.monotonic() + LIMIT))
            continue
        for children, limit in list(running):
            if time.monotonic() >= limit:
                for child in children:
                    os.kill(child, 9)
            ended = [child for child in children if os.waitpid(child, os.WNOHANG)[0]]
            for child in ended:
                children.remove(child)
        running = [each for each in running if each[0]]
        time.sleep(0.05)


if __name__ == "__main__":
    main()

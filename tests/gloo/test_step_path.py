"""The way of a step, a save and a load through the source: files, functions, changes of file and
frames on the main thread of a rank, beside FSDP2's. Counts, which do not depend on the machine.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.processes import run_processes

FIELDS = ("files", "folders", "functions", "lines", "changes", "frames")


@dataclass(frozen=True)
class Way:
    """Counts of one call. ``lines``: of the functions; ``changes``: calls into another file than
    the call before; ``frames``: from a module's hook to the process group, at most.
    """

    files: int
    folders: int
    functions: int
    lines: int
    changes: int
    frames: int


# At most; 0: not bounded. FSDP2's step has no norm, loss scale and optimizer step. 9 files of a
# save and 8 of a load are those of checkpoint/; the others read the state of the engine. A load
# also drops the gradients of an open accumulation window, which 8 files of zero/ hold.
MOST = {
    "step": Way(35, 8, 220, 2_800, 550, 6),
    "save": Way(37, 0, 0, 0, 280, 0),
    "load": Way(41, 0, 0, 0, 470, 0),
}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, width: int = 128, blocks: int = 4):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, width), nn.Linear(width, 100)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def way_of(act: Callable[[], Any], root: Path) -> Way:
    """Return the way of ``act()`` through the files below ``root``, on this thread."""
    calls: Counter[tuple[str, str, int]] = Counter()
    last, changes, frames = "", 0, 0

    def depth_below_hook(frame: FrameType | None) -> int:
        inside = 0
        while frame is not None and not frame.f_code.co_filename.endswith("nn/modules/module.py"):
            inside += frame.f_code.co_filename.startswith(str(root))
            # autograd calls the hooks of a backward: the frame below is that of the engine
            if frame.f_code.co_name in ("pre_backward", "post_backward", "_end_task"):
                return inside if frame.f_code.co_name != "_end_task" else 0
            frame = frame.f_back
        return inside if frame is not None else 0

    def watch(frame: FrameType, event: str, called: Any) -> None:
        nonlocal last, changes, frames
        if event == "c_call" and getattr(called, "__name__", "") in ("send", "recv"):
            frames = max(frames, depth_below_hook(frame))
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(root)):
            calls[name, frame.f_code.co_qualname, frame.f_code.co_firstlineno] += 1
            changes += name != last
            last = name

    sys.setprofile(watch)
    try:
        act()
    finally:
        sys.setprofile(None)
    files = {name for name, _, _ in calls}
    folders = {Path(name).relative_to(root).parts[0] for name in files}
    lines = sum(_length(name, first) for name, _, first in calls)
    return Way(len(files), len(folders), len(calls), lines, changes, frames)


def _length(path: str, first: int) -> int:
    """Return the number of lines of the function that begins in line ``first``."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, kinds):
            begins = {node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))}
            if first in begins:
                return (node.end_lineno or first) - node.lineno + 1
    return 0


def ways(rank: int, folder: str) -> dict[str, Way]:
    """Return the ways of one engine's step, save and load, and of FSDP2's step."""
    import hf_zero

    torch.manual_seed(0)
    ids, found = torch.randint(0, 100, (2, 16)), {}
    model = Blocks()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step() -> None:
        engine.backward(engine(ids).square().mean())
        engine.step()

    root = Path(hf_zero.__file__).parent
    for _ in range(3):
        step()
    found["step"] = way_of(step, root)
    found["save"] = way_of(lambda: engine.save_checkpoint(folder), root)
    found["load"] = way_of(lambda: engine.load_checkpoint(folder), root)
    engine.destroy()

    from torch.distributed import fsdp

    plain = Blocks()
    for layer in plain.layers:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(plain)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def step_of_fsdp() -> None:
        plain(ids).square().mean().backward()
        theirs.step()
        theirs.zero_grad()

    for _ in range(3):
        step_of_fsdp()
    found["FSDP2 step"] = way_of(step_of_fsdp, Path(fsdp.__file__).parent / "_fully_shard")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Way]:
    return run_processes(2, ways, str(tmp_path_factory.mktemp("way")))[0]


def test_a_step_a_save_and_a_load_go_through_few_files(found: dict[str, Way]) -> None:
    print("\n" + f"{'':12}" + "".join(f"{field:>11}" for field in FIELDS))
    for what, way in found.items():
        print(f"{what:12}" + "".join(f"{getattr(way, field):11,}" for field in FIELDS))
    above = [
        f"{what}: {field} {getattr(found[what], field)} > {getattr(most, field)}"
        for what, most in MOST.items()
        for field in FIELDS
        if getattr(most, field) and getattr(found[what], field) > getattr(most, field)
    ]
    assert not above


def test_what_is_counted_was_seen(found: dict[str, Way]) -> None:
    assert found["step"].frames >= 5, "messages were sent below hooks"
    assert found["FSDP2 step"].files == 5 and found["FSDP2 step"].functions > 50
    assert min(way.changes for way in found.values()) > 100

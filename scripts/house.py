"""Measures of how the package is built, for a checkout: to be compared before and after a change.

    python scripts/house.py [CHECKOUT]

Prints files and lines of each package, import circles, arrows inside core, the widest classes
(attributes that methods set on self) and parameter lists of ``__init__``, the longest functions,
and how many frames of the package a planned gather passes from the module's hook to
torch.distributed: counted live, on two CPU ranks at stage 3.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parents[1]
sys.path.append(str(HERE))  # behind the checkout, whose hf_zero is the one that runs
SHOWN = 6
COUNT = "--count-frames"


# ---- frames of a planned gather ----


def frames_below_hook(frame: FrameType | None, package: str) -> list[str]:
    """The functions of ``package`` that are under way since a module called its hooks, outermost
    first; empty where none of the package's is.
    """
    names: list[str] = []
    while frame is not None and not frame.f_code.co_filename.endswith("nn/modules/module.py"):
        if frame.f_code.co_filename.startswith(package):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names[::-1] if frame is not None else []


def count_frames(rank: int, folder: str) -> None:
    """Train two steps at stage 3 and look at the gathers of the forward after: rank 0 prints the
    longest way from a hook.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    import hf_zero

    package = str(Path(hf_zero.__file__).parent)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    batch = torch.ones(2, 512)
    ways: list[list[str]] = []
    for _ in range(2):
        engine.backward(engine(batch).square().mean())
        engine.step()

    def spied(plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            ways.append(frames_below_hook(sys._getframe(1), package))
            return plain(*args, **kwargs)

        return call

    for name in ("irecv", "isend", "all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, spied(getattr(dist, name)))
    engine(batch)
    dist.barrier()
    if rank == 0:
        print(" > ".join(sorted(ways, key=len)[-1]) if any(ways) else "no gather was seen")


def live_frames(checkout: Path) -> str:
    """The longest way of a planned gather in ``checkout``, or why there is none."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), str(checkout), COUNT],
        env=environment,
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stdout.splitlines() if " > " in line or line.startswith("no ")]
    if done.returncode or not said:
        return f"not counted: {(done.stderr.strip() or 'nothing was printed').splitlines()[-1]}"
    return f"{len(said[-1].split(' > '))}: {said[-1]}"


# ---- what is printed ----


def most(values: dict[str, int], count: int = SHOWN) -> str:
    chosen = sorted(values.items(), key=lambda each: -each[1])[:count]
    return ", ".join(f"{name.removeprefix('hf_zero.')} {value}" for name, value in chosen)


def report(checkout: Path) -> None:
    from tests.helpers import house

    modules = house.sources(checkout / "hf_zero")
    folders = house.packages(modules)
    print(f"{'package':24}{'files':>7}{'lines':>9}{'longest':>9}")
    for folder, (files, lines, longest) in folders.items():
        print(f"{folder:24}{files:7}{lines:9,}{longest:9}")
    total = [sum(each[place] for each in folders.values()) for place in (0, 1)]
    print(f"{'all':24}{total[0]:7}{total[1]:9,}{max(each[2] for each in folders.values()):9}")

    found = house.circles(house.graph(modules, everywhere=True))
    print(f"\nimport circles (also inside functions): {len(found)}")
    for circle in found:
        print("  " + " <-> ".join(module.removeprefix("hf_zero.") for module in circle))
    loaded = house.graph(modules, everywhere=False)
    print(f"import circles at load time: {len(house.circles(loaded))}")
    print(f"imports inside zero: {house.inner_arrows(loaded, 'hf_zero.zero')}")

    widths = [width for width in house.class_widths(modules) if not width.frozen]
    print(f"widest classes: {most({each.name: each.attributes for each in widths})}")
    print(f"longest __init__: {most({each.name: each.parameters for each in widths})}")
    print(f"longest functions: {most(house.function_lengths(modules))}")
    print(f"frames of a planned gather: {live_frames(checkout)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, nargs="?", default=HERE)
    parser.add_argument(COUNT, action="store_true", dest="frames", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.frames:
        import torch.multiprocessing as processes

        with tempfile.TemporaryDirectory() as folder:
            processes.spawn(count_frames, (folder,), nprocs=2)
    else:
        report(options.checkout.resolve())


if __name__ == "__main__":
    main()

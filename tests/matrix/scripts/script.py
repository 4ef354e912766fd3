"""The command line and the report of the scripts of this folder."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

PLACE = ("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")
RANK, WORLD = (
    int(next((os.environ[name] for name in names if name in os.environ), default))
    for names, default in zip(PLACE, (0, 1))
)


def given(*flags: str, **defaults: Any) -> argparse.Namespace:
    """``--out``, flags, and options with their defaults; a list takes several words."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    for name, default in defaults.items():
        if isinstance(default, list):
            parser.add_argument(f"--{name}", nargs="*", default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def report(out: Path, content: dict[str, Any]) -> None:
    """Write what this rank has seen, and leave the others once all have."""
    (out / f"report-{RANK}.json").write_text(json.dumps(content))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

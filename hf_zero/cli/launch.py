"""``hf-zero launch``: ``accelerate launch`` with a ZeRO preset instead of a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_zero.cli.printing import AsJson, print_json
from hf_zero.errors import ConfigError

MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
CPU_RANKS = 2


def launch(
    command: Annotated[list[str], typer.Argument(help="The script and its arguments, after --.", metavar="-- SCRIPT [ARGS]...")],
    preset: Annotated[str, typer.Option(help="zero0, zero1, zero2 or zero3.")] = "zero3",
    config: Annotated[Path | None, typer.Option(help="An Accelerate YAML in place of the preset.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks; default: the GPUs of this machine, else 2 on the CPU.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16, with a preset.")] = "fp32",
    as_json: AsJson = False,
) -> None:
    """Start a script under accelerate launch with a ZeRO preset. With --json, print the command and do not start it.

    Example: hf-zero launch --preset zero3 --ranks 2 -- run_mlm.py --max_train_steps 100
    """
    arguments = [sys.executable, "-m", "accelerate.commands.launch", *_options(preset, config, ranks, precision), *command]
    if as_json:
        print_json({"command": arguments})
        return
    sys.stdout.flush()
    os.execv(sys.executable, arguments)


def _options(preset: str, config: Path | None, ranks: int | None, precision: str) -> list[str]:
    from hf_zero.config import PRESETS, ZeroConfig

    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks} is not a number of ranks; pass at least 1")
    if config is not None:
        ZeroConfig.from_file(config, allow_auto=True)  # says what is wrong with it before any process starts
        return ["--config_file", str(config), *(["--num_processes", str(ranks)] if ranks else [])]
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset!r} is unknown; choose one of {', '.join(PRESETS)}, or pass --config with an Accelerate YAML")
    if precision not in MIXED_PRECISION:
        raise ConfigError(f"--precision {precision!r} is unknown; choose one of {', '.join(MIXED_PRECISION)}")
    stage = PRESETS[preset]
    options = {
        "zero_stage": stage,
        "gradient_clipping": 1.0,
        "num_processes": ranks or _default_ranks(),
        "num_machines": 1,
        "mixed_precision": MIXED_PRECISION[precision],
        "main_process_port": 0,
        **({"zero3_init_flag": "true", "zero3_save_16bit_model": "true"} if stage == 3 else {}),
    }
    return ["--use_deepspeed", *(text for name, value in options.items() for text in (f"--{name}", str(value)))]


def _default_ranks() -> int:
    import torch

    return torch.cuda.device_count() or CPU_RANKS

"""Part 3: scripts of Accelerate, the Trainer, TRL and Lightning as their users start them, on two
ranks that share the device, beside the same script in one process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.launch.hosts import free_port
from tests.helpers import launched, oracle
from tests.nccl import ways
from tests.nccl.cases import Figures
from tests.nccl.ranks import SITE

SCRIPTS = launched.ROOT / "tests" / "matrix" / "scripts"
SECONDS = 240.0
CLOSE = 1e-5
LIGHTNING_CLOSE = 1e-4  # another order of sums, by other kernels


@contextmanager
def ranks_of(way: str) -> Iterator[None]:
    """Have each rank that a launcher starts from here apply ``way``."""
    kept = {name: os.environ.get(name) for name in ("PYTHONPATH", ways.VARIABLE)}
    path = [str(SITE), *filter(None, [kept["PYTHONPATH"]])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    if way != ways.LATE:
        os.environ[ways.VARIABLE] = way
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def furthest(found: list[float], want: list[float], limit: float = CLOSE) -> float:
    assert len(found) == len(want) > 0, (found, want)
    off = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, want, strict=True))
    assert off <= limit, f"{found}, in one process {want}"
    return off


def accelerate(way: str, folder: Path) -> Figures:
    """An Accelerate loop under ``accelerate launch`` at stage 3."""
    script, cases = SCRIPTS / "accelerate_cases.py", ("uneven", "resumed")
    more = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 3}
    top = {"use_cpu": way == ways.GLOO}
    found = launched.accelerate_launch(
        script, folder / "ranks", "--cases", *cases, stage=3, top=top, timeout=SECONDS, **more
    )
    plain, off = launched.alone(script, folder / "alone", "--cases", *cases, timeout=SECONDS), 0.0
    for case in cases:
        for report in found:
            assert report[case]["type"].endswith("DEEPSPEED"), report[case]["type"]
            off = max(off, furthest(report[case]["losses"], plain[case]["losses"]))
        steps = [[number for step in each[case]["steps"] for number in step] for each in found]
        wanted = [number for step in plain[case]["steps"] for number in step]
        off = max(off, furthest(steps[0], wanted))
    return {"furthest": off}


def trainer(way: str, folder: Path) -> Figures:
    """The Trainer under torchrun, by each route to ZeRO, beside DDP on the same ranks and one
    process.
    """
    script, ours = SCRIPTS / "trainer_cases.py", ("ours0", "ours2", "ours3", "callback3", "stock3")
    found = launched.torchrun(script, folder / "ranks", "--cases", "ddp0", *ours, timeout=SECONDS)[
        0
    ]
    plain = launched.alone(script, folder / "alone", "--cases", "ddp0", timeout=SECONDS)["ddp0"]
    assert found["ddp0"]["kind"] == "DistributedDataParallel"
    off = 0.0
    for name in ours:
        assert found[name]["world"] == [2, 2] and found[name]["kind"] == "DeepSpeedEngine", name
        for key in ("loss", "grad_norm"):
            furthest(found[name][key], found["ddp0"][key])
            off = max(off, furthest(found[name][key], plain[key]))
    return {"furthest": off}


def trl(way: str, folder: Path) -> Figures:
    """TRL's SFT, all weights and LoRA, under torchrun at stage 3."""
    script = SCRIPTS / "sft_cases.py"
    given = ("--model", str(_model(folder)))
    found = launched.torchrun(script, folder / "ranks", *given, timeout=SECONDS)[0]
    plain = launched.alone(script, folder / "alone", *given, timeout=SECONDS)
    off = 0.0
    for case, report in plain.items():
        assert found[case]["kind"] == "DeepSpeedEngine", found[case]["kind"]
        for key in ("loss", "grad_norm"):
            off = max(off, furthest(found[case][key], report[key]))
    return {"furthest": off}


def _model(folder: Path) -> Path:
    from tests.integrations.trl.material import save_model, save_rows

    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder)
    save_rows(folder)
    return folder


def lightning(way: str, folder: Path) -> Figures:
    """Lightning's ZeroStrategy at stage 3, on two nodes of one device each."""
    script = SCRIPTS / "lightning_cases.py"
    kind = "cpu" if way == ways.GLOO else "gpu"
    given = ("--accelerator", kind, "--samples", "64", "--cases", "fit", "saved")
    plain = launched.alone(script, folder / "alone", *given, timeout=SECONDS)
    nodes = {
        "MASTER_ADDR": launched.HOST,
        "MASTER_PORT": str(free_port()),
        "LOCAL_RANK": "0",
    }
    out = folder / "nodes"
    out.mkdir(parents=True, exist_ok=True)
    command = [launched.python(), str(script), "--out", str(out), *given]
    command += ["--strategy", "zero_stage_3", "--nodes", "2"]
    logs = [out / f"log-{node}.txt" for node in range(2)]
    own = [{**launched.environment(), **nodes, "NODE_RANK": str(node)} for node in range(2)]
    with (
        launched.running(command, out, logs[0], own[0]) as first,
        launched.running(command, out, logs[1], own[1]) as second,
    ):
        codes = [launched.ended(each, SECONDS) for each in (first, second)]
    assert codes == [0, 0], " ".join(
        [f"the nodes ended with {codes}:", *(log.read_text()[-600:] for log in logs)]
    )
    reports = [json.loads((out / f"report-{node}.json").read_text()) for node in range(2)]
    off = 0.0
    for case in ("fit", "saved"):
        losses = [sum(pair) / 2 for pair in zip(*(each[case]["losses"] for each in reports))]
        off = max(off, furthest(losses, plain[case]["losses"], LIGHTNING_CLOSE))
        weights = [
            torch.load(at / f"{case}.pt", weights_only=True) for at in (out, folder / "alone")
        ]
        oracle.compare_tensors("weights", *weights, LIGHTNING_CLOSE, oracle.ADAM_ROUNDING)
    return {"furthest": off}


LIBRARIES: dict[str, Callable[[str, Path], Figures]] = {
    "Accelerate": accelerate,
    "Trainer": trainer,
    "TRL": trl,
    "Lightning": lightning,
}
PACKAGES = {"Accelerate": "accelerate", "Trainer": "accelerate", "TRL": "trl"}
PACKAGES |= {"Lightning": "lightning"}


def run(name: str, way: str, folder: Path) -> dict[str, Any]:
    """Return the figures of a library, or its failure."""
    with ranks_of(way):
        try:
            return LIBRARIES[name](way, folder)
        except (AssertionError, pytest.fail.Exception) as error:
            return {"failed": " ".join(str(error).split())[-600:]}

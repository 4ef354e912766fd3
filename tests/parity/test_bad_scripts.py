"""Scripts that cannot be compared, or do not end by themselves, under ``hf-zero parity``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

import hf_zero
from hf_zero.errors import DoesNotFitError
from hf_zero.parity import memory
from tests.helpers import launched
from tests.parity.loops import config, loop, stack

MODEL = """
import torch, hf_zero
model = torch.nn.Linear(4, 4)
engine, *_ = hf_zero.initialize(model=model, config={"zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
"""
STEP = "engine.backward(engine(torch.ones(1, 4)).square().mean()); engine.step()"
NO_ENGINE = "without an engine that trains: it calls neither hf_zero.initialize nor a trainer"
SCRIPTS = {
    "no engine": ("print('nothing')", 2, NO_ENGINE),
    "trains nothing": (MODEL, 2, "without a step of the optimizer: it trains nothing"),
    "a terminal": ("input('which model? ')", 2, "pass what it asks for as arguments"),
    "ranks of its own": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)",
        2,
        "starts ranks of its own; pass the script that trains, and let --ranks start its ranks",
    ),
    "broken": (
        "raise OSError('no data')",
        2,
        "the script ended with code 1, so the difference is not hf-zero's",
    ),
    "a setting": (
        MODEL.replace('"SGD"', '"Sgdd"'),
        2,
        "in place of hf-zero the script ended with ConfigError: unknown optimizer type 'Sgdd'",
    ),
    "a part of the engine": (
        f"{MODEL}\n{STEP}\nengine.replace(model)",
        2,
        "hf-zero parity does not compare a script that uses engine.replace",
    ),
    "its own gradients": (
        f"{MODEL}\n{STEP.replace('; engine', '; model.bias.grad.mul_(2); engine')}",
        2,
        "cause: the script uses gradients itself (train.py, line",
    ),
    "does not end": (f"{MODEL}\nwhile True: {STEP}", 0, "equal to torch for 2 steps on 1 rank"),
    "catches everything": (
        f"{MODEL}\nwhile True:\n    try:\n        {STEP}\n    except BaseException: pass",
        0,
        "equal to torch for 2 steps on 1 rank",
    ),
}
FAST = ("trains nothing", "catches everything")
CELLS = [pytest.param(name, marks=() if name in FAST else pytest.mark.long) for name in SCRIPTS]


@pytest.mark.parametrize("name", CELLS)
def test_one_line_says_what_to_do(name: str, tmp_path: Path) -> None:
    text, code, said = SCRIPTS[name]
    script, log = tmp_path / "train.py", tmp_path / "log.txt"
    script.write_text(text)
    words = ["parity", "--ranks", "1", "--steps", "2", "--", str(script)]
    with launched.running([*program(), *words], tmp_path, log) as process:
        assert launched.ended(process, 240.0) == code, log.read_text()
    assert said in " ".join(log.read_text().split())


def program() -> list[str]:
    return [launched.python(), f"{launched.PROGRAMS}/hf-zero"]


@pytest.mark.long
def test_an_interrupt_ends_the_run_and_removes_what_it_wrote(tmp_path: Path) -> None:
    script, log, temporary = tmp_path / "train.py", tmp_path / "log.txt", tmp_path / "temporary"
    temporary.mkdir()
    started = tmp_path / "started"
    wait = f"open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script.write_text(f"import os, time\n{MODEL}\n{STEP}\nengine.save_checkpoint('saved')\n{wait}")
    environment = {**launched.environment(), "TMPDIR": str(temporary)}
    words = ["parity", "--ranks", "1", "--", str(script)]
    # not in a fork of a process that has looked for the folder of temporary files
    command = [sys.executable, program()[1], *words]
    with launched.running(command, tmp_path, log, environment) as process:
        deadline = time.monotonic() + 240
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [*temporary.glob("hf-zero-parity-*/reference/saves")], log.read_text()
        rank = int(started.read_text())
        process.send_signal(signal.SIGINT)
        assert launched.ended(process, 60.0) not in (0, None), log.read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
    assert not [*temporary.glob("hf-zero-parity-*"), *temporary.glob("torchelastic_*")]
    assert not (tmp_path / "saved").exists()


def test_a_reference_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = stack(), config(3, "bf16")
    needed = 20 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 1)
    with pytest.raises(DoesNotFitError, match="holds the whole model on each rank"):
        hf_zero.parity(loop(0, model, settings))
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed)
    assert hf_zero.parity(loop(0, model, settings)).equal

"""The warning about environment variables of hf-zero that are misspelt or have unknown values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from torch import nn

import hf_zero
from hf_zero.cli import doctor
from hf_zero.config import variables

FAULTS = {
    "HF_ZERO_LOGLEVEL": ("debug", "hf-zero has no such variable; did you mean HF_ZERO_LOG_LEVEL?"),
    "HFZERO_TRITON": ("0", "hf-zero has no such variable; did you mean HF_ZERO_TRITON?"),
    "HF_ZERO_COLOUR": (
        "red",
        "hf-zero has no such variable; `hf-zero docs environment` lists the variables",
    ),
    "HF_ZERO_PREFLIGHT": ("nope", "'nope' is unknown and counts as 1; write 0 or 1, or unset it"),
    "HF_ZERO_IO": (
        "thread",
        "'thread' is unknown; write io_uring, threads, python, or unset it",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_remedy(name: str) -> None:
    value, said = FAULTS[name]
    assert [*variables.faults({name: value, "HF_HOME": "/"})] == [(name, said)]


@pytest.mark.parametrize("value", ["0", "Off", " no ", "1", "TRUE", ""])
def test_a_known_value_is_no_fault(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*variables.faults({"HF_ZERO_TRITON": value, "HF_ZERO_HOST": "a"})] == []
    monkeypatch.setenv("HF_ZERO_TRITON", value)
    assert variables.is_off("HF_ZERO_TRITON") == (value in ("0", "Off", " no "))


def test_a_switch_is_read_from_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets.Dataset.map`` replaces ``os.environ`` by a copy."""
    monkeypatch.setattr(os, "environ", {**os.environ, "HF_ZERO_NATIVE": "off"})
    assert variables.is_off("HF_ZERO_NATIVE")


def test_initialize_warns_once_on_rank_0(monkeypatch, caplog) -> None:
    monkeypatch.setenv(variables.WARNED, "")
    monkeypatch.delenv(variables.WARNED)
    for name, (value, _) in FAULTS.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        hf_zero.initialize(nn.Linear(2, 2), "zero1")[0].destroy()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == sorted(f"{name}: {said}" for name, (_, said) in FAULTS.items())
    monkeypatch.delenv(variables.WARNED)
    monkeypatch.setenv("RANK", "1")
    variables.warn_once()
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == len(FAULTS)


def test_a_launch_warns_in_place_of_its_ranks() -> None:
    ask = "import os, hf_zero; print('warned:', 'HF_ZERO_WARNED' in os.environ)"
    done = subprocess.run(
        [sys.executable, "-c", "from hf_zero.cli import main; main()"]
        + ["launch", "--ranks", "1", "--no-python", sys.executable, "-c", ask],
        env={**os.environ, "HF_ZERO_LOGLEVEL": "debug", "HF_ZERO_LOG_LEVEL": "loud"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr.count("did you mean HF_ZERO_LOG_LEVEL?") == 1, done.stderr
    assert done.stderr.count("HF_ZERO_LOG_LEVEL=loud is unknown") == 1, done.stderr
    assert "warned: True" in done.stdout


def test_doctor_shows_the_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_LOGLEVEL", "debug")
    monkeypatch.setenv("HF_ZERO_LOG_LEVEL", "loud")
    found = {each.name: each for each in doctor.examine() if each.part == "environment"}
    assert found["HF_ZERO_LOGLEVEL"].detail == FAULTS["HF_ZERO_LOGLEVEL"][1]
    assert "'loud' is unknown; write debug, info" in found["HF_ZERO_LOG_LEVEL"].detail

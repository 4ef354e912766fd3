"""The warning about environment variables of hf-zero that are misspelt or have unknown values."""

from __future__ import annotations

import os
import sys

import pytest
from torch import nn
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli import doctor
from hf_zero.cli.app import app
from hf_zero.config import variables

UNKNOWN = "hf-zero has no such variable"
FAULTS = {
    "HF_ZERO_LOGLEVEL": ("debug", f"{UNKNOWN}; did you mean HF_ZERO_LOG_LEVEL?"),
    "HFZERO_TRITON": ("0", f"{UNKNOWN}; did you mean HF_ZERO_TRITON?"),
    "HF_ZERO_COLOUR": ("red", f"{UNKNOWN}; `hf-zero docs environment` lists the variables"),
    "HF_ZERO_PREFLIGHT": ("nope", "'nope' is unknown and counts as 1; write 0 or 1, or unset it"),
    "HF_ZERO_IO": ("io", "'io' is unknown; write io_uring, threads, python, or unset it"),
}


def test_a_fault_is_named_with_its_remedy_and_a_known_value_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, (value, said) in FAULTS.items():
        assert [*variables.faults({name: value, "HF_HOME": "/"})] == [(name, said)]
    for value in ("0", "Off", " no ", "1", "TRUE", ""):
        assert [*variables.faults({"HF_ZERO_TRITON": value, "HF_ZERO_HOST": "a"})] == []
        monkeypatch.setenv("HF_ZERO_TRITON", value)
        assert variables.is_off("HF_ZERO_TRITON") == (value in ("0", "Off", " no "))
    # ``datasets.Dataset.map`` replaces ``os.environ`` by a copy
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


def test_a_launch_warns_in_place_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    ranks: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execv", lambda *command: ranks.append({**os.environ}))
    monkeypatch.setattr(os, "environ", {**os.environ, "HF_ZERO_LOGLEVEL": "debug"})
    os.environ.pop(variables.WARNED, None)
    arguments = ["launch", "--ranks", "1", "--no-python", sys.executable]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert len([line for line in heard if "did you mean HF_ZERO_LOG_LEVEL?" in line]) == 1
    assert variables.WARNED in ranks[0]


def test_doctor_shows_the_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_LOGLEVEL", "debug")
    monkeypatch.setenv("HF_ZERO_LOG_LEVEL", "loud")
    found = {each.name: each for each in doctor.examine() if each.part == "environment"}
    assert found["HF_ZERO_LOGLEVEL"].detail == FAULTS["HF_ZERO_LOGLEVEL"][1]
    assert "'loud' is unknown; write debug, info" in found["HF_ZERO_LOG_LEVEL"].detail

"""The pins of constraints.txt agree with each other and with each Python that is promised, by the
metadata of the releases that ``scripts/pins.py`` records.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from scripts import pins as script

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
PINNED: dict[str, str] = script.pins((ROOT / "constraints.txt").read_text())
RECORDED: dict[str, dict[str, Any]] = json.loads(script.RECORD.read_text())


def contradictions(pinned: dict[str, str], python: str) -> list[str]:
    """Return each pair of pins, and each pin and Python, that pip cannot install together on the
    first release of ``python`` ("3.11": 3.11.0) on Linux.
    """
    where = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    found = []
    for name, row in RECORDED.items():
        if not SpecifierSet(row["requires_python"]).contains(f"{python}.0"):
            found.append(f"{name} {row['version']} requires Python {row['requires_python']}")
        for requirement in map(Requirement, row["requires"]):
            other = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate(where)
            if applies and not requirement.specifier.contains(pinned[other], prereleases=True):
                found.append(f"{name} {row['version']} requires {requirement}, not {pinned[other]}")
    return found


def test_the_record_is_of_the_pinned_versions() -> None:
    recorded = {name: row["version"] for name, row in RECORDED.items()}
    assert recorded == PINNED, "run python scripts/pins.py"


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_can_be_installed_together(python: str) -> None:
    assert contradictions(PINNED, python) == []


def test_a_pin_that_contradicts_torch_or_python_is_named() -> None:
    """torch 2.13.0 names the one Triton that its ordinary build is compiled for."""
    (found,) = contradictions({**PINNED, "triton": "3.9.0"}, "3.13")
    assert re.match(r"torch \S+ requires triton==\S+; .*, not 3\.9\.0", found)
    assert "numpy 2.4.6 requires Python >=3.11" in contradictions(PINNED, "3.10")

"""Model types of transformers in which fused kernels are active, beside those that the page of
compatibility counts.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cells import in_one_item

SCRIPT = Path(__file__).parents[3] / "scripts" / "coverage_of_kernels.py"
KEPT = [json.loads(line) for line in SCRIPT.with_suffix(".jsonl").read_text().splitlines()[1:]]
TRAINED = [row for row in KEPT if "right" in row]
OFTEN = ("qwen3_moe", "gpt_oss", "deberta-v2", "xlm", "longformer", "mt5")


def counted() -> Any:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(row: dict[str, Any]) -> None:
    found = counted().row(row["kind"], row["type"])
    assert found["right"], found
    for kernel in ("norms", "activations", "rotary", "qkv"):
        assert found[kernel][0] >= row[kernel][0], (kernel, found, row)
    assert found["loss"] == row["loss"]


@in_one_item([row for row in TRAINED if row["type"] in OFTEN], named=lambda row: row["type"])
def test_a_type_has_the_kernels_it_had(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.long
@in_one_item([row for row in TRAINED if row["type"] not in OFTEN], named=lambda row: row["type"])
def test_every_type_has_the_kernels_it_had(row: dict[str, Any]) -> None:
    check(row)

"""``import hf_zero`` is paid by every process that imports torch: what it loads is listed, not
timed.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import hf_zero
from tests.helpers.commands import completed

ROOT = Path(__file__).resolve().parents[2]
HEAVY = [
    "transformers",
    "accelerate",
    "datasets",
    "triton",
    "peft",
    "lightning",
    "pytorch_lightning",
    "pandas",
    "typer",
    "rich",
    "pydantic",
]


def in_fresh_process(code: str) -> Any:
    result = completed([sys.executable, "-c", code], timeout=300, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def test_importing_loads_neither_hugging_face_nor_triton_nor_cuda() -> None:
    seen = in_fresh_process(
        "import sys, json, torch; before = set(sys.modules); import hf_zero; after "
        "= set(sys.modules)\n"
        f"print(json.dumps({{'heavy': [m for m in {HEAVY} if m in after], 'own': sorted(m for m in "
        "after if m.startswith('hf_zero')),"
        " 'new': sorted(after - before), 'cuda': torch.cuda.is_initialized()}))"
    )
    assert seen["heavy"] == []
    assert seen["cuda"] is False
    assert not [
        name
        for name in seen["own"]
        if name.startswith(("hf_zero.zero", "hf_zero.cli", "hf_zero.checkpoint", "hf_zero.optim"))
    ]


def test_registering_loads_little_of_the_standard_library() -> None:
    """``hf_zero.pth`` does it in each Python process, where ``typing`` would cost the most."""
    code = (
        "import sys, json; before = {*sys.modules}; import hf_zero._autoload as autoload\n"
        "autoload.register(); assert autoload.failure is None\n"
        "print(json.dumps(sorted({*sys.modules} - before)))"
    )
    result = completed([sys.executable, "-S", "-c", code], cwd=ROOT, timeout=60, check=True)
    seen = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert seen <= {*sys.stdlib_module_names, "hf_zero"}
    assert not seen & {"typing", "re", "functools", "collections", "contextlib", "enum", "pathlib"}


def test_the_converter_needs_no_engine() -> None:
    seen = in_fresh_process(
        "import sys, json; from hf_zero.checkpoint import convert_checkpoint\n"
        "print(json.dumps([m for m in sys.modules if m.startswith(('hf_zero.zero.',"
        " 'hf_zero.config'))]))"
    )
    arithmetic = {
        "hf_zero.zero.layout",
        "hf_zero.zero.layout.box",
        "hf_zero.zero.layout.flat_layout",
    }
    assert {*seen} <= arithmetic


def test_import_without_torch_stays_without_torch() -> None:
    seen = in_fresh_process(
        "import sys, json, hf_zero; print(json.dumps({'torch': 'torch' in sys.modules, 'version': "
        "hf_zero.__version__}))"
    )
    assert seen == {"torch": False, "version": hf_zero.__version__}


def test_version_is_the_one_of_the_installed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hf_zero.__version__ == metadata.version("hf-zero")

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    assert hf_zero._version() == "unknown"


@pytest.mark.parametrize("name", hf_zero._EXPORTS)
def test_every_listed_name_is_where_the_list_says(name: str) -> None:
    assert getattr(hf_zero, name) is getattr(importlib.import_module(hf_zero._EXPORTS[name]), name)


def test_an_unknown_name_is_told_for_python_to_name_the_one_that_was_meant() -> None:
    with pytest.raises(AttributeError, match="no attribute 'initialise'") as raised:
        _ = hf_zero.initialise
    assert raised.value.obj is hf_zero and "initialize" in dir(hf_zero)

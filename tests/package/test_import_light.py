"""Imports: what ``import hf_zero`` loads, which every process pays that imports torch; imports from
the package in programs beside it exist.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import hf_zero
from tests.helpers.cells import in_one_item
from tests.helpers.commands import completed

ROOT = Path(__file__).resolve().parents[2]
HEAVY = "transformers accelerate datasets triton peft lightning pytorch_lightning pandas typer rich"
HEAVY += " pydantic"


def test_imports_load_no_more_than_they_need() -> None:
    """Neither Hugging Face, Triton nor CUDA; and the converter no engine."""
    code = (
        "import sys, json, hf_zero; alone = 'torch' in sys.modules; import torch\n"
        "seen = [alone, hf_zero.__version__, torch.cuda.is_initialized(), [*sys.modules]]\n"
        "from hf_zero.checkpoint import convert_checkpoint\n"
        "print(json.dumps([*seen, [*sys.modules]]))"
    )
    result = completed([sys.executable, "-c", code], timeout=300, check=True)
    found = json.loads(result.stdout.splitlines()[-1])
    with_torch, version, cuda, modules, converting = found
    assert with_torch is False and version == hf_zero.__version__ and cuda is False
    assert not {*HEAVY.split()} & {*modules}
    own = tuple(f"hf_zero.{name}" for name in ("zero", "cli", "checkpoint", "optim"))
    assert not [name for name in modules if name.startswith(own)]
    engine = {name for name in converting if name.startswith(("hf_zero.zero.", "hf_zero.config"))}
    layout = "hf_zero.zero.layout"
    assert engine <= {layout, f"{layout}.box", f"{layout}.flat_layout"}


STEPS = """
import json, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step(), optimizer.zero_grad()  # torch's optimizers import its compiler
before = {*sys.modules}
import hf_zero
for stage, kernels in ((3, "off"), (1, "auto")):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "kernels": kernels}
    config["zero_optimization"] = {"stage": stage}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    engine.destroy()
print(json.dumps(sorted({*sys.modules} - before)))
"""
OF_COMPILERS = ("torch._dynamo", "torch._functorch", "torch._inductor", "triton", "sympy")
OF_COMPILERS += ("networkx", "transformers", "huggingface_hub")


def test_a_step_imports_no_compiler_that_nobody_asked_for() -> None:
    """Nor Transformers, for a model of torch: beyond what an optimizer of torch has imported."""
    result = completed([sys.executable, "-c", STEPS], timeout=300, check=True)
    found = json.loads(result.stdout.splitlines()[-1])
    assert "hf_zero.engine" in found
    assert not [name for name in found if name.startswith(OF_COMPILERS)]


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


def test_version_is_that_of_the_file_or_of_the_installed_distribution(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert hf_zero.__version__ == (ROOT / "VERSION").read_text().strip()
    monkeypatch.setattr(hf_zero, "__file__", str(tmp_path / "hf_zero" / "__init__.py"))
    assert hf_zero._version() == metadata.version("hf-zero")

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    assert hf_zero._version() == "unknown"


@in_one_item(hf_zero._EXPORTS)
def test_every_listed_name_is_where_the_list_says(name: str) -> None:
    assert getattr(hf_zero, name) is getattr(importlib.import_module(hf_zero._EXPORTS[name]), name)


def test_an_unknown_name_is_told_for_python_to_name_the_one_that_was_meant() -> None:
    with pytest.raises(AttributeError, match="no attribute 'initialise'") as raised:
        _ = hf_zero.initialise
    assert raised.value.obj is hf_zero and "initialize" in dir(hf_zero)


FOLDERS = ("tests/late", "tests/gpu", "scripts")


def imported(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from hf_zero; the name is empty where the module is meant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_zero":
            yield from ((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            own = (each.name for each in node.names if each.name.split(".")[0] == "hf_zero")
            yield from ((name, "") for name in own)


def missing(source: str) -> list[str]:
    found = []
    for module, name in imported(source):
        try:
            there = importlib.import_module(module)
            if name and not hasattr(there, name):
                importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            found.append(f"{module} {name}: {error}")
    return found


@in_one_item(FOLDERS)
def test_imports_from_the_package_are_there(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [f"{file}: {each}" for file in files for each in missing(file.read_text())] == []

"""Imports go down the layers, and the outside world is met in one place each: read from the
source, module by module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_zero"

# The longest prefix decides. In core/ every module has a row of its own, in the table of its
# README.
CORE_ROW = re.compile(r"^\| (\d) \| `(\w+)\.py` \|", re.MULTILINE)
CORE = {
    f"hf_zero.core.{name}": int(level)
    for level, name in CORE_ROW.findall((PACKAGE / "core" / "README.md").read_text())
}
LAYERS = {
    "hf_zero": 0,
    "hf_zero.config": 0,
    "hf_zero.device": 0,
    "hf_zero.errors": 0,
    "hf_zero.logs": 0,
    "hf_zero.memory": 0,
    "hf_zero.sizes": 0,
    "hf_zero.spans": 0,
    "hf_zero.uncaught": 0,
    "hf_zero.distributed": 0,
    "hf_zero.storage": 1,
    "hf_zero.core": 1,
    **CORE,
    "hf_zero.ops": 1,
    "hf_zero.optim": 2,
    "hf_zero.checkpoint": 3,
    "hf_zero.loading": 3,
    "hf_zero.hosts": 1,
    "hf_zero.preflight": 3,
    "hf_zero.initialize": 3,
    "hf_zero._autoload": 4,
    "hf_zero.integrations": 4,
    "hf_zero.estimate": 5,
    "hf_zero.cli": 5,
}
HUGGING_FACE = {
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "trl",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Everything ``source`` imports, inside functions too, as absolute dotted names; what only
    types need does not count.
    """
    tree = ast.parse(source)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layer(module: str) -> int | None:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in LAYERS:
            return LAYERS[prefix]
    return None


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What ``source`` may not import, standing at ``module``."""
    found = []
    own = layer(module)
    assert own is not None
    # `from a import b` names `a` and `a.b`; where b is a name inside a, the layer of a.b is the
    # layer of a.
    for name in dict.fromkeys(imports(source, module, is_package)):
        top = name.split(".")[0]
        if top == "hf_zero":
            other = layer(name)
            if name != "hf_zero" and other is not None and other > own:
                found.append(f"{module} (layer {own}) imports {name} (layer {other})")
        elif name.startswith("torch.distributed") and module not in (
            "hf_zero.distributed.comm",
            "hf_zero.distributed.axis",
            "hf_zero.uncaught",
        ):
            found.append(f"{module} imports {name}; only distributed/comm.py does")
        elif top in HUGGING_FACE and layer(module) != LAYERS["hf_zero.integrations"]:
            found.append(f"{module} imports {name}; only integrations/ meets Hugging Face")
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    assert not violations(path.read_text(), module_name(path, ROOT), path.name == "__init__.py")


def test_every_module_of_core_has_a_layer_of_its_own() -> None:
    modules = {module_name(path, ROOT) for path in (PACKAGE / "core").rglob("*.py")}
    assert modules - set(LAYERS) == set(), (
        "give each of these a row in the table of hf_zero/core/README.md"
    )


def test_every_layer_is_of_something_that_is_there() -> None:
    there = {module_name(path, ROOT) for path in SOURCES}
    assert set(LAYERS) - there == set(), "these are gone; take out their rows"


@pytest.mark.parametrize(
    ("source", "module", "offender"),
    [
        ("from hf_zero.core.engine import Engine", "hf_zero.core.unit", "hf_zero.core.engine"),
        ("def f():\n    from hf_zero import cli", "hf_zero.core.engine", "hf_zero.cli"),
        ("from ..integrations import accelerate", "hf_zero.core.hooks", "hf_zero.integrations"),
        ("import torch.distributed as dist", "hf_zero.core.hooks", "torch.distributed"),
        ("from torch import distributed", "hf_zero.core.hooks", "torch.distributed"),
        ("import transformers", "hf_zero.checkpoint.convert.export", "transformers"),
        ("from accelerate.state import PartialState", "hf_zero.cli.doctor", "accelerate"),
    ],
)
def test_a_wrong_import_is_seen(source: str, module: str, offender: str) -> None:
    assert any(offender in line for line in violations(source, module))


def test_typing_only_and_downward_imports_pass() -> None:
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hf_zero.core.engine "
        "import Engine\nfrom hf_zero.errors import ConfigError\n"
    )
    assert violations(source, "hf_zero.core.unit") == []

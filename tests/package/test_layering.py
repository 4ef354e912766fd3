"""Imports go down the layers, and the outside world is met in one place each: read from the
source, module by module.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from hf_zero.deepspeed.api import API
from hf_zero.deepspeed.rows import Provided
from tests.helpers.cells import in_one_item
from tests.helpers.house import imports, module_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_zero"

# The longest prefix decides.
LAYERS = {
    "hf_zero": 0,
    "hf_zero.config": 0,
    "hf_zero.device": 0,
    "hf_zero.errors": 0,
    "hf_zero.logging": 0,
    "hf_zero.distributed": 0,
    "hf_zero.offload": 1,
    "hf_zero.compression": 3,
    "hf_zero.zero": 3,
    "hf_zero.zero.layout": 2,
    "hf_zero.zero.reduce": 2,
    "hf_zero.ops": 1,
    "hf_zero.optim": 2,
    "hf_zero.checkpoint": 3,
    "hf_zero.loading": 3,
    "hf_zero.launch": 1,
    "hf_zero.measures": 3,
    "hf_zero.planning": 3,
    "hf_zero.activations": 3,
    "hf_zero.parallel": 3,
    "hf_zero.techniques": 3,
    "hf_zero.engine": 3,
    "hf_zero.initialize": 3,
    "hf_zero._autoload": 4,
    "hf_zero.integrations": 4,
    "hf_zero.deepspeed": 4,
    "hf_zero.planning.activation_memory": 5,
    "hf_zero.planning.estimate": 5,
    "hf_zero.planning.simulation": 5,
    "hf_zero.report": 5,
    "hf_zero.cli": 5,
}
# Of these packages none imports one that stands after it.
STACK = [
    f"hf_zero.{name}"
    for name in (
        "distributed",
        "storage",
        "zero.layout",
        "zero.reduce",
        "zero.gather",
        "zero",
        "compression",
        "checkpoint",
        "activations",
        "parallel",
        "techniques",
        "measures",
        "engine",
        "initialize",
    )
]
# The order of the facade and of what integrations/ holds: a module imports no later one, except
# out of its own folder.
INTEGRATIONS = [
    f"hf_zero.{name}" if name.startswith("deepspeed") else f"hf_zero.integrations.{name}"
    for name in (
        "seams",
        "checkpoint_folders",
        "memory_checkpoints",
        "engine_teardown",
        "deepspeed.facade",
        "finder",
        "datasets",
        "fused",
        "deepspeed",
        "accelerate",
        "peft",
        "transformers",
        "lightning",
        "pytorch_lightning",
        "trl",
    )
]
# What a folder of integrations/ imports of the libraries beside the one it is named after.
OTHER_LIBRARIES = {
    "fused": {"transformers"},
    "deepspeed": {"transformers"},
    "transformers": {"accelerate"},
}
# Libraries of torch that have their own groups and collectives, or need none, and the modules that
# meet them. All else of torch.distributed is met in hf_zero.distributed.
TORCH_LIBRARIES = {
    "torch.distributed.checkpoint": (
        "hf_zero.checkpoint.convert.to_dcp",
        "hf_zero.checkpoint.tensor_part",
    ),
    "torch.distributed.pipelining": ("hf_zero.parallel.pipeline.rank_stages",),
    "torch.distributed.tensor": ("hf_zero.parallel.tensor.dtensors",),
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


def prefixes(module: str) -> Iterator[str]:
    """Return ``module`` and the packages that contain it, the longest first."""
    parts = module.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def layer(module: str) -> int | None:
    return next((LAYERS[prefix] for prefix in prefixes(module) if prefix in LAYERS), None)


def place(module: str) -> int | None:
    """Return the position of ``module`` in the order of integrations/; None if it is not one of its
    folders and files.
    """
    return next(
        (INTEGRATIONS.index(prefix) for prefix in prefixes(module) if prefix in INTEGRATIONS), None
    )


def height(module: str) -> int | None:
    """Return the position of the package of ``module`` in :data:`STACK`, or None."""
    return next((STACK.index(prefix) for prefix in prefixes(module) if prefix in STACK), None)


def library(module: str) -> str:
    """The folder of integrations/ that holds ``module``; ``deepspeed`` for the facade."""
    below = module.removeprefix("hf_zero.").removeprefix("integrations.")
    return below.partition(".")[0]


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return the forbidden imports of ``source``, the text of ``module``."""
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
            here, there = height(module), height(name)
            if here is not None and there is not None and there > here:
                found.append(f"{module} imports {name}, which stands above {STACK[here]}")
            here, there = place(module), place(name)
            if (
                here is not None
                and there is not None
                and there > here
                and library(module) != (library(name))
            ):
                found.append(f"{module} imports {name}, which comes later in integrations/")
        elif name.startswith("torch.distributed") and "hf_zero.distributed" not in prefixes(module):
            if not any(module in TORCH_LIBRARIES.get(each, ()) for each in prefixes(name)):
                found.append(f"{module} imports {name}; only hf_zero.distributed does")
        elif top in HUGGING_FACE and layer(module) != LAYERS["hf_zero.integrations"]:
            found.append(f"{module} imports {name}; only integrations/ meets Hugging Face")
        elif top in HUGGING_FACE:
            own_library = library(module)
            if top != own_library and top not in OTHER_LIBRARIES.get(own_library, ()):
                found.append(f"{module} imports {name}, which is not its library")
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))
INTEGRATION_SOURCES = [
    path for path in SOURCES if path.relative_to(PACKAGE).parts[0] in ("integrations", "deepspeed")
]


@in_one_item(SOURCES, named=lambda path: path.relative_to(ROOT))
def test_imports_go_down(path: Path) -> None:
    assert not violations(path.read_text(), module_name(path, ROOT), path.name == "__init__.py")


def test_every_module_of_integrations_has_a_place() -> None:
    modules = {module_name(path, ROOT) for path in INTEGRATION_SOURCES}
    modules.discard("hf_zero.integrations")
    assert [module for module in sorted(modules) if place(module) is None] == []
    for name in INTEGRATIONS:
        assert name in modules


def test_the_facade_names_nothing_that_comes_after_it() -> None:
    homes = {
        name.home
        for module in API.values()
        for name in module.names.values()
        if isinstance(name, Provided)
    }
    facade = INTEGRATIONS.index("hf_zero.deepspeed")
    assert [home for home in sorted(homes) if (place(home) or 0) > facade] == []
    assert [home for home in sorted(homes) if (layer(home) or 0) > 4] == []


def test_modules_of_integrations_import_each_other_in_no_circle() -> None:
    modules = {module_name(path, ROOT): path for path in INTEGRATION_SOURCES}
    graph = {
        module: {
            name
            for name in imports(path.read_text(), module, path.name == "__init__.py")
            if name in modules and name not in prefixes(module)
        }
        for module, path in modules.items()
    }
    assert tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def test_every_layer_is_of_something_that_is_there() -> None:
    there = {module_name(path, ROOT) for path in SOURCES}
    assert set(LAYERS) - there == set(), "these are gone; take out their rows"


@pytest.mark.parametrize(
    ("source", "module", "offender"),
    [
        (
            "from hf_zero.zero.training_engine import Engine",
            "hf_zero.zero.layout.unit",
            "hf_zero.zero.training_engine",
        ),
        ("def f():\n    from hf_zero import cli", "hf_zero.zero.training_engine", "hf_zero.cli"),
        (
            "from ...integrations import accelerate",
            "hf_zero.zero.gather.hooks",
            "hf_zero.integrations",
        ),
        ("import torch.distributed as dist", "hf_zero.zero.gather.hooks", "torch.distributed"),
        ("from torch import distributed", "hf_zero.zero.gather.hooks", "torch.distributed"),
        (
            "from torch.distributed import checkpoint, isend",
            "hf_zero.checkpoint.tensor_part",
            "torch.distributed.isend",
        ),
        (
            "import torch.distributed.tensor",
            "hf_zero.checkpoint.tensor_part",
            "torch.distributed.tensor",
        ),
        (
            "import hf_zero.offload.nvme_files",
            "hf_zero.distributed.mesh",
            "hf_zero.offload.nvme_files",
        ),
        (
            "import hf_zero.zero.layout.flat_layout",
            "hf_zero.offload.nvme_files",
            "hf_zero.zero.layout.flat_layout",
        ),
        (
            "from hf_zero.activations import policy",
            "hf_zero.zero.training_engine",
            "hf_zero.activations",
        ),
        ("from hf_zero.initialize import initialize", "hf_zero.activations.policy", "initialize"),
        ("import transformers", "hf_zero.checkpoint.convert.export", "transformers"),
        ("from accelerate.state import PartialState", "hf_zero.cli.doctor", "accelerate"),
        ("import lightning", "hf_zero.integrations.peft.adapters", "lightning"),
        (
            "from hf_zero.integrations import lightning",
            "hf_zero.integrations.transformers.trainer",
            "hf_zero.integrations.lightning",
        ),
    ],
)
def test_a_wrong_import_is_seen(source: str, module: str, offender: str) -> None:
    assert any(offender in line for line in violations(source, module))


def test_typing_only_and_downward_imports_pass() -> None:
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from hf_zero.zero.training_engine import TrainingEngine\n"
        "from hf_zero.errors import ConfigError\n"
    )
    assert violations(source, "hf_zero.zero.layout.unit") == []

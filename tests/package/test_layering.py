"""The shape of the package, read from its source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from hf_zero.deepspeed.modules import API, Provided
from tests.helpers import house
from tests.helpers.cells import in_one_item
from tests.helpers.house import imports, module_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hf_zero"

# The longest prefix decides.
LAYERS = {
    f"hf_zero.{name}" if name != "hf_zero" else name: layer
    for layer, names in {
        0: "hf_zero config device errors logging distributed",
        1: "offload ops launch",
        2: "zero.layout zero.gather zero.reduce optim",
        3: "compression zero checkpoint loading measures planning activations parallel techniques "
        "engine",
        4: "_autoload integrations deepspeed setup initialize parity",
        5: "planning.activation_memory planning.estimate planning.estimate_job planning.simulation "
        "report cli",
    }.items()
    for name in names.split()
}
# Of these packages none imports one that stands after it.
ORDER = (
    "distributed zero.layout zero.gather zero.reduce zero compression "
    "measures.metrics_file checkpoint activations parallel techniques measures engine setup "
    "initialize parity"
)
STACK = [f"hf_zero.{name}" for name in ORDER.split()]
# The order of the facade and of what integrations/ holds: a module imports no later one, except
# out of its own folder.
LIBRARIES = (
    "step_points seams save_redirection checkpoint_folders memory_checkpoints signal_saves "
    "engine_protocol data_parallel bitsandbytes deepspeed.facade finder engine_seams datasets "
    "fused deepspeed accelerate peft transformers lightning pytorch_lightning trl probes"
)
INTEGRATIONS = [
    f"hf_zero.{name}" if name.startswith("deepspeed") else f"hf_zero.integrations.{name}"
    for name in LIBRARIES.split()
]
# What a folder of integrations/ imports of the libraries beside the one it is named after.
OTHER_LIBRARIES = {
    "fused": {"transformers"},
    "deepspeed": {"transformers"},
    "transformers": {"accelerate"},
    "probes": {"transformers"},
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
# Modules that reach torch.distributed without an import: the facade gives torch's functions
# DeepSpeed's names, and the doctor asks which backends this torch has.
REACHES = {"torch.distributed", "process_group.dist", "hf_zero.distributed.process_group.dist"}
ATTRIBUTES = {
    "hf_zero.deepspeed.comm",
    "hf_zero.deepspeed.groups",
    "hf_zero.deepspeed.partitioned_tensor",
    "hf_zero.deepspeed.runtime_utils",
    "hf_zero.cli.examination",
}
HUGGING_FACE = {"transformers", "accelerate", "datasets", "peft", "trl", "deepspeed"}
HUGGING_FACE |= {"lightning", "pytorch_lightning"}


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
            later = here is not None and there is not None and there > here
            if later and library(module) != library(name):
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
    if "hf_zero.distributed" not in prefixes(module) and module not in ATTRIBUTES:
        names = {*imports(source, module, is_package), *attributes(source)} & REACHES
        found += [f"{module} reaches {name}" for name in sorted(names)]
    return found


def attributes(source: str) -> Iterator[str]:
    """Everything ``source`` reads of a name by a dot, as it writes it."""
    nodes = ast.walk(house.parsed(source))
    return (ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))


MODULES = house.sources(PACKAGE)
SOURCES = sorted(PACKAGE.rglob("*.py"))
INTEGRATION_SOURCES = [
    path for path in SOURCES if path.relative_to(PACKAGE).parts[0] in ("integrations", "deepspeed")
]


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    yield
    house.parsed.cache_clear()


def test_imports_go_down() -> None:
    found = [violations(text, module, is_package) for module, (text, is_package) in MODULES.items()]
    assert [*chain.from_iterable(found)] == []


def test_every_module_of_integrations_has_a_place() -> None:
    modules = {module_name(path, ROOT) for path in INTEGRATION_SOURCES}
    modules.discard("hf_zero.integrations")
    assert [module for module in sorted(modules) if place(module) is None] == []
    assert {*INTEGRATIONS} <= modules
    there = {module_name(path, ROOT) for path in SOURCES}
    assert set(LAYERS) - there == set(), "these are gone; take out their rows"


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


# A module of hf_zero, and a wrong import in it: the last word is the offender.
WRONG = """
zero.gather.unit: from hf_zero.zero.training_engine import Engine => hf_zero.zero.training_engine
zero.training_engine: def f(): from hf_zero import cli => hf_zero.cli
zero.passes: from ..integrations import accelerate => hf_zero.integrations
zero.passes: import torch.distributed as dist => torch.distributed
zero.passes: from torch import distributed => torch.distributed
checkpoint.tensor_part: from torch.distributed import checkpoint, isend => torch.distributed.isend
checkpoint.tensor_part: import torch.distributed.tensor => torch.distributed.tensor
cli.smoke: import torch; torch.distributed.barrier() => torch.distributed
parallel.pipeline: from hf_zero.distributed.process_group import dist => process_group.dist
parallel.pipeline: process_group.dist.barrier() => process_group.dist
distributed.mesh: import hf_zero.offload.nvme_files => hf_zero.offload.nvme_files
offload.nvme_files: import hf_zero.zero.layout.flat_layout => hf_zero.zero.layout.flat_layout
zero.training_engine: from hf_zero.activations import policy => hf_zero.activations
activations.policy: from hf_zero.initialize import initialize => initialize
checkpoint.convert.export: import transformers => transformers
cli.doctor: from accelerate.state import PartialState => accelerate
integrations.peft.adapters: import lightning => lightning
integrations.transformers.trainer: from hf_zero.integrations import lightning => .lightning
"""


@in_one_item(WRONG.strip().splitlines())
def test_a_wrong_import_is_seen(row: str) -> None:
    module, _, rest = row.partition(": ")
    source, _, offender = rest.partition(" => ")
    assert any(offender in line for line in violations(source, f"hf_zero.{module}"))


def test_a_readme_names_the_files_of_its_folder() -> None:
    unnamed = [
        f"{readme.parent.name}/{source.name}"
        for readme in PACKAGE.rglob("README.md")
        for source in sorted(readme.parent.glob("*.py"))
        if source.name != "__init__.py" and source.name not in readme.read_text()
    ]
    assert unnamed == [], "give each a row in the README of its folder"


@in_one_item([False, True])
def test_there_is_no_circle(everywhere: bool) -> None:
    """Nor one that imports inside functions or for types close: such modules are one concern."""
    # for types, the package's own file imports each public name, wherever it is
    held = {name: each for name, each in MODULES.items() if not everywhere or name != "hf_zero"}
    assert house.circles(house.graph(held, everywhere=everywhere)) == []


@in_one_item(
    [
        ("from p import a", True, True),
        ("from p.a import name", True, True),
        ("import p.a", True, True),
        ("def f():\n    from p import a", False, True),
        ("if TYPE_CHECKING:\n    from p import a", False, True),
        ("try:\n    from .a import name\nexcept ImportError:\n    pass", True, True),
        ("from p import c", False, False),
    ]
)
def test_a_circle_is_seen(case: tuple[str, bool, bool]) -> None:
    other, load, everywhere = case
    texts = {"p.a": "from p import b", "p.b": other, "p.c": ""}
    sources = {"p": ("", True), **{name: (text, False) for name, text in texts.items()}}
    assert bool(house.circles(house.graph(sources, everywhere=False))) is load
    assert bool(house.circles(house.graph(sources, everywhere=True))) is everywhere


RELATIVE = {"as", "how", "of", "those", "what", "where", "which", "whose"}
MAX_RELATIVE = 0.02  # of all docstrings
# one for each of Lightning's packages, which users import from both
NAMES_TAKEN_TWICE = {"ZeroPrecision", "ZeroStrategy"}


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    docstring = re.compile(r'(?:\A|:\n)\s*"""\W*(\w+)')
    words = [word.lower() for text, _ in MODULES.values() for word in docstring.findall(text)]
    relative = [word for word in words if word in RELATIVE]
    assert len(words) > 3000 and len(relative) <= MAX_RELATIVE * len(words), Counter(relative)


def test_no_class_name_is_taken_twice() -> None:
    names = (re.findall(r"(?m)^ *class (\w+)[(:]", text) for text, _ in MODULES.values())
    counts = Counter(chain.from_iterable(names))
    assert {name for name, count in counts.items() if count > 1} == NAMES_TAKEN_TWICE


def test_no_file_has_banners() -> None:
    """House rule 5: a file that needs headings has more than one concern."""
    sources = [
        path
        for top in ("hf_zero", "kernels", "scripts", "tests", "recipes")
        for path in sorted((ROOT / top).rglob("*"))
        if path.suffix in {".py", ".cpp", ".h"}
    ]
    assert len(sources) > 500
    banner = re.compile(r"\s*(#|//)\s?([-=*#~_])\2+(\s|$)")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if banner.match(line)
    ]
    assert not found, "\n".join(found)

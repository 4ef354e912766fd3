"""``import deepspeed``: every name that the Hugging Face libraries use is there, and is
hf-zero's own.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import pickle
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from hf_zero.deepspeed import facade
from hf_zero.deepspeed.modules import API
from hf_zero.errors import ConfigError
from tests.helpers.cells import in_one_item
from tests.helpers.commands import completed


@in_one_item(API)
def test_each_module_imports_by_its_name(path: str) -> None:
    assert importlib.util.find_spec(path) is not None
    module = importlib.import_module(path)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module))
    assert module.__doc__ and module.__spec__ is not None and module.__file__ == facade.ORIGIN
    # `import a.b` finds b through a
    assert path == "deepspeed" or path.rpartition(".")[2] in (
        importlib.import_module(path.rpartition(".")[0]).__all__
    )


def test_a_function_goes_before_a_module_of_its_name() -> None:
    importlib.import_module("deepspeed.utils.z3_leaf_module")
    assert inspect.isfunction(deepspeed.utils.z3_leaf_module)
    importlib.reload(deepspeed.utils)
    assert inspect.isfunction(deepspeed.utils.z3_leaf_module)


def test_names_are_imported_when_they_are_used() -> None:
    code = (
        "import sys, hf_zero._autoload\n"
        "hf_zero._autoload.register()\n"
        "import deepspeed.runtime.zero.stage3, deepspeed.ops.adam\n"
        "print('torch' in sys.modules)\n"
    )
    assert completed([sys.executable, "-c", code], check=True).stdout == "False\n"
    from deepspeed.ops.adam import FusedAdam

    assert FusedAdam is deepspeed.ops.adam.FusedAdam


def test_classes_and_functions_are_pickled_by_name() -> None:
    things = (deepspeed.ops.adam.FusedAdam, deepspeed.pipe.LayerSpec)
    for thing in (*things, deepspeed.init_inference, deepspeed.comm.init_distributed):
        assert pickle.loads(pickle.dumps(thing)) is thing


def test_python_m_runs_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["deepspeed", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("deepspeed.launcher.runner", run_name="__main__")
    assert "usage: deepspeed" in capsys.readouterr().out
    # as a process that multiprocessing spawns imports its parent's main module
    assert runpy.run_module("deepspeed.launcher.runner", run_name="__mp_main__")


# -- what the installed libraries ask for ----------------------------------------------------------


def used_names(source: str) -> Iterator[str]:
    """Dotted names inside deepspeed that a module imports, or reaches through a name it
    imported.
    """
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "deepspeed":
                    known[alias.asname or "deepspeed"] = alias.name if alias.asname else "deepspeed"
                    yield alias.name
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "deepspeed"
        ):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            head, _, rest = chain.partition(".")
            if head in known and all(part.isidentifier() for part in rest.split(".")):
                target = known[head]
                # a module, not a class or its instance
                if target == "deepspeed" or target.rpartition(".")[2].islower():
                    yield f"{target}.{rest}"


def asked_for() -> dict[str, str]:
    names: dict[str, str] = {}
    for library in ("accelerate", "transformers", "peft"):
        spec = importlib.util.find_spec(library)
        assert spec is not None and spec.origin is not None
        for path in Path(spec.origin).parent.rglob("*.py"):
            text = path.read_bytes()
            if re.search(rb"(from|import) deepspeed\b", text) and "test_utils" not in path.parts:
                found = used_names(text.decode(errors="replace"))
                names.update(dict.fromkeys(found, f"{library}/{path.name}"))
    return names


def test_everything_the_installed_libraries_use_is_there() -> None:
    missing = {}
    names = asked_for()
    for name, where in names.items():
        place: Any = deepspeed
        for part in name.split(".")[1:]:
            if not hasattr(place, part):
                missing[name] = where
                break
            place = getattr(place, part)
            if not inspect.ismodule(place):
                break
    assert len(names) > 30
    assert missing == {}


# -- whose the names are ---------------------------------------------------------------------------


def test_comm_is_torch_distributed_for_the_rest() -> None:
    import torch.distributed as dist

    assert deepspeed.comm.all_reduce.__wrapped__ is dist.all_reduce
    assert deepspeed.comm.ReduceOp is dist.ReduceOp
    for module in (deepspeed, deepspeed.ops.adam, deepspeed.comm):
        with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
            _ = module.no_such_name
    lamb = deepspeed.ops.lamb.DeepSpeedCPULamb  # what is not built can be asked about
    assert not isinstance(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), lamb)
    assert issubclass(lamb, torch.optim.Optimizer) and not hasattr(lamb, "__wrapped__")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_comm_starts_a_group_with_the_arguments_of_deepspeed(
    backend: str, heard: list[str]
) -> None:
    assert not deepspeed.comm.is_initialized()
    with pytest.raises(ConfigError, match="no process group exists"):
        deepspeed.init_distributed(dist_init_required=False)
    try:
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=60.0
        )
        assert any("'nccl' is for cuda" in line for line in heard) == (backend == "nccl")
        assert deepspeed.comm.get_backend() == "gloo"
        assert deepspeed.utils.is_initialized()
        assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (0, 1)
        assert deepspeed.utils.groups._get_data_parallel_world_size() == 1
        deepspeed.comm.barrier()
    finally:
        deepspeed.comm.destroy_process_group()


@in_one_item([True, False])
def test_arguments_of_scripts(before: bool) -> None:
    """--local_rank is the script's, which may add it on either side of the call."""
    parser = argparse.ArgumentParser()
    if before:
        parser.add_argument("--local_rank", type=int, default=7)
    assert deepspeed.add_config_arguments(parser) is parser
    if not before:
        parser.add_argument("--local_rank", type=int, default=7)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "zero.json"])
    assert (args.deepspeed, args.deepspeed_config, args.local_rank) == (True, "zero.json", 7)
    assert parser.parse_args([]).deepspeed is False
    assert deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"

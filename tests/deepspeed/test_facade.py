"""``import deepspeed``: every name that the Hugging Face libraries use is there, and is
hf-zero's own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import pickle
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from hf_zero.deepspeed import facade, stated_version
from hf_zero.deepspeed.modules import API
from hf_zero.errors import ConfigError, NotBuiltError
from scripts.deepspeed_names import USED, used_names
from tests.helpers import launched
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


LINE = f"{re.escape(__file__)}:[0-9]+ uses it"
MISSING_NAMES: list[tuple[type[Exception], str, str]] = [
    # the statement, and what its error says besides its line
    (ModuleNotFoundError, "import deepspeed.ops.adamw", "named 'deepspeed.ops.adamw'"),
    (ModuleNotFoundError, "import deepspeed.constants.no_such", "'deepspeed.constants.no_such'"),
    (
        ModuleNotFoundError,
        "from deepspeed.runtime.swap_tensor.utils import swap_in_tensors",
        "swap_tensor.utils': write offload_optimizer",
    ),
    (ModuleNotFoundError, "from deepspeed.elasticity.elastic_agent import A", "with torchrun"),
    (ImportError, "from deepspeed import no_such", "'no_such' from 'deepspeed'"),
    (
        ImportError,
        "from deepspeed.utils.timer import NoopTimer",
        "'NoopTimer' from 'deepspeed.utils.timer': leave the calls out",
    ),
    (ImportError, "from deepspeed.comm import all_gather_coalesced", "all_gather_into_tensor of"),
    (AttributeError, "deepspeed.no_such", "module 'deepspeed' has no attribute 'no_such'"),
    (AttributeError, "deepspeed.comm.no_such()", "'deepspeed.comm' has no attribute 'no_such'"),
]


@in_one_item(MISSING_NAMES)
def test_what_is_missing_names_the_line_that_uses_it(
    row: tuple[type[Exception], str, str],
) -> None:
    error, statement, said = row
    with pytest.raises(error) as caught:
        exec(compile(statement, __file__, "exec"), {"deepspeed": deepspeed})
    assert type(caught.value) is error
    assert re.search(f"{said}.*{LINE}.*; HF_ZERO_BACKEND=deepspeed", str(caught.value))


def test_a_library_that_asks_first_is_told_no() -> None:
    assert importlib.util.find_spec("deepspeed.ops.adamw") is None
    assert importlib.util.find_spec("deepspeed.constants.no_such") is None
    assert not hasattr(deepspeed, "no_such") and getattr(deepspeed, "no_such", 7) == 7
    try:
        from deepspeed.utils.timer import NoopTimer  # type: ignore[import-not-found]
    except ImportError:
        NoopTimer = None
    assert NoopTimer is None


def test_what_is_not_built_names_the_line_that_calls_it() -> None:
    class Own(deepspeed.ops.op_builder.OpBuilder):  # type: ignore[misc]
        def sources(self) -> list[str]:
            return ["own.cu"]

    calls = {
        "replace_transformer_layer is not built": deepspeed.replace_transformer_layer,
        "DSElasticAgent is not built.* with torchrun": deepspeed.elasticity.DSElasticAgent,
        "the operator quantizer": deepspeed.ops.op_builder.QuantizerBuilder().load,
        "the operator Own is not.* torch.utils.cpp_extension.load": Own().load,
    }
    for said, call in calls.items():
        with pytest.raises(NotBuiltError, match=rf"{said}.*{LINE}"):
            call()


def test_another_release_for_a_library_that_accepts_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import torch, deepspeed\n"
        "from importlib.metadata import version\n"
        "from transformers.utils.versions import require_version\n"
        "require_version('deepspeed<=0.18.8')\n"
        "print(deepspeed.__version__, version('deepspeed'), deepspeed.__version_minor__)\n"
    )
    command = [launched.python_with_torch(), "-c", code]
    said = completed(command).stderr
    assert re.search(r"versions.py:\d+, called at <string>:4, refuses version 0.19.8\+hfzero", said)
    assert (
        "HF_ZERO_DEEPSPEED_VERSION states another" in said
        and "deepspeed<=0.18.8 is required" in said
    )
    monkeypatch.setenv("HF_ZERO_DEEPSPEED_VERSION", "0.18.8")
    assert completed(command, check=True).stdout == "0.18.8 0.18.8 18\n"
    monkeypatch.setenv("HF_ZERO_DEEPSPEED_VERSION", "0.18")
    said = completed(command).stderr
    assert "HF_ZERO_DEEPSPEED_VERSION is '0.18'; write a release of DeepSpeed" in said


def test_what_is_no_release_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = facade.FacadeFinder()
    for release in ("0.18.2", "0.18.2+mine.3", "0.18.2.post1"):
        monkeypatch.setattr(facade, "VERSION", release)
        assert finder.find_spec("deepspeed") is not None
    for wrong in (
        "newest",
        "0.x.18.2",
        "deepspeed.0.18.2",
        "0.18.2-junk.3",
        "0.18.2.junk",
        "0.18.2+",
    ):
        monkeypatch.setattr(facade, "VERSION", wrong)
        with pytest.raises(ConfigError, match=f"is '{re.escape(wrong)}'; write a release"):
            finder.find_spec("deepspeed")


LATER = "\n".join(["pass"] * 6)
CHECKS = {
    "assert deepspeed.__version__ < '0.16'": True,
    "found = deepspeed.__version__\nif found > '0.16':\n    raise ImportError('too new')": True,
    f"print(deepspeed.__version__)\n{LATER}\nraise ValueError('another')": False,
    "print(deepspeed.__version__)\nimport json; json.loads('{')": False,
}


def test_a_check_of_the_version_is_told_the_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stated_version, "_reads", {})
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for number, (code, explained) in enumerate(CHECKS.items()):
        with pytest.raises(Exception) as caught:
            exec(compile(code, f"framework_{number}.py", "exec"), {"deepspeed": deepspeed})
        told = stated_version.explain(caught.value)
        assert bool(told) is explained, code
        assert told is None or (
            isinstance(told, ConfigError)
            and f"framework_{number}.py:{len(code.splitlines())}, called at " in str(told)
            and "HF_ZERO_DEEPSPEED_VERSION states another release, one that" in str(told)
        )


def test_python_m_runs_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["deepspeed", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("deepspeed.launcher.runner", run_name="__main__")
    assert "usage: deepspeed" in capsys.readouterr().out
    # as a process that multiprocessing spawns imports its parent's main module
    assert runpy.run_module("deepspeed.launcher.runner", run_name="__mp_main__")


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


def lacks(name: str) -> bool:
    """Return whether the facade lacks the dotted ``name``."""
    place: Any = deepspeed
    for part in name.split(".")[1:]:
        if not hasattr(place, part):
            return True
        place = getattr(place, part)
    return False


def test_everything_the_installed_libraries_use_is_there() -> None:
    names = asked_for()
    assert len(names) > 30
    assert {name: where for name, where in names.items() if lacks(name)} == {}


@in_one_item(json.loads(USED.read_text())["frameworks"])
def test_everything_that_training_frameworks_use_is_there(name: str) -> None:
    """Those whose wheels ``scripts/deepspeed_names.py --wheels`` has read."""
    assert not lacks(name)


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

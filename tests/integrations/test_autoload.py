"""The autoload and the finder: what every Python process of the environment runs, and when it
stands back.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hf_zero
from hf_zero import _autoload
from hf_zero.deepspeed import facade
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from tests.helpers.commands import completed

ROOT = Path(__file__).resolve().parents[2]
FACADE = facade.ORIGIN


def in_fresh_process(code: str, *flags: str, **environment: str) -> Any:
    command, env = [sys.executable, *flags, "-c", code], {**os.environ, **environment}
    run = completed(command, timeout=300, env=env, cwd="/")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def deepspeeds() -> dict[str, ModuleType]:
    """Return what is imported of a package called deepspeed."""
    return {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "deepspeed"}


def ours() -> list[Any]:
    kinds = (facade.FacadeFinder, finder.SeamFinder)
    return [item for item in sys.meta_path if isinstance(item, kinds)]


def found() -> str | None:
    spec = importlib.util.find_spec("deepspeed")
    return spec and spec.origin


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An interpreter in which nothing of hf-zero is registered and nothing called deepspeed is
    imported.
    """
    kept = deepspeeds()
    for name in kept:
        del sys.modules[name]
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each not in ours()])
    monkeypatch.delenv("HF_ZERO_BACKEND", raising=False)
    monkeypatch.delenv("HF_ZERO_AUTOLOAD", raising=False)
    monkeypatch.setattr(_autoload, "failure", None)
    yield
    for name in deepspeeds():
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def installed(bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path in which a deepspeed of another make is installed."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = '0.99'\n")
    (tmp_path / "deepspeed-0.99.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.99\n"
    (tmp_path / "deepspeed-0.99.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "deepspeed" / "__init__.py"


def test_registering_imports_next_to_nothing() -> None:
    seen = in_fresh_process(
        "import sys; before = set(sys.modules); import hf_zero._autoload as a; "
        "a.register(); import json\n"
        "print(json.dumps({'new': sorted(set(sys.modules) - before), 'failure': repr(a.failure)}))"
    )
    assert seen["failure"] == "None"
    assert {name for name in seen["new"] if name.startswith("hf_zero")} == {
        "hf_zero",
        "hf_zero._autoload",
        "hf_zero.integrations",
        "hf_zero.deepspeed",
        "hf_zero.deepspeed.facade",
        "hf_zero.integrations.finder",
    }
    heavy = {"torch", "importlib.metadata", "dataclasses", "inspect", "accelerate", "transformers"}
    assert not heavy & set(seen["new"])


def test_importing_torch_makes_the_libraries_see_deepspeed() -> None:
    seen = in_fresh_process(
        "import torch, json, importlib.metadata as m\n"
        "from accelerate.utils import is_deepspeed_available as a, compare_versions\n"
        "from transformers.integrations import is_deepspeed_available as t\n"
        "from transformers.dependency_versions_check import dep_version_check\n"
        "dep_version_check('deepspeed')\n"
        "print(json.dumps({'a': a(), 't': t(), 'recent': compare_versions('deepspeed', '>=', "
        "'0.19'), 'name': m.metadata('deepspeed')['Name']}))"
    )
    assert seen == {"a": True, "t": True, "recent": True, "name": "deepspeed"}


def test_a_failure_is_kept_and_not_raised(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(finder, "install", broken)
    _autoload.register()
    assert repr(_autoload.failure) == "RuntimeError('broken on purpose')"


def test_it_can_be_turned_off(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "false", "OFF"):
        monkeypatch.setenv("HF_ZERO_AUTOLOAD", value)
        _autoload.register()
        assert not ours() and found() is None


def test_the_package_and_its_parts_are_found_inside_hf_zero(bare: None) -> None:
    """Registering twice registers once."""
    _autoload.register()
    _autoload.register()
    assert len(ours()) == 2 and isinstance(sys.meta_path[-1], facade.FacadeFinder)
    importlib.invalidate_caches()
    assert found() == FACADE and FACADE.startswith(str(Path(hf_zero.__file__).parent))
    spec = facade.FacadeFinder().find_spec("deepspeed")
    assert spec is not None and spec.submodule_search_locations == []
    assert facade.FacadeFinder().find_spec("deepspeed.runtime") is None  # its package first
    assert importlib.util.find_spec("deepspeed.runtime.zero.stage3") is not None
    assert importlib.util.find_spec("deepspeed.runtime.zero.stage4") is None
    assert facade.FacadeFinder().find_spec("deepspeed_extensions") is None
    assert not facade.is_ours(ModuleType("deepspeed"))  # without a file


def test_the_metadata_answers(bare: None, tmp_path: Path) -> None:
    """And is silent to those who list folders."""
    _autoload.register()
    assert importlib.metadata.version("deepspeed") == facade.VERSION
    distribution = importlib.metadata.distribution("DeepSpeed")
    assert distribution.metadata["Name"] == "deepspeed"
    assert distribution.files is None and distribution.requires is None
    assert list(distribution.entry_points) == []
    assert str(distribution.locate_file("comm.py")) == str(Path(facade.FOLDER) / "comm.py")
    instance, context = facade.FacadeFinder(), DistributionFinder.Context
    assert list(instance.find_distributions(context(name="deepspeed")))
    others = (context(), context(name="torch"), context(name="deepspeed", path=[str(tmp_path)]))
    assert not any(list(instance.find_distributions(other)) for other in others)
    assert not list(instance.find_distributions())


def test_an_installed_deepspeed_wins(installed: Path) -> None:
    _autoload.register()
    assert found() == str(installed)
    assert importlib.util.find_spec("deepspeed.comm") is None  # of which the facade has one
    assert importlib.metadata.version("deepspeed") == "0.99"
    assert not finder.chosen()


def test_unless_ours_is_asked_for(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a native route, too."""
    _autoload.register()
    finder.choose()
    assert (found(), importlib.metadata.version("deepspeed")) == (FACADE, facade.VERSION)
    assert len(ours()) == 2
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each not in ours()])
    monkeypatch.setenv("HF_ZERO_BACKEND", "hf_zero")
    _autoload.register()
    assert (found(), importlib.metadata.version("deepspeed")) == (FACADE, facade.VERSION)
    assert finder.chosen()


def test_backends_that_the_environment_asks_for(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ZERO_BACKEND", "deepspeed")
    _autoload.register()
    assert not ours()
    with pytest.raises(ConfigError, match="HF_ZERO_BACKEND=deepspeed"):
        finder.choose()
    monkeypatch.setenv("HF_ZERO_BACKEND", "hf-zero")
    _autoload.register()
    assert isinstance(_autoload.failure, ConfigError)
    # as Accelerate does, and our own routes; torch itself is not kept from being imported
    for ask in (found, finder.choose):
        with pytest.raises(ConfigError, match="HF_ZERO_BACKEND='hf-zero' is not known"):
            ask()


def test_a_native_route_needs_no_autoload(bare: None) -> None:
    finder.choose()
    assert found() == FACADE


def test_nothing_is_registered_while_another_deepspeed_is_imported(installed: Path) -> None:
    importlib.import_module("deepspeed")
    _autoload.register()
    assert not ours() and not finder.chosen()
    other = r"another deepspeed, from '.*deepspeed/__init__.py'.*HF_ZERO_BACKEND=hf_zero"
    with pytest.raises(ConfigError, match=other):
        finder.choose()


def test_a_folder_called_deepspeed_is_not_taken_for_it(
    bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero3.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    # a namespace package
    assert found() is None and importlib.util.find_spec("deepspeed") is not None
    _autoload.register()
    assert found() == FACADE and finder.chosen()


def test_the_wheel_carries_the_pth_and_it_registers(tmp_path: Path) -> None:
    source, site, stub = (tmp_path / name for name in ("source", "site", "stub"))
    left = (".*", "build", "dist", "*.egg-info", "tests", "runs", "__pycache__")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*left))
    # without isolation: the tests' environment has no setuptools-scm, which names the version
    stub.mkdir()
    (stub / "setuptools_scm.py").touch()
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    # what a machine without a compiler gets, in seconds
    env = {**os.environ, "CC": "false", "CXX": "false", "PYTHONPATH": str(stub)}
    built = completed([sys.executable, "-c", build], cwd=source, env=env, timeout=300)
    assert built.returncode == 0, built.stderr
    assert "the native core was not built" in built.stderr + built.stdout
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    (record,) = site.glob("*.dist-info/RECORD")
    assert any(line.startswith("hf_zero.pth,sha256=") for line in record.read_text().splitlines())
    seen = in_fresh_process(
        f"import site, sys, json; site.addsitedir({str(site)!r}); import importlib.util as u, "
        "importlib.metadata as m\n"
        "print(json.dumps({'origin': u.find_spec('deepspeed').origin, 'version': "
        "m.version('deepspeed'), 'torch': 'torch' in sys.modules}))",
        "-S",
        PYTHONPATH="",  # else a working copy named there would answer in its place
    )
    origin = str(site / "hf_zero/deepspeed/api.py")
    assert seen == {"origin": origin, "version": facade.VERSION, "torch": False}

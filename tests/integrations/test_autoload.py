"""The autoload and the finder: what every Python process of the environment runs, and when it
stands back.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import runpy
import sys
from collections.abc import Iterator
from importlib.metadata import DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_zero import _autoload
from hf_zero.deepspeed import facade
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from tests.helpers.commands import completed

ROOT, FACADE = Path(__file__).resolve().parents[2], facade.ORIGIN


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


def test_each_process_of_the_environment_registers_and_imports_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the line that setup.py writes into site-packages."""
    monkeypatch.setattr("setuptools.setup", lambda **given: None)
    monkeypatch.chdir(ROOT)
    written = runpy.run_path("setup.py")
    (tmp_path / written["PTH"]).write_text(written["LINE"])
    code = (
        f"import sys, site, json; sys.path.append({str(ROOT)!r}); before = set(sys.modules)\n"
        f"site.addsitedir({str(tmp_path)!r}); new = sorted(set(sys.modules) - before)\n"
        "import hf_zero._autoload as a, importlib.util as u, importlib.metadata as m\n"
        "print(json.dumps({'new': new, 'failure': repr(a.failure), 'version': "
        "m.version('deepspeed'), 'origin': u.find_spec('deepspeed').origin}))"
    )
    run = completed([sys.executable, "-S", "-c", code], cwd="/", timeout=300, check=True)
    seen = json.loads(run.stdout)
    assert (seen["failure"], seen["origin"], seen["version"]) == ("None", FACADE, facade.VERSION)
    names = "_autoload integrations deepspeed deepspeed.facade integrations.finder"
    own = {name for name in seen["new"] if name.startswith("hf_zero")}
    assert own == {"hf_zero", *(f"hf_zero.{name}" for name in names.split())}
    heavy = {"torch", "importlib.metadata", "dataclasses", "inspect", "accelerate", "transformers"}
    assert not heavy & set(seen["new"])


def test_a_failure_is_kept_and_not_raised(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And registering can be turned off."""
    for value in ("0", "false", "OFF"):
        monkeypatch.setenv("HF_ZERO_AUTOLOAD", value)
        _autoload.register()
        assert not ours() and found() is None
    monkeypatch.delenv("HF_ZERO_AUTOLOAD")

    def broken() -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(finder, "install", broken)
    _autoload.register()
    assert repr(_autoload.failure) == "RuntimeError('broken on purpose')"


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


def test_an_installed_deepspeed_wins_unless_ours_is_asked_for(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a native route, which needs no autoload, or by the variable."""
    _autoload.register()
    assert found() == str(installed)
    assert importlib.util.find_spec("deepspeed.comm") is None  # of which the facade has one
    assert importlib.metadata.version("deepspeed") == "0.99"
    assert not finder.chosen()
    del sys.modules["deepspeed"]  # which the search for its module has imported
    finder.choose()
    assert (found(), importlib.metadata.version("deepspeed")) == (FACADE, facade.VERSION)
    assert len(ours()) == 2
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each not in ours()])
    assert found() == str(installed)
    finder.choose()
    assert found() == FACADE
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each not in ours()])
    monkeypatch.setenv("HF_ZERO_BACKEND", "hf_zero")
    _autoload.register()
    assert (found(), importlib.metadata.version("deepspeed")) == (FACADE, facade.VERSION)
    assert finder.chosen()


def test_another_deepspeed_that_the_environment_asks_for_or_that_is_imported(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("deepspeed")
    _autoload.register()
    assert not ours() and not finder.chosen()
    other = r"another deepspeed, from '.*deepspeed/__init__.py'.*HF_ZERO_BACKEND=hf_zero"
    with pytest.raises(ConfigError, match=other):
        finder.choose()
    # a folder is not taken for it: it is a namespace package
    del sys.modules["deepspeed"]
    installed.unlink()
    importlib.invalidate_caches()
    assert found() is None and importlib.util.find_spec("deepspeed") is not None
    _autoload.register()
    assert found() == FACADE and finder.chosen()
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each not in ours()])
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

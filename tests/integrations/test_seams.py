"""The list of seams against the installed releases, and the import hooks that put them in."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import logging
import pickle
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_zero.integrations import finder, seams
from hf_zero.integrations.seams import Seam
from tests.helpers.cells import in_one_item

ROOT = Path(__file__).resolve().parents[2]


@in_one_item(seams.SEAMS, named=lambda seam: seam.target)
def test_a_seam_is_in_and_the_signature_is_the_one_that_was_read(seam: Seam) -> None:
    _, _, found = seam.locate(importlib.import_module(seam.module))
    function = getattr(found, "__func__", found)
    assert getattr(function, seams.MARK) == seam.target
    assert seams.describe(inspect.unwrap(function)) == seam.signature
    assert importlib.metadata.version(seam.package) in SpecifierSet(seam.versions)


def test_the_least_release_that_pip_installs_is_supported() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(described["optional-dependencies"].values())
    least = {
        asked.name: next(iter(asked.specifier)).version
        for asked in map(Requirement, [*described["dependencies"], *extras])
        if asked.name in finder.WATCHED and asked.specifier
    }
    assert {"accelerate", "transformers", "trl", "peft", "lightning"} <= {*least}
    assert {seam.package for seam in seams.SEAMS} <= set(finder.WATCHED)
    assert len({seam.target for seam in seams.SEAMS}) == len(seams.SEAMS)
    for seam in seams.SEAMS:
        package = seam.package.replace("pytorch_", "")  # the same release under another name
        assert least[package] in SpecifierSet(seam.versions), seam.target


def test_wrappers_live_apart_from_hugging_face() -> None:
    """They are imported in the middle of ``import accelerate``, say."""
    for home in {seam.wrapper.partition(":")[0] for seam in seams.SEAMS}:
        tree = ast.parse(Path(importlib.import_module(home).__file__ or "").read_text())
        # what is under TYPE_CHECKING is never imported
        tree.body = [
            each
            for each in tree.body
            if not (isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")
        ]
        names = compile(tree, home, "exec").co_names
        assert not set(finder.WATCHED) & {name.partition(".")[0] for name in names}


# -- the hooks, on a package of our own ------------------------------------------------------------

BODY = """
import {during}

class Box:
    def open(self, width=1, *, deep: bool = False) -> int:
        return width

    @staticmethod
    def still(width):
        return width

def plain(a, b=2):
    return a + b
"""
INSTALLER = "from hf_zero.integrations import finder\nfinder.install_hooks()\n"


def louder(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * 100

    return replacement


def seam(target: str, signature: str) -> Seam:
    return Seam(f"seamed.parts:{target}", signature, f"{__name__}:louder", ">=1", "a test needs it")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``seamed`` whose module ``parts`` has seams, and an interpreter with the hooks
    alone.
    """
    (tmp_path / "seamed").mkdir()
    (tmp_path / "seamed" / "__init__.py").write_text("")
    (tmp_path / "seamed" / "other.py").write_text("")
    (tmp_path / "seamed" / "parts.py").write_text(BODY.format(during="math"))
    monkeypatch.syspath_prepend(tmp_path)
    kept = [item for item in sys.meta_path if not isinstance(item, finder.SeamFinder)]
    monkeypatch.setattr(sys, "meta_path", kept)
    monkeypatch.setattr(finder, "WATCHED", ("seamed",))
    found = (seam("Box.open", "(self, width=1, *, deep=False)"), seam("plain", "(a, b=2)"))
    monkeypatch.setattr(seams, "SEAMS", found)
    seams.modules.cache_clear()
    yield tmp_path / "seamed"
    seams.modules.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "seamed"]:
        del sys.modules[name]


def parts() -> Any:
    return importlib.import_module("seamed.parts")


def test_a_hook_puts_the_seams_in_and_the_module_looks_untouched(package: Path) -> None:
    """Looking for the module does not put them in; a reload puts them in once."""
    finder.install_hooks()
    spec = importlib.util.find_spec("seamed.parts")
    assert spec is not None and "seamed.parts" not in sys.modules
    module = parts()
    assert module.plain(1) == 300
    assert module.Box().open(4, deep=True) == 400
    assert module.Box.open.__name__ == "open"
    assert inspect.signature(module.plain) == inspect.signature(lambda a, b=2: None)
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
    assert "exec_module" not in vars(module.__loader__)
    assert module.__spec__.loader is module.__loader__
    assert "def open" in inspect.getsource(module)
    assert "return a + b" in inspect.getsource(module.plain)
    assert pickle.loads(pickle.dumps(module.plain)) is module.plain
    assert pickle.loads(pickle.dumps(module.Box())).open(1) == 100
    module = importlib.reload(module)
    assert module.plain(1) == 300
    seams.apply(module)
    assert module.plain(1) == 300
    (package / "parts.py").unlink()
    del sys.modules["seamed.parts"]
    with pytest.raises(ModuleNotFoundError, match=r"seamed\.parts"):
        parts()


@pytest.mark.parametrize("later", ["when asked", "by the next import of the library"])
def test_a_module_that_is_still_running_gets_them_later(package: Path, later: str) -> None:
    (package / "parts.py").write_text(BODY.format(during="seamed.installer"))
    (package / "installer.py").write_text(INSTALLER)
    module = parts()  # in which the hooks are installed
    assert module.plain(1) == 3
    if later == "when asked":
        finder.apply_late()
    else:
        importlib.import_module("seamed.other")
    assert module.plain(1) == 300


def test_a_static_method_stays_one(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "SEAMS", (seam("Box.still", "(width)"),))
    parts()  # imported before
    finder.install_hooks()
    assert parts().Box.still(2) == parts().Box().still(2) == 200
    seams.apply(parts())
    assert parts().Box.still(2) == 200


def test_what_changed_in_another_release_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("hf_zero"), "propagate", True)
    monkeypatch.setattr(seams, "SEAMS", (seam("Box.close", "(self)"), seam("plain", "(a)")))
    finder.install_hooks()
    assert parts().plain(1) == 300
    assert "seamed.parts:Box.close is gone" in caplog.text and "Install seamed>=1" in caplog.text
    assert "seamed.parts:plain takes (a, b=2), hf-zero was read against (a)" in caplog.text

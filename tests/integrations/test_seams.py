"""The list of seams against the installed releases, and the import hooks that put them in."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import pickle
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_zero.errors import ConfigError
from hf_zero.integrations import finder, seams
from hf_zero.integrations.seams import Seam
from tests.helpers.cells import in_one_item

ROOT = Path(__file__).resolve().parents[2]


@in_one_item(seams.SEAMS, named=lambda seam: seam.target)
def test_each_row_holds_for_the_installed_release(seam: Seam) -> None:
    finder.watch(seam.package)
    if seam.since and Version(importlib.metadata.version(seam.package)) < Version(seam.since):
        with contextlib.suppress(ImportError):
            seams.apply(importlib.import_module(seam.module))
            assert seam.target in seams.left_out
        return
    _, _, found = seam.locate(importlib.import_module(seam.module))
    function = getattr(found, "__func__", found)
    assert getattr(function, seams.MARK, None) == seam.target, seams.left_out.get(seam.target)
    assert not (seam.prepare and (seam.renamed or seam.absent))
    original = inspect.unwrap(function, stop=lambda each: not hasattr(each, seams.MARK))
    assert {*seam.uses} <= {*inspect.signature(original).parameters}


def test_the_pinned_releases_are_among_those_that_were_run() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    for seam in seams.SEAMS:
        package = seam.package.replace("pytorch_", "")
        assert pins[package] in SpecifierSet(seam.versions), seam.target


def test_the_least_release_that_pip_installs_is_supported() -> None:
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(described["optional-dependencies"].values())
    least = {
        asked.name: next(iter(asked.specifier)).version
        for asked in map(Requirement, [*described["dependencies"], *extras])
        if asked.name in finder.WATCHED and asked.specifier
    }
    assert {"accelerate", "transformers", "trl", "peft", "lightning"} <= {*least}
    assert {seam.package for seam in seams.SEAMS} <= {*finder.WATCHED, "torch"}
    assert len({seam.target for seam in seams.SEAMS}) == len(seams.SEAMS)
    for name, releases in seams.RELEASES.items():
        if name in finder.WATCHED:
            package = name.replace("pytorch_", "")  # the same release under another name
            assert releases.partition(",")[0] == f">={least[package]}", name
    for seam in seams.SEAMS:
        assert not seam.since or Version(seam.since) > Version(least[seam.package]), seam.target
    assert seams.lacking("accelerate", "1.11.0") and not seams.lacking("accelerate", "1.12.0")
    assert seams.lacking("trl", "1.10.0") and not seams.lacking("trl", "1.11.0")


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


def louder(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) * 100


def only_of_width(original: Callable[..., Any], width: Any) -> Any:
    return original(width)


def positional(original: Callable[..., Any], a: Any, b: Any = 3) -> Any:
    return original(a, b)


def later(original: Callable[..., Any], first: Any, gone: Any, third: Any = 2) -> Any:
    return (gone, original(first, gone, third=third), original(first=first, gone=4))


def choosy(original: Callable[..., Any]) -> Callable[..., Any]:
    raise ConfigError("answers 3 for 1")


def seam(target: str, wrapper: Any = louder, uses: tuple[str, ...] = (), prepare: str = "") -> Seam:
    wrapper = f"{__name__}:{wrapper.__name__}"
    return Seam(f"seamed.parts:{target}", wrapper, "is not loud", uses, prepare)


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
    monkeypatch.setattr(seams, "SEAMS", (seam("Box.open"), seam("plain")))
    monkeypatch.setattr(seams, "left_out", {})
    monkeypatch.setitem(seams.RELEASES, "seamed", ">=1,<9")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"7.1 of {name}")
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


def lower(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) - 1


@pytest.mark.parametrize("imported", [True, False])
def test_rows_are_added_around_those_that_stand(package: Path, imported: bool) -> None:
    finder.install_hooks()
    if imported:
        assert parts().plain(1) == 300
    for _ in range(2):
        seams.add_rows(seam("plain", lower), seam("Box.still", lower))
        assert parts().plain(1) == 299
        assert parts().Box.still(4) == 3 and parts().Box().open(4) == 400
    assert len(seams.SEAMS) == 4


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


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_package_is_watched_from_a_call_on(
    package: Path, monkeypatch: pytest.MonkeyPatch, imported: str
) -> None:
    monkeypatch.setattr(finder, "WATCHED", ())
    finder.install_hooks()
    assert parts().plain(1) == 3
    if imported == "after":
        del sys.modules["seamed.parts"]
    for _ in range(2):
        finder.watch("seamed")
        assert parts().plain(1) == 300


def test_a_row_describes_the_parameters_of_earlier_releases(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(seam("plain", later), renamed={"first": "a", "third": "b"}, absent=("gone",))
    monkeypatch.setattr(seams, "SEAMS", (row,))
    finder.install_hooks()
    plain = parts().plain
    assert plain(1) == (None, 3, 3)
    assert plain(1, 5) == plain(1, b=5) == plain(b=5, a=1) == (None, 6, 3)
    with pytest.raises(TypeError):
        plain(1, c=5)
    sys.modules.pop("seamed.parts")
    monkeypatch.setattr(seams, "SEAMS", (replace(row, renamed={"first": "a"}),))
    assert parts().plain(1, 5) == 6  # its last parameter is called otherwise
    assert set(seams.left_out) == {"seamed.parts:plain"}


def test_a_row_that_does_not_hold_leaves_its_symbol_alone_and_says_so_once(
    package: Path, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> None:
    rows = {
        "Box.close": (replace(seam("Box.close"), since="8"), "is missing"),
        "Box.open": (
            seam("Box.open", only_of_width),
            "takes (self, width=1, *, deep=False), and hf-zero calls it as (width)",
        ),
        "Box.still": (
            seam("Box.still", uses=("height",)),
            "takes (width), and hf-zero calls it as (*args, **kwargs) with height",
        ),
        "plain": (
            seam("plain", positional),  # another default
            "takes (a, b=2), and hf-zero calls it as (a, b=3)",
        ),
        "late": (seam("late", prepare=f"{__name__}:choosy"), "answers 3 for 1"),
    }
    monkeypatch.setattr(seams, "SEAMS", tuple(row for row, _ in rows.values()))
    (package / "parts.py").write_text(BODY.format(during="math") + "def late(a):\n    return a\n")
    finder.install_hooks()
    module = parts()
    seams.apply(module)
    assert (module.plain(1), module.late(1), module.Box().open(4)) == (3, 1, 4)
    assert module.Box.still(2) == 2
    expected = [
        f"seamed 7.1 of seamed: seamed.parts:{target} {reason}. It stays as it is, and this part "
        f"of hf-zero is off: {row.wrapper} (is not loud). Install seamed{row.versions}, or a "
        "release of hf-zero that knows it"
        for target, (row, reason) in rows.items()
    ]
    assert rows["Box.close"][0].versions == ">=8,<9"
    assert heard == expected
    assert set(seams.left_out) == {f"seamed.parts:{target}" for target in rows}

"""No modules of the package import each other in a circle, read from the source.

A circle at load time is an error. One that imports inside functions or for types close is a sign of
two modules that are one concern: those that there are stand in a list, which may only get shorter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.unit.test_layering import PACKAGE, ROOT, imports, module_name

# closed by imports inside functions or for types alone
CIRCLES = {
    ("hf_zero.checkpoint.async_save", "hf_zero.checkpoint.save_sharded"),
    ("hf_zero.checkpoint.foreign", "hf_zero.checkpoint.reader"),
    ("hf_zero.checkpoint.foreign.deepspeed", "hf_zero.checkpoint.foreign.universal"),
    ("hf_zero.core.flat_buffer", "hf_zero.core.unit"),
    ("hf_zero.errors", "hf_zero.uncaught"),
    ("hf_zero.ops.blocks", "hf_zero.ops.reference"),
    ("hf_zero.ops.sparse_attention.layouts", "hf_zero.ops.sparse_attention.registry"),
}


def at_load_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The import statements that run when the module is loaded; what only types need does not."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(statement.test):
                yield from at_load_time(statement.body)
            yield from at_load_time(statement.orelse)
        elif isinstance(statement, ast.Try):
            for part in (statement.body, *(each.body for each in statement.handlers)):
                yield from at_load_time(part)
            yield from at_load_time([*statement.orelse, *statement.finalbody])
        elif isinstance(statement, ast.With | ast.ClassDef):
            yield from at_load_time(statement.body)


def graph(sources: Mapping[str, tuple[str, bool]], everywhere: bool) -> dict[str, set[str]]:
    """What each module of ``sources`` (its text, and whether it is a package's ``__init__``)
    imports of the others; ``everywhere``: inside functions and for types, too.
    """
    found = {}
    for module, (text, is_package) in sources.items():
        tree = ast.parse(text)
        statements = ast.walk(tree) if everywhere else at_load_time(tree.body)
        named = set()
        for statement in statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = list(imports(ast.unparse(statement), module, is_package))
                inner = {name for name in names if name in sources}
                # `from a import b` names a as well, which counts where b is no module of its own
                base = names[0] if isinstance(statement, ast.ImportFrom) else None
                submodules = inner - {base}
                if base in inner and len(submodules) == len(statement.names):
                    inner = submodules
                named |= inner
        found[module] = named - {module}
    return found


def circles(edges: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Sets of modules each of which reaches all others of its set, sorted."""
    reached = {}
    for module in edges:
        seen, waiting = set(), list(edges[module])
        while waiting:
            if (each := waiting.pop()) not in seen:
                seen.add(each)
                waiting += edges[each]
        reached[module] = seen
    return sorted(
        {
            tuple(sorted(other for other in reached[module] if module in reached[other]))
            for module in edges
            if module in reached[module]
        }
    )


SOURCES = {
    module_name(path, ROOT): (path.read_text(), path.name == "__init__.py")
    for path in sorted(Path(PACKAGE).rglob("*.py"))
}


def test_no_circle_at_load_time() -> None:
    assert circles(graph(SOURCES, everywhere=False)) == []


def test_circles_closed_inside_functions_only_get_fewer() -> None:
    found = circles(graph(SOURCES, everywhere=True))
    assert set(found) == CIRCLES, "a new circle, or one that is gone: take out its row"


@pytest.mark.parametrize(
    ("other", "load", "everywhere"),
    [
        ("from p import a", True, True),
        ("from p.a import name", True, True),
        ("import p.a", True, True),
        ("def f():\n    from p import a", False, True),
        ("if TYPE_CHECKING:\n    from p import a", False, True),
        ("try:\n    from .a import name\nexcept ImportError:\n    pass", True, True),
        ("from p import c", False, False),
    ],
)
def test_a_circle_is_seen(other: str, load: bool, everywhere: bool) -> None:
    sources = {
        "p": ("", True),
        "p.a": ("from p import b", False),
        "p.b": (other, False),
        "p.c": ("", False),
    }
    assert bool(circles(graph(sources, everywhere=False))) is load
    assert bool(circles(graph(sources, everywhere=True))) is everywhere

"""What a package's source shows: imports and their circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

parsed = cache(ast.parse)
"""The tree of a source, which several measures read."""


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(package: Path) -> dict[str, tuple[str, bool]]:
    """The text of each module of ``package``, and whether it is a package's ``__init__``."""
    return {
        module_name(path, package.parent): (path.read_text(), path.name == "__init__.py")
        for path in sorted(package.rglob("*.py"))
    }


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Everything ``source`` imports, inside functions too, as absolute dotted names; what only
    types need does not count.
    """
    typing_only = set[int]()
    for node in ast.walk(parsed(source)):  # a statement comes before those inside it
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only |= {id(each) for statement in node.body for each in ast.walk(statement)}
        elif isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in typing_only:
            yield from imported(node, module, is_package)


def imported(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted names of one statement in ``module``; of ``from a import b`` first a."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        package = module.split(".") if is_package else module.split(".")[:-1]
        base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
    yield base
    yield from (f"{base}.{alias.name}" for alias in node.names)


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
    """Return the modules of ``sources`` that each of them imports. A source is its text, and
    whether it is a package's ``__init__``; ``everywhere``: include imports inside functions and for
    types.
    """
    found = {}
    for module, (text, is_package) in sources.items():
        tree = parsed(text)
        statements = ast.walk(tree) if everywhere else at_load_time(tree.body)
        named = set()
        for statement in statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = list(imported(statement, module, is_package))
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

"""Measures of a package's source: imports and their circles, files and lines, widths of classes
and lengths of functions.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(package: Path) -> dict[str, tuple[str, bool]]:
    """The text of each module of ``package``, and whether it is a package's ``__init__``."""
    return {
        module_name(path, package.parent): (path.read_text(), path.name == "__init__.py")
        for path in sorted(package.rglob("*.py"))
    }


# ---- imports ----


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Everything ``source`` imports, inside functions too, as absolute dotted names; what only
    types need does not count.
    """
    tree = ast.parse(source)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
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


# ---- widths and lengths ----


@dataclass(frozen=True)
class ClassWidth:
    """A class: how many attributes its methods set on ``self``, how many parameters its
    ``__init__`` takes beside ``self``, and whether it is a frozen dataclass.
    """

    name: str  # module and class
    attributes: int
    parameters: int
    frozen: bool


def class_widths(modules: Mapping[str, tuple[str, bool]]) -> list[ClassWidth]:
    """Every class of ``modules``; for a dataclass both counts are that of its fields."""
    return [
        _class_width(module, node)
        for module, (text, _) in modules.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]


def _class_width(module: str, node: ast.ClassDef) -> ClassWidth:
    decorators = [ast.unparse(each) for each in node.decorator_list]
    dataclass_like = [each for each in decorators if each.split("(")[0].endswith("dataclass")]
    attributes, parameters = set[str](), 0
    for statement in node.body:
        if dataclass_like and isinstance(statement, ast.AnnAssign):
            attributes.add(ast.unparse(statement.target))
    if dataclass_like:
        parameters = len(attributes)
    for method in (each for each in node.body if isinstance(each, FUNCTIONS)):
        if "staticmethod" not in map(ast.unparse, method.decorator_list) and method.args.args:
            attributes |= set(_set_on(method, method.args.args[0].arg))
        if method.name == "__init__":
            parameters = parameter_count(method) - 1
    return ClassWidth(
        f"{module}.{node.name}",
        len(attributes),
        parameters,
        any("frozen=True" in each for each in dataclass_like),
    )


def _set_on(method: ast.AST, name: str) -> Iterator[str]:
    """The attributes that ``method`` sets on its first argument, ``name``."""
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == name
        ):
            yield node.attr


def parameter_count(function: FUNCTIONS) -> int:
    """Return the number of parameters of ``function``, ``*args`` and ``**kwargs`` included."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len(named) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def function_lengths(modules: Mapping[str, tuple[str, bool]]) -> dict[str, int]:
    """Lines of each function of ``modules``, from its first decorator to its end."""
    found: dict[str, int] = {}
    for module, (text, _) in modules.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, FUNCTIONS):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                assert node.end_lineno is not None
                key = f"{module}.{node.name}"
                found[key] = max(found.get(key, 0), node.end_lineno - first + 1)
    return found


def packages(modules: Mapping[str, tuple[str, bool]]) -> dict[str, tuple[int, int, int]]:
    """Return files, lines, and lines of the longest file, of each folder directly under the
    package; files in no folder count as the package itself.
    """
    files, lines = Counter[str](), Counter[str]()
    longest: dict[str, int] = {}
    for module, (text, is_package) in modules.items():
        parts = module.split(".")
        inside = len(parts) > 2 or (len(parts) == 2 and is_package)
        folder = ".".join(parts[: 2 if inside else 1])
        count = len(text.splitlines())
        files[folder] += 1
        lines[folder] += count
        longest[folder] = max(longest.get(folder, 0), count)
    return {folder: (files[folder], lines[folder], longest[folder]) for folder in sorted(files)}


def inner_arrows(edges: Mapping[str, set[str]], package: str) -> int:
    """Return the number of imports from one module of ``package`` to another."""
    prefix = package + "."
    return sum(
        module.startswith(prefix) and other.startswith(prefix)
        for module, others in edges.items()
        for other in others
    )

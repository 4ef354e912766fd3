"""Faults of ``scripts/mutants``, seeded into the functions of this process."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "scripts" / "mutants"


def read(name: str) -> dict[str, str]:
    """The fault ``name``."""
    rows = (
        row for file in FILES.glob("*.toml") for row in tomllib.loads(file.read_text())["fault"]
    )
    return next(row for row in rows if row["name"] == name)


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Context in which the functions that the fault ``name`` changes run its code."""
    row = read(name)
    module = import_module(row["file"].removesuffix(".py").replace("/", "."))
    path = str(module.__file__)
    text = Path(path).read_text()
    find, replace = row["find"].strip("\n"), row["replace"].strip("\n")
    assert text.count(find) == 1, name
    pairs = zip(_functions(text, path), _functions(text.replace(find, replace), path), strict=True)
    # compared without the places of lines, which an edit above moves
    changed = {_place(one): other for one, other in pairs if _contents(one) != _contents(other)}
    found = [
        (function, function.__code__)
        for function in _functions_of(vars(module), module.__name__)
        if _place(function.__code__) in changed
    ]
    assert found, f"no function of {path} has the code that {name} changes"
    for function, code in found:
        function.__code__ = changed[_place(code)]
    try:
        yield
    finally:
        for function, code in found:
            function.__code__ = code


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _functions_of(names: Mapping[str, object], module: str) -> Iterator[FunctionType]:
    """The functions of ``module`` among ``names`` and in their classes, without decorators."""
    for value in names.values():
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions_of(vars(value), module)
            continue
        parts = ["fget", "fset", "__func__", "func"]
        for item in (value, *(getattr(value, part, None) for part in parts)):
            inner = inspect.unwrap(item) if callable(item) else None
            if isinstance(inner, FunctionType) and inner.__module__ == module:
                yield inner


def _functions(text: str, path: str) -> list[CodeType]:
    """The functions of the source ``text``, those of its classes, too, in order."""
    found: list[CodeType] = []

    def walk(code: CodeType) -> None:
        for item in code.co_consts:
            if not isinstance(item, CodeType):
                continue
            if item.co_flags & 1:  # CO_OPTIMIZED: a function, not the body of a class
                found.append(item)
            else:
                walk(item)

    walk(compile(text, path, "exec", dont_inherit=True))
    return found


def _contents(code: CodeType) -> tuple[object, ...]:
    inner = [_contents(item) if isinstance(item, CodeType) else item for item in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, tuple(map(repr, inner))

"""Selection of DeepSpeed's tests that use its public names alone, by their imports and names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hf_zero.deepspeed.modules import API

KINDS = ("public", "mixed", "internals")


def names_used(tree: ast.AST) -> Iterator[str]:
    """Names that a test takes from deepspeed's modules: imported, or as attributes of a module."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "deepspeed":
                    yield from (alias.name,) if "." in alias.name else ()
                    modules[alias.asname or "deepspeed"] = (
                        alias.name if alias.asname else "deepspeed"
                    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            modules.pop(node.id, None)  # a variable of the same name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value, modules)
            if owner in API and isinstance(node.ctx, ast.Load):
                yield f"{owner}.{node.attr}"


def dotted(node: ast.AST, modules: Mapping[str, str]) -> str:
    """``a.b.c`` as the name of a module; "" for anything else."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, modules)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def known(name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    return name in API or (
        module in API and (leaf in API[module].names or bool(API[module].others))
    )


def kind_of(file: Path) -> str:
    found = [known(name) for name in names_used(ast.parse(file.read_text()))]
    return "public" if all(found) else "mixed" if any(found) else "internals"


def about(unit: Path, file: str) -> dict[str, Any]:
    tree = ast.parse((unit / file).read_text())
    tests = private_tests(tree, helpers(unit.parent, tree))
    return {"kind": kind_of(unit / file), "private": sorted(tests)}


def helpers(tests: Path, tree: ast.Module) -> dict[str, ast.AST]:
    """The functions of the files below ``tests`` that a test imports from, by name."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unit."):
            file = tests / (node.module or "").replace(".", "/")
            body = ast.parse(file.with_suffix(".py").read_text()).body
            found.update((each.name, each) for each in body if isinstance(each, ast.FunctionDef))
    return found


def private_tests(
    tree: ast.Module, helpers: Mapping[str, ast.AST] = MappingProxyType({})
) -> set[str]:
    """``Class::test`` of the tests that use private attributes of deepspeed's objects, themselves
    or by methods of their class, functions of the same file or of ``helpers``.
    """
    bodies = dict(helpers)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bodies[node.name] = node
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    bodies[f"{node.name}::{item.name}"] = item
    private = {name for name, body in bodies.items() if any(map(is_private, ast.walk(body)))}
    while more := {
        name
        for name, body in bodies.items()
        for node in ast.walk(body)
        if name not in private and called(node, name.rpartition("::")[0]) in private
    }:
        private |= more
    tests = (name for name in bodies if name.rpartition("::")[2].startswith("test"))
    return {name for name in tests if name in private}


def called(node: ast.AST, owner: str) -> str:
    """The name, as ``Class::method`` or of a function, that ``node`` of a body of the class
    ``owner`` names; "" for anything else.
    """
    if isinstance(node, ast.Name):
        return node.id
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return f"{owner}::{node.attr}" if own and node.value.id == "self" else ""


def is_private(node: ast.AST) -> bool:
    """Return whether ``node`` asks another object than ``self`` for ``_name``, or makes one with
    it.
    """
    if isinstance(node, ast.keyword):
        return (node.arg or "").startswith("_")
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "torch")
        return node.attr.startswith("_") and not node.attr.startswith("__") and not own
    if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
        called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant)]
        return called in ("getattr", "setattr", "hasattr", "patch", "object") and any(
            str(word).rpartition(".")[2].startswith("_") for word in words
        )
    return False

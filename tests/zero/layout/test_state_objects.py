"""The state of a unit is changed by its owner alone: what a file outside writes to the attributes
of ``FlatBuffer``, ``GradientBuffer`` and ``OptimizerShard``, read from the source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "hf_zero"
OWNERS = {
    "FlatBuffer": "zero/layout/flat_buffer.py",
    "GradientBuffer": "zero/layout/gradient_buffer.py",
    "OptimizerShard": "zero/layout/optimizer_shard.py",
}
# How the package names what holds one of these objects: the receivers of attributes whose names
# other classes have, too.
NAMES = {"flat", "gradient", "optimizer_shard", "shard"}


def owned(tree: ast.AST) -> Iterator[str]:
    """Attributes that the methods of a class set on ``self``."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, (ast.Store, ast.Del))
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def class_of(source: str, name: str) -> ast.ClassDef:
    return next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == name
    )


@cache
def attributes() -> set[str]:
    """Return the attributes of the three objects."""
    return {
        attribute
        for name, path in OWNERS.items()
        for attribute in owned(class_of((PACKAGE / path).read_text(), name))
    }


@cache
def shared() -> set[str]:
    """Attributes that other classes have, too."""
    return {
        attribute
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in OWNERS.values()
        for attribute in owned(ast.parse(path.read_text()))
    }


def writes(source: str) -> list[str]:
    """Assignments in ``source``, also augmented ones and ``del``, to an attribute of these
    objects.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, (ast.Store, ast.Del))
            and node.attr in attributes()
        ):
            receiver = node.value
            last = receiver.attr if isinstance(receiver, ast.Attribute) else ast.unparse(receiver)
            theirs = last in NAMES or last.endswith(("_flat", "_gradient"))
            if theirs or node.attr not in shared():
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_file_writes_the_state_of_another():
    found = {
        str(path.relative_to(PACKAGE)): writes(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in OWNERS.values()
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "flat.gradient.state = GradState.EMPTY",
        "flat.full, x = 1, 2",
        "unit.flats[0].gradient.used |= 3",
        "flat.optimizer_shard.finish_update = None",
        "del self._flat.full",
        "each.grad_sq_norm = None",
    ],
)
def test_such_a_write_is_found(line):
    assert len(writes(line)) == 1

"""Nothing compares tensors by value where identity is meant: ``==`` of two tensors is a tensor, or
an error where their sizes differ.

``list.remove``, ``in``, ``index`` and ``count`` compare with ``==``, and so do dataclasses and
named tuples field by field. Read from the sources: mypy has every container that begins empty
annotated, and the annotation tells what it holds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.cells import in_one_item

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("hf_zero", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "triton_kernels" not in path.parts
]
IN_ORDER = {"list", "deque", "tuple", "Sequence", "Iterable", "Collection", "List", "Tuple"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BY_VALUE = {"remove", "index", "count"}


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def mentions(annotation: ast.AST | None, names: set[str]) -> bool:
    return annotation is not None and any(name_of(node) in names for node in ast.walk(annotation))


def holds(annotation: ast.AST | None, names: set[str]) -> bool:
    """Whether ``annotation`` is of a container whose elements, compared one by one, are or
    contain one of ``names``.
    """
    if isinstance(annotation, ast.BinOp):  # a | b
        return holds(annotation.left, names) or holds(annotation.right, names)
    if not isinstance(annotation, ast.Subscript):
        return False
    outer = name_of(annotation.value)
    if outer in ("dict", "Mapping"):  # ``in`` looks at keys; values() of one is not kept
        return False
    return outer in IN_ORDER and mentions(annotation.slice, names)


def is_dataclass(node: ast.ClassDef) -> tuple[bool, bool]:
    """(whether it is one, whether it compares by value)."""
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if name_of(call.func if call else decorator) == "dataclass":
            keywords = call.keywords if call else []
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
            return True, given.get("eq") != "False"
    return False, False


def fields(node: ast.ClassDef, names: set[str]) -> Iterator[str]:
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not mentions(statement.annotation, names):
            continue
        text, kind = ast.unparse(statement), ast.unparse(statement.annotation)
        if "compare=False" not in text and "Callable" not in kind:
            yield name_of(statement.target)


def findings(sources: dict[str, str]) -> list[str]:
    """Return the places that compare tensors, or objects that contain some, by value."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    classes = [
        (path, node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    found = []
    values = {"Tensor"}  # and the named tuples that hold some
    for path, node in classes:
        dataclass, compares = is_dataclass(node)
        tuples = any(name_of(base) == "NamedTuple" for base in node.bases)
        if tuples and list(fields(node, {"Tensor"})):
            values.add(node.name)
        if dataclass and compares and (held := list(fields(node, {"Tensor"}))):
            found.append(f"{path}:{node.lineno} {node.name} compares its tensors {held}: eq=False")
    for path, tree in trees.items():
        found += [f"{path}:{line}" for line in _compared(tree, values)]
    return found


def _compared(tree: ast.Module, values: set[str]) -> Iterator[str]:
    attributes = {
        name_of(node.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and holds(node.annotation, values)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    for scope in [tree, *functions]:
        own = _own(scope)
        containers, tensors = _annotated(scope, own, values)

        def kept(node: ast.AST, containers: set[str] = containers) -> bool:
            return name_of(node) in (attributes if isinstance(node, ast.Attribute) else containers)

        def tensor(node: ast.AST, tensors: set[str] = tensors) -> bool:
            return isinstance(node, ast.Name) and node.id in tensors

        for node in own:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in BY_VALUE
                and node.args
            ):
                if kept(node.func.value) or tensor(node.args[0]):
                    yield f"{node.lineno} {ast.unparse(node)}"
            elif isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                membership = any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops)
                equality = any(isinstance(op, (ast.Eq, ast.NotEq)) for op in node.ops)
                # an optimizer's dict, which has tensors for keys
                membership = membership and name_of(sides[-1]) != "state"
                if (membership and (kept(sides[-1]) or tensor(sides[0]))) or (
                    equality and any(map(kept, sides))
                ):
                    yield f"{node.lineno} {ast.unparse(node)}"


def _own(scope: ast.AST) -> list[ast.AST]:
    """Return the nodes of ``scope``, but not those in functions inside it."""
    found, left = [], [scope]
    while left:
        children = ast.iter_child_nodes(left.pop())
        own = [each for each in children if not isinstance(each, FUNCTIONS)]
        found += own
        left += own
    return found


def _annotated(scope: ast.AST, own: list[ast.AST], values: set[str]) -> tuple[set[str], set[str]]:
    """Names in ``scope`` of containers that hold tensors, and of tensors."""
    assigned = [node for node in own if isinstance(node, ast.AnnAssign)]
    named = [(name_of(node.target), node.annotation) for node in assigned]
    if isinstance(scope, FUNCTIONS):
        given = [*scope.args.args, *scope.args.kwonlyargs]
        named += [(each.arg, each.annotation) for each in given if each.annotation is not None]
    containers = {name for name, annotation in named if holds(annotation, values)}
    return containers, {name for name, annotation in named if name_of(annotation) in values}


def test_no_tensors_are_compared_where_identity_is_meant() -> None:
    assert not findings({str(path.relative_to(ROOT)): path.read_text() for path in SOURCES})


@in_one_item(
    [
        "class A:\n    def f(self, fit):\n        self._kept: list[torch.Tensor] = []\n        "
        "self._kept.remove(fit)",
        "def f(kept: list[tuple[Tensor, Event | None]], one):\n    return one in kept",
        "def f(kept: Sequence[torch.Tensor], other):\n    return kept == other",
        "def f(kept, one: torch.Tensor):\n    kept.index(one)",
        "def f(kept, one: torch.Tensor):\n    return one not in kept",
        "waiting: deque[torch.Tensor] = deque()\nwaiting.count(waiting[0])",
        "@dataclass\nclass A:\n    values: torch.Tensor",
        "@dataclass(frozen=True)\nclass A:\n    values: list[torch.Tensor] | None",
        "class A(NamedTuple):\n    values: Tensor\ndef f(kept: list[A], a):\n    kept.remove(a)",
    ]
)
def test_a_comparison_is_seen(source: str) -> None:
    assert len(findings({"a.py": source})) == 1


@in_one_item(
    [
        "@dataclass(eq=False)\nclass A:\n    values: torch.Tensor",
        "@dataclass\nclass A:\n    run: Callable[[], torch.Tensor]",
        "@dataclass(order=True)\nclass A:\n    values: torch.Tensor = field(compare=False)",
        "def f(kept: dict[str, torch.Tensor], name: str):\n    return name in kept",
        "def f(kept: list[torch.Tensor], one):\n    return any(one is each for each in kept)",
        "def f(shape: list[int], one):\n    shape.remove(one)",
    ]
)
def test_what_compares_no_tensors_passes(source: str) -> None:
    assert not findings({"a.py": source})

"""What a package's source shows: imports and their circles, and comparisons of tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
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


# ---- imports ----


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


# ---- comparisons of tensors ----

IN_ORDER = {"list", "deque", "tuple", "Sequence", "Iterable", "Collection", "List", "Tuple"}
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


def compared_tensors(sources: Mapping[str, str]) -> list[str]:
    """Return the places that compare tensors, or objects that contain some, by value, where
    identity is meant: ``==`` of two tensors is a tensor, or an error where their sizes differ.
    ``list.remove``, ``in``, ``index`` and ``count`` compare so, and dataclasses and named tuples
    field by field. Annotations, which mypy asks of containers that begin empty, tell what is held.
    """
    trees = {path: parsed(source) for path, source in sources.items() if "Tensor" in source}
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
    for path, source in sources.items():
        if any(name in source for name in values):
            found += [f"{path}:{line}" for line in _compared(parsed(source), values)]
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

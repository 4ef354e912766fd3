"""Models of transformers with other names: every class and function of a modeling file, and every
argument of its layers, renamed by a script.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import linecache
import sys
import types
from typing import Any

DROPPED = ("auto_docstring", "torch.jit", "deprecate_kwarg", "use_kernelized_func", "use_kernel")
AFTER = "_of_tomorrow"


class _Names:
    """Names that a file defines at its top; the layers whose calls in the file are found, and the
    expressions that these calls name them by ("self.mlp", "layer").
    """

    def __init__(self, tree: ast.Module) -> None:
        tops = [each for each in tree.body if isinstance(each, (ast.ClassDef, ast.FunctionDef))]
        self.defined = {each.name for each in tops}
        classes = [each for each in tops if isinstance(each, ast.ClassDef)]
        layers = {each.name for each in classes if not _is_model(each)}
        self.called: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("self."):
                for part in ast.walk(node.value):
                    name = part.func if isinstance(part, ast.Call) else None
                    if isinstance(name, ast.Name) and name.id in self.defined:
                        self.called.setdefault(ast.unparse(node.targets[0]), set()).add(name.id)
        for node in ast.walk(tree):
            if isinstance(node, ast.For):
                source = ast.unparse(node.iter)
                for held, found in list(self.called.items()):
                    if held in source:
                        variable = node.target
                        last = variable.elts[-1] if isinstance(variable, ast.Tuple) else variable
                        self.called.setdefault(ast.unparse(last), set()).update(found)
        self.called = {k: found for k, found in self.called.items() if found <= layers}
        self.layers = {name for found in self.called.values() for name in found} - {
            each.name
            for each in classes
            if any("dynamic_rope_update" in ast.unparse(part) for part in each.body)
        }
        self.called = {k: found for k, found in self.called.items() if found <= self.layers}
        self.arguments = {
            name
            for each in classes
            if each.name in self.layers
            for function in each.body
            if isinstance(function, ast.FunctionDef) and function.name == "forward"
            for name in _named(function)
        }


def _is_model(node: ast.ClassDef) -> bool:
    """Return whether other files call the class by the names of its arguments."""
    bases = {ast.unparse(base) for base in node.bases}
    return not bases & {"nn.Module", "GradientCheckpointingLayer", "nn.LayerNorm"}


def _named(function: ast.FunctionDef) -> set[str]:
    given = function.args
    names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return names - {"self"}


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: _Names) -> None:
        self.names = names
        self.local: set[str] = set()

    def _class(self, name: str) -> str:
        return name + AFTER if name in self.names.defined else name

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = _kept(node.decorator_list)
        layer = node.name in self.names.layers
        for index, each in enumerate(node.body):
            if isinstance(each, ast.FunctionDef) and each.name == "forward" and layer:
                self.local = _named(each)
                for argument in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs):
                    if argument.arg != "self":
                        argument.arg += AFTER
            node.body[index] = self.visit(each)
            self.local = set()
        node.bases = [self.visit(base) for base in node.bases]
        node.name = self._class(node.name)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = _kept(node.decorator_list)
        self.generic_visit(node)
        node.returns = None
        node.name = self._class(node.name)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = node.id + AFTER if node.id in self.local else self._class(node.id)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            node.value = self._class(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rename the keywords of calls of layers."""
        called = ast.unparse(node.func)
        self.generic_visit(node)
        for keyword in node.keywords:
            if called in self.names.called and keyword.arg in self.names.arguments:
                keyword.arg += AFTER
        return node


def _kept(decorators: list[ast.expr]) -> list[ast.expr]:
    return [each for each in decorators if not ast.unparse(each).startswith(DROPPED)]


def renamed(cls: type) -> Any:
    """Return the class of the same model in a renamed copy of its file. Calls of other classes that
    inherit their forward keep their arguments' names.
    """
    original = importlib.import_module(cls.__module__)
    tree = ast.parse(inspect.getsource(original))
    tree = ast.fix_missing_locations(_Renamed(_Names(tree)).visit(tree))
    name = cls.__module__ + AFTER
    module = types.ModuleType(name)
    module.__package__ = original.__package__
    sys.modules[name] = module
    text = ast.unparse(tree)  # which transformers itself reads, for its experts
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module.__file__ = name
    exec(compile(text, name, "exec"), module.__dict__)
    return getattr(module, cls.__name__ + AFTER)

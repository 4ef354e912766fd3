"""Fingerprints of functions by their source: functions with equal fingerprints have the same code,
apart from annotations.

A replacement is written for one piece of Hugging Face code. Classes there are copied from model to
model, so one piece of code has many names, and a name says nothing about the code in the next
release. A module is therefore replaced if the source of its class is one that the replacement was
written against, whatever the class is called; any other module is unchanged.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import threading
from collections.abc import Callable
from typing import Any

HELPERS = ("_norm", "feed_forward_chunk", "ff_chunk")
"""Methods that a forward leaves its work to: where a class has one, it is part of what the class
does.
"""

# Python 3.11 has one depth counter for all its parsers: two at a time raise SystemError
_PARSING = threading.Lock()


@functools.cache
def fingerprint(function: Callable[..., Any]) -> str:
    """Return twelve hex digits of a hash of the function's source without docstring, decorators,
    annotations, comments and spacing; "" without source.
    """
    try:
        with _PARSING:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return ""
    if not isinstance(tree, ast.FunctionDef):
        return ""
    return hashlib.sha256(ast.unparse(_Bare().visit(tree)).encode()).hexdigest()[:12]


def of_class(cls: Any) -> str:
    """Return the fingerprints of the forward of ``cls`` and of those of :data:`HELPERS` it has,
    joined by "+".
    """
    return "+".join(
        fingerprint(getattr(cls, name))
        for name in ("forward", *HELPERS)
        if callable(getattr(cls, name, None))
    )


class _Bare(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns, node.decorator_list = None, []
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return (
            ast.Assign([node.target], node.value, lineno=node.lineno)
            if node.value is not None
            else ast.Pass()
        )

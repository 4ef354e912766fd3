"""Recognition of code: fingerprints of classes, and conditions under which a replaced forward takes
over.

A replacement is written for one piece of Hugging Face code. Classes there are copied from model to
model, so one piece of code has many names, and a name says nothing about the code in the next
release. A module is therefore replaced if the source of its class is one that the replacement was
written against (functions with equal fingerprints have the same code, apart from annotations),
whatever the class is called; any other module is unchanged. The conditions are equal dtypes, and
submodules whose parameters may be read without calling them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import threading
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

Part = TypeVar("Part", bound=nn.Module)

GELU = {
    "GELUActivation": "none",
    "NewGELUActivation": "tanh",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
    "FastGELUActivation": "tanh",
    "AccurateGELUActivation": "tanh",
}
ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
OURS = __name__.rpartition(".")[0]

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


def takes(x: torch.Tensor, *parameters: torch.Tensor) -> bool:
    """Return whether our operations compute the same as the replaced code: one dtype, and no
    autocast, which casts for each operation of torch.
    """
    return all(
        parameter.dtype == x.dtype for parameter in parameters
    ) and not torch.is_autocast_enabled(x.device.type)


def plain(module: nn.Module, kind: type[Part]) -> TypeGuard[Part]:
    """Return whether ``module`` is exactly a ``kind``, so that its parameters determine its
    forward.

    An adapter, a quantized layer or a module with hooks (also the engine's, if the module is
    gathered by itself) must be called.
    """
    if (
        type(module) is not kind
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return False
    return replaced(module) or "forward" not in module.__dict__


def replaced(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` is one of ours."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return function is not None and function.__module__.startswith(OURS)


def gelu_of(activation: object) -> str | None:
    """Return the approximation of a GELU module, "none" or "tanh"; None for any other
    activation.
    """
    kind = type(activation)
    if kind.__module__ not in ACTIVATIONS:
        return None
    if kind is nn.GELU:
        return str(activation.approximate)  # type: ignore[attr-defined]
    return GELU.get(kind.__name__)


def is_silu(activation: object) -> bool:
    return type(activation).__module__ in ACTIVATIONS and type(activation).__name__ in (
        "SiLUActivation",
        "SiLU",
    )


def name_of(activation: object) -> str:
    return getattr(activation, "__name__", type(activation).__name__)

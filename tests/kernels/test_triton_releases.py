"""The checked interpreter on another release of Triton: arguments are bound by name, and a release
that lacks a part is named before a kernel runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("ml_dtypes")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tests.helpers import checked_triton as harness  # noqa: E402
from tests.helpers.checked_triton import MemoryFault, checked_triton  # noqa: E402
from tests.helpers.triton_releases import UnsupportedTriton  # noqa: E402

BUILDER = interpreter.InterpreterBuilder
REPLACED = [(owner, name) for owner, name, _ in harness._replacements()]
INSTALLED = re.escape(f"Triton {triton.__version__}")
REMEDY = r"which the tests of the kernels need; install triton 3\.7\.1, 3\.8\.0 or 3\.9\.0$"


@triton.jit
def copy(x, y, shift, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at + shift))


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hints that loads and stores have got in a release where they take one, as the first argument
    for a load and as a keyword for a store, and take the mask before the pointers.
    """
    load, store = BUILDER.create_masked_load, BUILDER.create_masked_store
    seen: list[str] = []

    def later_load(self: Any, hint: str, mask: Any, ptrs: Any, other: Any, *rest: Any) -> Any:
        seen.append(hint)
        return load(self, ptrs, mask, other, *rest)

    def later_store(
        self: Any, mask: Any, ptrs: Any, value: Any, *rest: Any, hint: str = "store by default"
    ) -> Any:
        seen.append(hint)
        return store(self, ptrs, value, mask, *rest)

    def every(pointers: Any) -> Any:
        return interpreter.TensorHandle(np.ones_like(pointers.data, dtype=bool), tl.int1)

    def calling_load(self: Any, ptr: Any, *rest: Any) -> Any:
        return self.create_masked_load("load", every(ptr), ptr, None, *rest)

    def calling_store(self: Any, ptr: Any, val: Any, *rest: Any) -> Any:
        return self.create_masked_store(every(ptr), ptr, val, *rest)

    for name, function in (
        ("create_masked_load", later_load),
        ("create_masked_store", later_store),
        ("create_load", calling_load),
        ("create_store", calling_store),
    ):
        monkeypatch.setattr(BUILDER, name, function)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_argument_of_a_later_release_passes_through(
    dtype: torch.dtype, hints: list[str]
) -> None:
    x, y = torch.randn(16, dtype=dtype), torch.zeros(16, dtype=dtype)
    with checked_triton():
        copy[(1,)](x, y, 0, BLOCK=16)
        assert torch.equal(x, y) and hints == ["load", "store by default"]
        with pytest.raises(MemoryFault, match="load out of bounds of 'x'"):
            copy[(1,)](x, y, 1, BLOCK=16)


@pytest.mark.parametrize(
    ("owner", "name"), [pytest.param(owner, name, id=name) for owner, name in REPLACED]
)
def test_a_release_without_a_function_is_named(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(unknown: Any) -> None:
        raise AssertionError

    full = rf"triton\.runtime\.interpreter\.(\w+\.)?{name}, {REMEDY}"
    monkeypatch.setattr(owner, name, renamed)
    with pytest.raises(
        UnsupportedTriton, match=rf"^{INSTALLED} lacks the argument '\w+' of {full}"
    ):
        checked_triton().__enter__()
    if name != "__call__":  # every class has one
        monkeypatch.delattr(owner, name)
        with pytest.raises(UnsupportedTriton, match=rf"^{INSTALLED} lacks {full}"):
            checked_triton().__enter__()


def test_a_release_without_a_constant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later:
        class INPUT_PRECISION:
            IEEE = 0

    monkeypatch.setattr(interpreter, "_ir", Later)
    with pytest.raises(UnsupportedTriton, match=rf"_ir\.INPUT_PRECISION\.TF32, {REMEDY}"):
        checked_triton().__enter__()


def test_a_launch_without_its_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start: Callable[..., None] = interpreter.GridExecutor.__init__

    def renamed(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        del self.fn

    monkeypatch.setattr(interpreter.GridExecutor, "__init__", renamed)
    with (
        checked_triton(),
        pytest.raises(UnsupportedTriton, match=rf"interpreter\.GridExecutor\.fn, {REMEDY}"),
    ):
        copy[(1,)](torch.ones(16), torch.ones(16), 0, BLOCK=16)

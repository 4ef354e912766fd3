"""Selection of an operation's implementation."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.device import kinds
from hf_zero.ops import dispatch
from hf_zero.ops.dispatch import Kernel
from tests.helpers.commands import completed

pytest.importorskip("triton")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the declarations of a test after it, with no kernel marked as broken.

    All other kernels are declared first, or they would be removed, too.
    """
    dispatch.declared()
    monkeypatch.setattr(dispatch, "KERNELS", dict(dispatch.KERNELS))
    monkeypatch.setattr(dispatch, "_BROKEN", {})
    dispatch._load.cache_clear()


@pytest.fixture
def body(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], str]:
    """Puts a function where kernels lie; what a `Kernel` calls it."""

    def place(function: Callable[..., Any]) -> str:
        module = ModuleType("hf_zero.ops.triton_kernels.made_up")
        module.run = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return "made_up:run"

    return place


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "runs_on", lambda device: True)
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_the_interpreter_runs_kernels_unless_the_environment_says_no(body, monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    kernel = Kernel("made up", body(lambda x: x * 3), doubled)
    assert kernel(torch.ones(1)).item() == 3
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    assert kernel(torch.ones(1)).item() == 2
    monkeypatch.delenv("HF_ZERO_TRITON")
    with monkeypatch.context() as without:
        without.setattr(dispatch, "installed", lambda: False)
        assert kernel(torch.ones(1)).item() == 2
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    monkeypatch.setattr(dispatch, "missing_driver", lambda: "")
    dispatch._warned_missing.cache_clear()
    assert kernel(torch.ones(1)).item() == 2
    assert dispatch.runs_on(torch.device("cuda"))
    assert not dispatch.runs_on(CPU) and not dispatch.runs_on(torch.device("meta"))
    dispatch._warned_missing.cache_clear()
    with pytest.raises(ValueError, match="two kernels are called 'made up': made_up:run and c:d"):
        Kernel("made up", "c:d", doubled)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton without libcuda: its driver raises an AssertionError, not an error of Triton's own."""
    import triton.runtime

    class NoDriver:
        @property
        def active(self) -> Any:
            raise AssertionError("libcuda.so cannot found!\nPossible files are located at ...")

    monkeypatch.setattr(triton.runtime, "driver", NoDriver())
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    dispatch.missing_driver.cache_clear()
    dispatch._warned_missing.cache_clear()
    yield
    for cached in (dispatch.missing_driver, dispatch._warned_missing):
        cached.cache_clear()


def test_a_gpu_without_a_driver_for_triton_runs_references_and_says_so_once(
    heard: list[str], no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "runs_triton", lambda device: True)
    hf_zero.optimize(torch.nn.Linear(3, 2), kernels="off")
    assert not dispatch.wanted("optimizer", "off", torch.device("cuda")) and heard == []
    monkeypatch.setattr(dispatch, "_device", lambda args: torch.device("cuda"))
    for kernel in dispatch.declared().values():
        kernel(*kernel.example(CPU))
    assert Kernel("made up", "nowhere:to_be_found", doubled)(torch.ones(1)).item() == 2
    assert not dispatch.wanted("optimizer", "auto", torch.device("cuda"))
    assert dispatch.broken() == {}
    (said,) = [each for each in heard if "Triton" in each]
    assert "AssertionError: libcuda.so cannot found!)" in said


def failures() -> list[Exception]:
    from triton import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return [
        CompilationError("x = y", ast.parse("x = y").body[0], "y is not defined"),
        OutOfResources(300_000, 232_448, "shared memory"),
        PTXASError("ptxas died"),
        RuntimeError("PassManager::run failed"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        subprocess.CalledProcessError(1, ["gcc", "launcher.c"]),  # Python's headers are not there
    ]


def test_a_kernel_that_cannot_run_is_replaced_and_said_once(body, as_on_a_gpu, heard):
    """Where it does not compile or refuses; other errors are not hidden."""
    an_example = lambda device: (torch.ones(1, device=device),)  # noqa: E731
    refuses = lambda x: "too long" if len(x) > 1 else ""  # noqa: E731
    kernel = Kernel("made up", body(lambda x: x * 3), doubled, refuses=refuses)
    assert kernel(torch.ones(1)).tolist() == [3] and kernel(torch.ones(2)).tolist() == [2, 2]

    def illegal(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    dispatch._load.cache_clear()
    kernel = Kernel("illegal", body(illegal), doubled, example=an_example)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernel(torch.ones(1))
    assert dispatch.broken() == {}
    assert dispatch.try_out(kernel, CPU) == "RuntimeError: an illegal memory access was encountered"
    for number, failure in enumerate(failures()):
        heard.clear()
        calls: list[int] = []

        def fails(x: torch.Tensor, calls=calls, failure=failure) -> torch.Tensor:
            calls.append(1)
            raise failure

        dispatch._load.cache_clear()
        name, kind = f"made up {number}", type(failure).__name__
        kernel = Kernel(name, body(fails), doubled, example=an_example)
        assert [kernel(torch.ones(1)).item() for _ in range(3)] == [2, 2, 2]
        assert len(calls) == 1 and name in dispatch.broken()
        (said,) = [each for each in heard if name in each]
        assert "so its slow reference runs from now on" in said and kind in said
        assert dispatch.try_out(kernel, CPU).startswith(f"cannot be compiled: {kind}: ")


def test_a_launch_is_made_on_the_device_of_its_tensors(body, as_on_a_gpu, monkeypatch):
    """Also of those in a list."""
    seen: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "runs_on", lambda device: bool(seen.append(device.type)))
        kernel = Kernel("listed", "nowhere:to_be_found", lambda *args: 5)
        assert kernel(0, [torch.ones(1, device="meta")]) == kernel(torch.ones(1)) == kernel(0) == 5
    assert seen == ["meta", "cpu", "meta"]
    chosen: list[torch.device] = []

    class Chosen:
        def __init__(self, device: torch.device):
            self._device = device

        def __enter__(self) -> None:
            chosen.append(self._device)

        def __exit__(self, *_: object) -> None:
            chosen.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Chosen)
    kernel = Kernel("made up", body(lambda x: list(chosen)), doubled)
    for index, during in ((0, []), (1, [torch.device("cuda", 1)])):
        monkeypatch.setattr(
            dispatch, "_device", lambda args, index=index: torch.device("cuda", index)
        )
        assert kernel(torch.ones(1)) == during and chosen == []


def test_a_trial_compares_with_the_reference(body: Callable[..., str], as_on_a_gpu: None) -> None:
    def example(device: torch.device) -> tuple[Any, ...]:
        return torch.randn(4, device=device), [torch.zeros(4, device=device)]

    def reference(x: torch.Tensor, out: list[torch.Tensor]) -> None:
        out[0].copy_(x.where(x < 1, torch.inf))

    def kernel(x: torch.Tensor, out: list[torch.Tensor]) -> None:
        reference(x * factor, out)

    declared = Kernel("made up", body(kernel), reference, example=example)
    before = torch.random.get_rng_state()
    factor = 1.001
    assert dispatch.try_out(declared, CPU) == ""
    factor = 1.5
    assert "differs from its reference: tensor 1, [4]" in dispatch.try_out(declared, CPU)
    factor = float("nan")
    assert "differs from its reference" in dispatch.try_out(declared, CPU)
    assert torch.equal(before, torch.random.get_rng_state())
    shorter = Kernel("shorter", body(lambda x, out: x[:2]), lambda x, out: x, example=example)
    assert "by inf of its norm" in dispatch.try_out(shorter, CPU)
    assert dispatch.try_out(Kernel("mute", "a:b", doubled), CPU) == "it declares no example"
    broken = Kernel("broken", "a:b", doubled, example=lambda device: (torch.ones(1, dtype="none"),))  # type: ignore[call-overload]
    assert dispatch.try_out(broken, CPU).startswith("TypeError: ")


@pytest.mark.usefixtures("lamb_addresses", "checked_triton")
def test_every_kernel_passes_its_trial() -> None:
    """The doctor's trial on a GPU: each kernel beside its reference, on its example."""
    kernels = dispatch.declared()
    assert {"norm", "cross_entropy", "flat_adam", "sparse_attention_backward"} <= set(kernels)
    found = {name: dispatch.try_out(kernel, CPU) for name, kernel in kernels.items()}
    assert {name: why for name, why in found.items() if why} == {}


COMPILED = """
import sys
from hf_zero.ops.dispatch import declared
assert 'sparse_attention' in declared() and 'triton' not in sys.modules
from hf_zero.ops.triton_kernels import sparse_attention as f, sparse_attention_backward as b
kernels = [f.sparse_attention_forward, f.sparse_attention_combine, b.sparse_attention_dq]
for kernel in [*kernels, b.sparse_attention_dkdv, b.sparse_attention_sum]:
    free = {each.name for each in kernel.params if each.do_not_specialize}
    assert free == {'programs', 'slots'}, (kernel.__name__, free)
"""


def test_kernels_are_found_without_triton_and_lengths_do_not_compile_anew() -> None:
    """The counts of a plan are not specialized on, where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = completed([sys.executable, "-c", COMPILED], env=environment)
    assert done.returncode == 0, done.stderr

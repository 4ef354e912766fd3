"""Kernels of the native core, where it is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from hf_zero.ops import dispatch, native

OF_THE_CORE = [
    "test_blocks.py",
    "test_files.py",
    "test_native.py",
    "test_sweeps.py",
    "test_updates.py",
]
collect_ignore_glob = [] if native.available() else OF_THE_CORE
ENDS = {*native.instruction_sets()[:1], *native.instruction_sets()[-1:]}
"""Instruction sets: those between are compiled from the same lines."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore the instruction set and the number of threads of the process."""
    name, threads = native.instruction_set(), native.threads()
    yield
    native.set_threads(threads)
    if native.available():
        native.set_instruction_set(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        cells = [
            pytest.param(name, marks=() if name in ENDS else pytest.mark.long)
            for name in native.instruction_sets()
        ]
        metafunc.parametrize("isa", cells, indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> str:
    native.set_instruction_set(request.param)
    return request.param


@pytest.fixture
def lamb_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked interpreter knows the tensors whose addresses LAMB's tables hold."""
    from hf_zero.ops.triton_kernels import lamb
    from tests.helpers.checked_triton import current_settings

    table = lamb.tile_table

    def noted(*arrays: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        current_settings().reachable(*(tensor for of in arrays for tensor in of))
        return table(*arrays)

    monkeypatch.setattr(lamb, "tile_table", noted)


@pytest.fixture(params=["kernel", "reference"])
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that a test runs; ``checked_triton`` watches the kernels."""
    if request.param == "reference":
        monkeypatch.setenv("HF_ZERO_TRITON", "0")
    else:
        assert dispatch.runs_on(torch.device("cpu")), "the interpreter is off"
    return request.param


@pytest.fixture(params=["kernel", "reference"])
def watched_body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels in the checked interpreter, at least one of which runs, or their references."""
    if request.param == "reference":
        monkeypatch.setenv("HF_ZERO_TRITON", "0")
        yield request.param
        return
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    from tests.helpers.checked_triton import checked_triton

    with checked_triton() as settings:
        yield request.param
        assert settings.launches


@pytest.fixture(params=["reference", *sorted(ENDS), "threads", "triton"])
def every_body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The bodies of an operation of host and GPU: plain torch, C++ on an instruction set and on
    several threads, and Triton's kernels in the checked interpreter.
    """
    from tests.helpers.buffers import reference
    from tests.helpers.checked_triton import checked_triton

    if request.param == "reference":
        with reference():
            yield "reference"
    elif request.param == "triton":
        monkeypatch.setattr(native, "core", lambda: None)
        with checked_triton() as settings:
            yield "triton"
            assert settings.launches
    else:
        if not native.available():
            pytest.skip("no native core here")
        if request.param == "threads":
            native.set_threads(3)
        else:
            native.set_instruction_set(request.param)
        yield request.param

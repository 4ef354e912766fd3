"""The two passes of LAMB: on the host against the torch reference bit for bit, and as the class
uses them; over lists of tensors, Triton in the checked interpreter against torch's operations.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero.ops import dispatch, flat_reference, lamb, native
from hf_zero.ops.host import lamb_apply, lamb_measure
from hf_zero.ops.lamb import APPLY, MEASURE, SUMS, TILE, LambSettings, measure_
from tests.helpers.buffers import Guarded, reference, same_bits

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SETTINGS: list[dict[str, Any]] = [
    {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.1, "eps_inside": False},
    {"beta1": 0.8, "beta2": 0.99, "eps": 1e-3, "decay": 0.0, "eps_inside": True},
]
SIZES = [1, 15, 17, 257, 1025, 40_001]


def arrays(numel: int, grad: torch.dtype, guarded: Guarded) -> list[Tensor]:
    made = [torch.randn(numel) for _ in range(4)]
    made[1], made[3] = made[1].to(grad), made[3].square()
    return [guarded(each) for each in made]


def test_both_passes_are_the_references(isa: str) -> None:
    """Sums do not depend on the number of threads, and have what is not finite."""
    for numel, (grad, settings) in itertools.product(SIZES, itertools.product(FLOATS, SETTINGS)):
        torch.manual_seed(numel)
        guarded = Guarded(1)
        ours = arrays(numel, grad, guarded)
        theirs = [each.clone() for each in ours]
        out = guarded(torch.zeros(numel, dtype=torch.bfloat16))
        copied = out.clone()
        sums = lamb_measure(*ours, divisor=3.0, **settings)
        w, _, m, v = ours
        lamb_apply(w, m, v, step_size=0.01, out=out, **settings)
        with reference():
            wanted = lamb_measure(*theirs, divisor=3.0, **settings)
            w, _, m, v = theirs
            lamb_apply(w, m, v, step_size=0.01, out=copied, **settings)
        assert sums == pytest.approx(wanted, rel=1e-6), (numel, grad)
        assert all(map(same_bits, [*ours, out], [*theirs, copied])), (numel, grad)
        guarded.check()
    made, found = arrays(300_007, torch.float32, Guarded()), set()
    for threads in (1, 2, 5):
        native.set_threads(threads)
        found.add(lamb_measure(*[each.clone() for each in made], **SETTINGS[0]))
    assert len(found) == 1
    for at in (0, 1030):
        made = arrays(1031, torch.float32, Guarded())
        made[1][at] = float("inf")
        assert not lamb_measure(*made, **SETTINGS[0])[1] < float("inf")


LENGTHS = (1, 5, TILE + 3, 700, 2 * TILE)
OF_LISTS = [
    LambSettings(0.9, 0.999, 1e-8, 0.1),
    LambSettings(0.8, 0.99, 1e-3, 0.0, eps_inside=True),
]


def lists(numbers: tuple[int, ...] = LENGTHS) -> list[list[Tensor]]:
    """Weights, gradients and moments; those of every other tensor begin off 16 bytes."""
    torch.manual_seed(1)
    made = [
        [torch.randn(n + place % 2 + 4)[place % 2 :][:n] for place, n in enumerate(numbers)]
        for _ in range(4)
    ]
    for square in made[3]:
        square.square_()
    return made


@pytest.mark.usefixtures("lamb_addresses")
def test_the_kernels_give_what_torch_gives() -> None:
    from tests.helpers.checked_triton import checked_triton

    for settings in OF_LISTS:
        ours, theirs, sizes = lists(), lists(), torch.rand(len(LENGTHS))
        before = [tensor.clone() for tensor in ours[1]]
        numbers = settings.beta1, settings.beta2, settings.eps, settings.decay, settings.eps_inside
        with checked_triton() as checked:
            found = SUMS(*MEASURE(*ours, *numbers, 2.0))
            APPLY(ours[0], *ours[2:], sizes, *numbers[2:])
            assert checked.launches == 3
        wanted = SUMS.reference(*MEASURE.reference(*theirs, *numbers, 2.0))
        APPLY.reference(theirs[0], *theirs[2:], sizes, *numbers[2:])
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
        for place in (0, 2, 3):
            torch.testing.assert_close(ours[place], theirs[place], rtol=2e-6, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(ours[1], before))
    ours[1][2][TILE + 1] = float("nan")
    with checked_triton():
        found = SUMS(*MEASURE(*ours, *numbers, 1.0)).view(2, -1).t()
    assert found.isfinite().all(1).tolist() == [True, True, False, True, True]


@pytest.mark.usefixtures("lamb_addresses")
@pytest.mark.parametrize("broken", ["lamb_measure_kernel", "sum_runs_kernel"])
def test_moments_move_once_where_a_kernel_does_not_compile(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import TritonError

    from hf_zero.ops.triton_kernels import flat_norm
    from hf_zero.ops.triton_kernels import lamb as kernels
    from tests.helpers.checked_triton import checked_triton

    class Broken:
        def __getitem__(self, grid: object) -> Any:
            raise TritonError("no registers")

    for module in (flat_norm, kernels):
        if hasattr(module, broken):
            monkeypatch.setattr(module, broken, Broken())
    monkeypatch.setattr(dispatch, "_BROKEN", {})
    monkeypatch.setattr(lamb, "_on_the_host", lambda *arrays: False)
    monkeypatch.setattr(lamb, "wanted", lambda *given: True)
    ours, theirs, settings = lists(), lists(), OF_LISTS[0]
    with checked_triton(), monkeypatch.context() as as_on_a_gpu:
        as_on_a_gpu.setattr(dispatch, "interpreted", lambda: False)
        as_on_a_gpu.setattr(dispatch, "runs_on", lambda device: True)
        found = measure_(*ours, settings)
    wanted = flat_reference.lamb_measure(*theirs, *asdict(settings).values(), 1.0)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6)
    assert len(dispatch.broken()) == 1

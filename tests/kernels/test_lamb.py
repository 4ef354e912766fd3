"""The two passes of LAMB on the host: against the torch reference bit for bit, and as the class
uses them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import lamb_apply, lamb_measure, native
from hf_zero.optim import Lamb
from tests.helpers.buffers import Guarded, reference, same_bits

SETTINGS: list[dict[str, Any]] = [
    {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.1, "eps_inside": False},
    {"beta1": 0.8, "beta2": 0.99, "eps": 1e-3, "decay": 0.0, "eps_inside": True},
]
SIZES = [1, 15, 17, 257, 1025, 40_001]


def arrays(numel: int, grad: torch.dtype, guarded: Guarded) -> list[Tensor]:
    made = [torch.randn(numel) for _ in range(4)]
    made[1], made[3] = made[1].to(grad), made[3].square()
    return [guarded(each) for each in made]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_passes_are_the_references(
    isa: str, grad: torch.dtype, settings: dict[str, Any]
) -> None:
    for numel in SIZES:
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
        assert sums == pytest.approx(wanted, rel=1e-6)
        for a, b in zip([*ours, out], [*theirs, copied]):
            assert same_bits(a, b)
        guarded.check()


def test_sums_are_the_same_on_every_instruction_set_and_thread_count() -> None:
    made = arrays(300_007, torch.float32, Guarded())
    found = set()
    for name in native.instruction_sets():
        native.set_instruction_set(name)
        for threads in (1, 2, 5):
            native.set_threads(threads)
            found.add(lamb_measure(*[each.clone() for each in made], **SETTINGS[0]))
    assert len(found) == 1


def test_what_is_not_finite_is_in_the_sums(isa: str) -> None:
    for at in (0, 1030):
        made = arrays(1031, torch.float32, Guarded())
        made[1][at] = float("inf")
        assert not lamb_measure(*made, **SETTINGS[0])[1] < float("inf")


@pytest.mark.parametrize("place, name", [(0, "master"), (1, "grad"), (2, "exp_avg"), (3, "sq")])
def test_what_does_not_fit_is_named(place: int, name: str) -> None:
    made = arrays(8, torch.float32, Guarded())
    made[place] = made[place][:7] if place else made[place].double()
    with pytest.raises(KernelError, match=name):
        lamb_measure(*made, **SETTINGS[0])
    if place > 1:
        with pytest.raises(KernelError, match=name):
            lamb_apply(made[0], made[2], made[3], step_size=1.0, **SETTINGS[0])


def test_the_class_gives_what_its_tensor_operations_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        mine = [torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 300), (300,), ())]
        optimizer = Lamb(mine, lr=0.02, weight_decay=0.1)
        for _ in range(5):
            for p in mine:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [p.detach() for p in mine]

    ours = trained()
    monkeypatch.setattr(native, "available", lambda: False)
    for a, b in zip(ours, trained()):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
        assert a.numel() == 1 or not torch.equal(a, b), "both ran the same code"

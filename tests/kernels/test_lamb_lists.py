"""LAMB's passes over lists of tensors: Triton in the checked interpreter against torch's
operations.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_zero.ops.lamb import APPLY, MEASURE, TILE, LambSettings, apply_, measure_, tile_table
from tests.helpers.checked_triton import checked_triton

LENGTHS = (1, 5, TILE + 3, 700, 2 * TILE)
SETTINGS = [
    LambSettings(0.9, 0.999, 1e-8, 0.1),
    LambSettings(0.8, 0.99, 1e-3, 0.0, eps_inside=True),
    LambSettings(0.0, 0.0, 0.0, 0.01),
]


def arrays(numbers: tuple[int, ...] = LENGTHS) -> list[list[Tensor]]:
    """Weights, gradients and moments; those of every other tensor begin off 16 bytes."""
    torch.manual_seed(1)
    made = [
        [torch.randn(n + place % 2 + 4)[place % 2 :][:n] for place, n in enumerate(numbers)]
        for _ in range(4)
    ]
    for square in made[3]:
        square.square_()
    return made


pytestmark = pytest.mark.usefixtures("lamb_addresses")


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_kernels_give_what_torch_gives(settings: LambSettings) -> None:
    ours, theirs = arrays(), arrays()
    sizes = torch.rand(len(LENGTHS))
    before = [tensor.clone() for tensor in ours[1]]
    numbers = settings.beta1, settings.beta2, settings.eps, settings.decay, settings.eps_inside
    with checked_triton() as checked:
        found = MEASURE(*ours, *numbers, 2.0)
        APPLY(ours[0], *ours[2:], sizes, *numbers[2:])
        assert checked.launches == 3
    wanted = MEASURE.reference(*theirs, *numbers, 2.0)
    APPLY.reference(theirs[0], *theirs[2:], sizes, *numbers[2:])
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    for mine, want in zip((*ours[0], *ours[2], *ours[3]), (*theirs[0], *theirs[2], *theirs[3])):
        torch.testing.assert_close(mine, want, rtol=2e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(ours[1], before))


def test_numbers_that_are_not_finite_show() -> None:
    ours = arrays()
    ours[1][2][TILE + 1] = float("nan")
    with checked_triton():
        found = MEASURE(*ours, 0.9, 0.999, 1e-8, 0.1, False, 1.0)
    assert found.isfinite().all(1).tolist() == [True, True, False, True, True]


def test_the_table_is_made_once_for_the_same_places() -> None:
    made = arrays()
    table, bounds = tile_table(*made)
    assert tile_table(*made)[0] is table
    tiles = [1, 1, 2, 1, 2]
    assert table[:, 5].tolist() == [p for p, n in enumerate(tiles) for _ in range(n)]
    assert bounds.tolist() == [0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 14]
    assert bool(table[-1, 6]) == all(of[4].data_ptr() % 16 == 0 for of in made)


def test_other_types_go_to_torch() -> None:
    made = [[tensor.double() for tensor in of] for of in arrays((7, 40))]
    with checked_triton() as checked:
        w, g, m, v = made
        sums = measure_(w, g, m, v, SETTINGS[0], kernels="on")
        apply_(w, m, v, torch.ones(2), SETTINGS[0], kernels="on")
        assert not checked.launches and sums.shape == (2, 2)

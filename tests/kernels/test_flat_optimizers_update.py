"""The flat optimizers' kernels and references against torch.optim, segment by segment, in the
checked interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops.flat_optimizers import (
    FlatRun,
    RowSettings,
    Tiles,
    adam_,
    advance_,
    lion_,
    settings_table,
)
from hf_zero.ops.flat_tiles import PHASE
from hf_zero.optim.adam_lion import Lion

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 131, 1, 7, 64, 3, 200)  # of segments: single elements, odd ones, one that is a tile


class Flats:
    """Segments of ``lengths`` in flat buffers that begin at different places, with elements of
    nobody between them.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        rows: int,
        grad: torch.dtype,
        out: torch.dtype | None,
        phases: tuple[int, ...],
        tile: int,
    ):
        self.pieces, at = [], 0
        for index, length in enumerate(lengths):
            master, first_grad, moment, copy = (at + phase for phase in phases)
            self.pieces.append(
                FlatRun(
                    length, index % rows, master, first_grad, moment, None if out is None else copy
                )
            )
            at += length + index % 3
        numel = at + max(phases)
        self.master, self.mean, self.square = (
            torch.randn(numel),
            torch.zeros(numel),
            torch.zeros(numel),
        )
        self.grad = torch.zeros(numel, dtype=grad)
        self.out = None if out is None else torch.full((numel,), 7.0, dtype=out)
        self.tiles = Tiles.cut(self.pieces, "cpu", tile)
        self.steps = torch.zeros(rows)

    def of(self, buffer: Tensor, place: str) -> list[Tensor]:
        return [
            buffer[at : at + piece.length]
            for piece in self.pieces
            if (at := getattr(piece, place)) is not None
        ]

    def step(self, settings: list[RowSettings], lion: bool = False, **told: Any) -> None:
        self.grad.copy_(torch.randn(self.grad.numel()))
        coefficients = advance_(self.steps, settings_table(settings, "cpu"), told.get("found_inf"))
        if lion:
            lion_(self.master, self.grad, self.mean, self.tiles, coefficients, out=self.out, **told)
        else:
            adam_(
                self.master,
                self.grad,
                self.mean,
                self.square,
                self.tiles,
                coefficients,
                out=self.out,
                **told,
            )


def grouped(flats: Flats, rows: int) -> list[list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(part.clone()) for part in flats.of(flats.master, "master")]
    return [
        [p for p, piece in zip(parameters, flats.pieces) if piece.row == row] for row in range(rows)
    ]


def in_order(flats: Flats, groups: list[list[torch.nn.Parameter]]) -> list[torch.nn.Parameter]:
    lines = [iter(group) for group in groups]
    return [next(lines[piece.row]) for piece in flats.pieces]


ADAMS = {
    "adamw": (
        torch.optim.AdamW,
        [{"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0, "eps": 1e-6}],
    ),
    "adam": (
        torch.optim.Adam,
        [{"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}, {"lr": 3e-3}],
    ),
    "maximize": (
        torch.optim.AdamW,
        [{"lr": 1e-2, "maximize": True}, {"lr": 1e-2, "betas": (0.0, 0.9)}, {"lr": 0.0}],
    ),
}


def adam_rows(cls: type, groups: list[dict[str, Any]]) -> list[RowSettings]:
    rows = []
    for group in groups:
        beta1, beta2 = group.get("betas", (0.9, 0.999))
        default = 0.01 if cls is torch.optim.AdamW else 0.0
        rows.append(
            RowSettings(
                group["lr"],
                beta1,
                beta2,
                group.get("eps", 1e-8),
                group.get("weight_decay", default),
                cls is torch.optim.AdamW,
                group.get("maximize", False),
            )
        )
    return rows


@pytest.mark.turns
@pytest.mark.parametrize("phases", [(0, 0, 0, 0), (8, 16, 0, 24), (3, 3, 3, 3), (0, 1, 5, 2)])
@pytest.mark.parametrize("name", ADAMS)
def test_adam_is_torch_s(
    name: str, phases: tuple[int, ...], watched_body: str, record_property: Any
) -> None:
    cls, groups = ADAMS[name]
    flats = Flats(LENGTHS, len(groups), torch.float32, torch.bfloat16, phases, 64)
    before = flats.master.clone()
    parameters = grouped(flats, len(groups))
    theirs = cls(
        [{"params": group, **given} for group, given in zip(parameters, groups)], foreach=False
    )
    for _ in range(3):
        flats.step(adam_rows(cls, groups))
        for parameter, grad in zip(in_order(flats, parameters), flats.of(flats.grad, "grad")):
            parameter.grad = grad.clone()
        theirs.step()
    whole = in_order(flats, parameters)
    torch.testing.assert_close(
        flats.of(flats.master, "master"), [p.data for p in whole], rtol=3e-7, atol=3e-7
    )
    for buffer, state in ((flats.mean, "exp_avg"), (flats.square, "exp_avg_sq")):
        torch.testing.assert_close(
            flats.of(buffer, "moment"),
            [theirs.state[p][state] for p in whole],
            rtol=3e-7,
            atol=1e-7,
        )
    assert flats.steps.tolist() == [3.0] * len(groups)
    assert flats.out is not None
    for copy, master in zip(flats.of(flats.out, "out"), flats.of(flats.master, "master")):
        assert torch.equal(copy, master.bfloat16())
    untouched(flats, before)


def untouched(flats: Flats, before: Tensor) -> None:
    """Elements of no segment are what they were."""
    for buffer, place, was in (
        (flats.master, "master", before),
        (flats.out, "out", torch.tensor(7.0)),
    ):
        if buffer is not None:
            inside = torch.zeros(buffer.numel(), dtype=torch.bool)
            for part in flats.of(inside, place):
                part.fill_(True)
            assert torch.equal(
                buffer[~inside], was.expand(buffer.numel())[~inside].to(buffer.dtype)
            )


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_is_the_paper_s(decay: float, watched_body: str) -> None:
    flats = Flats(LENGTHS, 2, torch.float32, None, (8, 0, 16, 0), 64)
    parameters = grouped(flats, 2)
    rates = (1e-2, 3e-3)
    theirs = Lion(
        [{"params": group, "lr": lr} for group, lr in zip(parameters, rates)],
        weight_decay=decay,
        foreach=False,
    )
    rows = [RowSettings(lr, 0.9, 0.99, weight_decay=decay, corrected=False) for lr in rates]
    for _ in range(3):
        flats.step(rows, lion=True)
        for parameter, grad in zip(in_order(flats, parameters), flats.of(flats.grad, "grad")):
            parameter.grad = grad.clone()
        theirs.step()
    whole = in_order(flats, parameters)
    torch.testing.assert_close(
        flats.of(flats.master, "master"), [p.data for p in whole], rtol=3e-7, atol=3e-7
    )
    torch.testing.assert_close(
        flats.of(flats.mean, "moment"),
        [theirs.state[p]["exp_avg"] for p in whole],
        rtol=3e-7,
        atol=1e-7,
    )


@pytest.mark.turns
@pytest.mark.parametrize("lion", [False, True])
@pytest.mark.parametrize("out", [None, *FLOATS])
@pytest.mark.parametrize("grad", FLOATS)
def test_any_gradient_and_copy_divided_and_skipped(
    grad: torch.dtype, out: torch.dtype | None, lion: bool, watched_body: str
) -> None:
    """A divided 16-bit gradient moves what the same numbers in fp32 move; a step that is skipped
    moves nothing and is not counted.
    """
    torch.manual_seed(3)
    flats = Flats((70, 5), 1, grad, out, (0, 0, 0, 0), 32)
    torch.manual_seed(3)
    wide = Flats((70, 5), 1, torch.float32, out, (0, 0, 0, 0), 32)
    rows = [RowSettings(1e-2, weight_decay=0.1, corrected=not lion)]
    divisor, go = torch.tensor(3.7), torch.tensor(0.0)
    flats.step(rows, lion, divisor=divisor, found_inf=go)
    wide.grad.copy_(flats.grad.float() / divisor)
    coefficients = advance_(wide.steps, settings_table(rows, "cpu"))
    arrays = (wide.mean,) if lion else (wide.mean, wide.square)
    (lion_ if lion else adam_)(
        wide.master, wide.grad, *arrays, wide.tiles, coefficients, out=wide.out
    )
    assert flats.steps.item() == 1.0
    torch.testing.assert_close(flats.master, wide.master, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(flats.mean, wide.mean, rtol=1e-6, atol=1e-7)
    if out is not None:
        for copy, master in zip(flats.of(flats.out, "out"), flats.of(flats.master, "master")):
            assert torch.equal(copy, master.to(out))
    kept = [t.clone() for t in (flats.master, flats.mean, flats.square)]
    copied = None if flats.out is None else flats.out.clone()
    flats.step(rows, lion, divisor=divisor, found_inf=torch.tensor(1.0))
    assert all(
        torch.equal(now, was) for now, was in zip((flats.master, flats.mean, flats.square), kept)
    )
    assert copied is None or torch.equal(flats.out, copied)
    assert flats.steps.item() == 1.0


def test_nothing_is_nothing(watched_body: str) -> None:
    flats = Flats((), 1, torch.float32, None, (0, 0, 0, 0), 16)
    flats.step([RowSettings(1e-3)])
    assert flats.tiles.table.shape[0] == 0 and flats.tiles.numel == 0 and flats.steps.item() == 1.0
    assert advance_(torch.zeros(0), settings_table([], "cpu")).shape[0] == 0


def test_bias_corrections_are_those_of_fp64(watched_body: str) -> None:
    """The second moment's is 1e-3 in the first step: in fp32 its power would be off in the fifth
    digit.
    """
    steps = torch.tensor([0.0, 9.0, 99_999.0])
    rows = [
        RowSettings(1e-3, 0.9, 0.999),
        RowSettings(1e-3, 0.95, 0.99),
        RowSettings(1e-3, 0.9, 0.9999),
    ]
    got = advance_(steps, settings_table(rows, "cpu"))
    for row, (settings, count) in enumerate(zip(rows, (1, 10, 100_000))):
        assert got[row, 7].item() == pytest.approx(1e-3 / (1 - settings.beta1**count), rel=1e-7)
        assert got[row, 8].item() == pytest.approx((1 - settings.beta2**count) ** -0.5, rel=1e-7)
    assert steps.tolist() == [1.0, 10.0, 100_000.0]


@pytest.mark.parametrize("tile", [16, 64, 4096])
def test_tiles_cover_each_element_once(tile: int) -> None:
    generator = torch.Generator().manual_seed(tile)
    for _ in range(20):
        at, pieces = 0, []
        for row in range(4):
            length, gap = (int(n) for n in torch.randint(0, 300, (2,), generator=generator))
            shift = int(torch.randint(0, 2, (1,), generator=generator)) * 8
            pieces.append(FlatRun(length, row, at, at + shift, at, at + 5))
            at += length + gap // 20
        tiles = Tiles.cut(pieces, "cpu", tile)
        seen = torch.zeros(at + 300, dtype=torch.int64)
        for master, grad, moment, out, length, row, whole, _ in tiles.table.tolist():
            seen[master : master + length] += 1 + row
            piece = pieces[row]
            assert (
                grad - piece.grad
                == moment - piece.moment
                == out - piece.out
                == master - piece.master
            )
            assert 0 < length <= tile
            assert not whole or (
                length == tile and all(place % PHASE == 0 for place in (master, grad, moment, out))
            )
        want = torch.zeros_like(seen)
        for piece in pieces:
            want[piece.master : piece.master + piece.length] = 1 + piece.row
        assert torch.equal(seen, want)
        assert tiles.numel == sum(piece.length for piece in pieces)


def test_long_segments_are_whole_tiles_but_for_their_ends() -> None:
    table = Tiles.cut([FlatRun(1000, 0, 3, 3, 11, 3)], "cpu", 64).table
    assert table[:, 6].tolist() == [0] + [1] * 15 + [0]
    assert table[:, 4].tolist() == [5] + [64] * 15 + [35]
    apart = Tiles.cut([FlatRun(1000, 0, 0, 1, 0, 0)], "cpu", 64).table
    assert apart[:, 6].sum() == 0


def test_pieces_that_go_on_are_one() -> None:
    assert (
        Tiles.cut([FlatRun(32, 0, 0, 0, 0), FlatRun(32, 0, 32, 32, 32)], "cpu", 64).table.shape[0]
        == 1
    )
    assert (
        Tiles.cut([FlatRun(32, 0, 0, 0, 0), FlatRun(32, 1, 32, 32, 32)], "cpu", 64).table.shape[0]
        == 2
    )
    assert (
        Tiles.cut([FlatRun(32, 0, 0, 0, 0), FlatRun(32, 0, 32, 40, 32)], "cpu", 64).table.shape[0]
        == 2
    )


def test_a_rate_may_be_a_tensor() -> None:
    table = settings_table(
        [RowSettings(torch.tensor(0.25)), RowSettings(torch.tensor([0.5]))], "cpu"
    )
    assert table[:, 0].tolist() == [0.25, 0.5]


# ---- refusals ----


def arguments() -> dict[str, Any]:
    tiles = Tiles.cut([FlatRun(64, 0, 0, 0, 0, 0)], "cpu", 64)
    arrays = {name: torch.zeros(64) for name in ("master", "grad", "exp_avg", "exp_avg_sq")}
    return {
        **arrays,
        "tiles": tiles,
        "coefficients": advance_(torch.zeros(1), settings_table([RowSettings(1e-3)], "cpu")),
    }


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            {"grad": torch.zeros(64, dtype=torch.float64)},
            "grad is torch.float64; give one of torch.float32",
        ),
        ({"exp_avg": torch.zeros(64, dtype=torch.bfloat16)}, "exp_avg is torch.bfloat16"),
        ({"exp_avg_sq": torch.zeros(63)}, "exp_avg_sq has 63 elements and the tiles reach to 64"),
        ({"master": torch.zeros(128)[::2]}, r"master has shape \(64,\) and strides \(2,\)"),
        ({"grad": torch.zeros(64, device="meta")}, "grad is on meta and master on cpu"),
        ({"out": torch.zeros(100)[1:]}, "out does not begin at a multiple of 16 bytes"),
        ({"coefficients": torch.zeros(0, 16)}, "the tiles use 1 rows"),
        (
            {"coefficients": torch.zeros(1, 16, dtype=torch.float64)},
            "coefficients is torch.float64",
        ),
        ({"divisor": torch.ones(2)}, r"divisor is torch.float32 \(2,\)"),
        ({"found_inf": torch.tensor(True)}, "found_inf is torch.bool"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        adam_(**{**arguments(), **wrong})
    if "exp_avg_sq" not in wrong:
        given = {**arguments(), **wrong}
        del given["exp_avg_sq"]
        with pytest.raises(KernelError, match=message):
            lion_(**given)


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(KernelError, match="a tile of 24 elements"):
        Tiles.cut([], "cpu", 24)
    with pytest.raises(KernelError, match="negative length, row or place"):
        Tiles.cut([FlatRun(4, 0, -1, 0, 0)], "cpu")
    with pytest.raises(KernelError, match=r"settings are torch.float64 \(1, 9\) for 2 rows"):
        advance_(torch.zeros(2), settings_table([RowSettings(1e-3)], "cpu"))
    with pytest.raises(KernelError, match=r"steps is torch\.int64"):
        advance_(torch.zeros(1, dtype=torch.int64), settings_table([RowSettings(1e-3)], "cpu"))


# ---- as torch sees them ----


@pytest.mark.parametrize("out", [None, torch.bfloat16])
def test_operators_are_well_declared(
    out: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    flats = Flats((20,), 1, torch.float32, out, (0, 0, 0, 0), 16)
    table = settings_table([RowSettings(1e-3)], "cpu")
    coefficients = advance_(flats.steps, table)
    torch.library.opcheck(torch.ops.hf_zero.flat_advance_.default, (flats.steps, table, None))
    shared = (flats.out, flats.tiles.table, coefficients, torch.tensor(2.0), torch.tensor(0.0), 16)
    torch.library.opcheck(
        torch.ops.hf_zero.flat_adam_.default,
        (flats.master, flats.grad, flats.mean, flats.square, *shared),
    )
    torch.library.opcheck(
        torch.ops.hf_zero.flat_lion_.default, (flats.master, flats.grad, flats.mean, *shared)
    )

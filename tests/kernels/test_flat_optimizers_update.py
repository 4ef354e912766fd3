"""The flat optimizers' kernels and references against torch.optim, segment by segment, in the
checked interpreter; sums of squares of many tensors in one pass, against fp64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero.ops.flat_optimizers import (
    ADVANCE,
    FlatRun,
    RowSettings,
    Tiles,
    adam_,
    advance_,
    lion_,
    settings_table,
)
from hf_zero.ops.flat_tiles import PHASE, RUN, squared_norms
from hf_zero.optim.lion import Lion
from tests.helpers.cells import in_one_item

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 131, 1, 7, 64, 3)  # of segments: single elements, odd ones, one that is a tile


class Flats:
    """Segments in flat buffers that begin at different places, with elements of nobody between."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        rows: int,
        grad: torch.dtype = torch.float32,
        out: torch.dtype | None = None,
        phases: tuple[int, ...] = (0, 0, 0, 0),
        tile: int = 64,
    ):
        self.pieces, at = [], 0
        for index, length in enumerate(lengths):
            *places, copy = (at + phase for phase in phases)
            ends = (*places, None if out is None else copy)
            self.pieces.append(FlatRun(length, index % rows, *ends))
            at += length + index % 3
        numel = at + max(phases)
        self.master, self.mean = torch.randn(numel), torch.zeros(numel)
        self.square = torch.zeros(numel)
        self.grad = torch.zeros(numel, dtype=grad)
        self.out = None if out is None else torch.full((numel,), 7.0, dtype=out)
        self.tiles = Tiles.cut(self.pieces, "cpu", tile)
        self.steps = torch.zeros(rows)

    def of(self, buffer: Tensor, place: str) -> list[Tensor]:
        ends = [(getattr(piece, place), piece.length) for piece in self.pieces]
        return [buffer[at : at + length] for at, length in ends if at is not None]

    def update(self, coefficients: Tensor, lion: bool, **told: Any) -> None:
        arrays = (self.mean,) if lion else (self.mean, self.square)
        update = lion_ if lion else adam_
        update(self.master, self.grad, *arrays, self.tiles, coefficients, out=self.out, **told)

    def step(self, settings: list[RowSettings], lion: bool = False, **told: Any) -> None:
        self.grad.copy_(torch.randn(self.grad.numel()))
        table = settings_table(settings, "cpu")
        self.update(advance_(self.steps, table, told.get("found_inf")), lion, **told)


DECAYED: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
MAXIMIZED = {"lr": 1e-2, "maximize": True}
AdamW, LION = torch.optim.AdamW, {"weight_decay": 0.1}
# class, what its groups set, where master, gradient, moments and copy begin
CASES: list[tuple[type, list[dict[str, Any]], tuple[int, ...]]] = [
    (AdamW, [DECAYED, {"lr": 3e-3, "weight_decay": 0.0, "eps": 1e-6}], (0, 0, 0, 0)),
    (torch.optim.Adam, [{**DECAYED, "betas": (0.8, 0.95)}, {"lr": 3e-3}], (8, 16, 0, 24)),
    (AdamW, [MAXIMIZED, {"lr": 1e-2, "betas": (0.0, 0.9)}, {"lr": 0.0}], (0, 1, 5, 2)),
    (Lion, [{"lr": 1e-2, **LION}, {"lr": 3e-3, **LION}], (8, 0, 16, 3)),
    (Lion, [{"lr": 1e-2}, {"lr": 3e-3}], (3, 3, 3, 3)),
]


def row_of(cls: type, group: dict[str, Any]) -> RowSettings:
    lion, decoupled = cls is Lion, cls is AdamW
    betas = group.get("betas", (0.9, 0.99) if lion else (0.9, 0.999))
    decay = group.get("weight_decay", 0.01 if decoupled else 0.0)
    more = {"corrected": False} if lion else {"decoupled": decoupled}
    maximize = group.get("maximize", False)
    eps = group.get("eps", 1e-8)
    return RowSettings(group["lr"], *betas, eps, decay, maximize=maximize, **more)


def test_steps_are_those_of_the_class(watched_body: str) -> None:
    """Torch's Adam, and the Lion of the paper, with gradients and copies of any dtype, which are
    divided; a step that is skipped moves and counts nothing.
    """
    divisor, none, found = torch.tensor(4.0), torch.tensor(0.0), torch.tensor(1.0)
    for number, (cls, groups, phases) in enumerate(CASES):
        lion, rows = cls is Lion, [row_of(cls, group) for group in groups]
        out = FLOATS[-number % 3]
        flats = Flats(LENGTHS, len(groups), FLOATS[number % 3], out, phases)
        before = flats.master.clone()
        whole = [torch.nn.Parameter(part.clone()) for part in flats.of(flats.master, "master")]
        parted = [
            [p for p, piece in zip(whole, flats.pieces) if piece.row == row]
            for row in range(len(groups))
        ]
        given = [{"params": each, **own} for each, own in zip(parted, groups)]
        theirs: Any = cls(given, foreach=False)
        for _ in range(2):
            flats.step(rows, lion, divisor=divisor, found_inf=none)
            for parameter, grad in zip(whole, flats.of(flats.grad, "grad")):
                parameter.grad = grad.float() / divisor
            theirs.step()
        arrays = [flats.master, flats.mean, flats.square, flats.out]
        kept = [each.clone() for each in arrays]
        flats.step(rows, lion, divisor=divisor, found_inf=found)
        assert all(torch.equal(now, was) for now, was in zip(arrays, kept))
        assert_close(flats, "master", flats.master, [p.data for p in whole])
        states = [theirs.state[p] for p in whole]
        moments = [(flats.mean, "exp_avg")] + [(flats.square, "exp_avg_sq")] * (not lion)
        for buffer, state in moments:
            assert_close(flats, "moment", buffer, [each[state] for each in states], 1e-7)
        assert flats.steps.tolist() == [2.0] * len(groups)
        for copy, master in zip(flats.of(flats.out, "out"), flats.of(flats.master, "master")):
            assert torch.equal(copy, master.to(out))
        untouched(flats, before)


def test_nan_reaches_the_weights(watched_body: str) -> None:
    for lion in (False, True):
        flats = Flats((64,), 1)
        flats.grad[5] = float("nan")
        rows = settings_table([RowSettings(1e-2, corrected=not lion)], "cpu")
        flats.update(advance_(flats.steps, rows), lion)
        assert (
            flats.master.isnan().nonzero().tolist()
            == [[5]]
            == flats.mean.isnan().nonzero().tolist()
        )


def test_lion_corrects_no_moments_and_takes_either_decay(watched_body: str) -> None:
    """Of the same settings as Adam: a corrected first step would be ten times as long."""
    for decoupled in (True, False):
        flats = Flats((64,), 1)
        flats.master = torch.randn(64)
        want, mean, decay = flats.master.clone(), torch.zeros(64), 0.5
        for _ in range(2):
            rows = [RowSettings(1e-2, 0.9, 0.99, weight_decay=decay, decoupled=decoupled)]
            flats.step(rows, lion=True)
            grad = flats.grad + (0.0 if decoupled else decay) * want
            want *= 1 - 1e-2 * decay * decoupled
            want -= 1e-2 * (0.9 * mean + 0.1 * grad).sign()
            mean = 0.99 * mean + 0.01 * grad
        torch.testing.assert_close(flats.master, want)
        torch.testing.assert_close(flats.mean, mean)


@in_one_item((1, 127, 128, 300))
def test_rows_take_programs_of_one_size(rows: int) -> None:
    """The compiler takes minutes for a program of thousands of rows, which segments of a mixture of
    experts become.
    """
    from tests.helpers.checked_triton import checked_triton

    settings = settings_table([RowSettings(1e-3 * (1 + row)) for row in range(rows)], "cpu")
    for found in (None, torch.zeros(()), torch.ones(())):
        steps = torch.arange(rows, dtype=torch.float32)
        counted = steps.clone()
        with checked_triton() as checked:
            out = ADVANCE(steps, settings, found)
            assert checked.launches == 1
        torch.testing.assert_close(
            out, ADVANCE.reference(counted, settings, found), rtol=2e-7, atol=0
        )
        assert torch.equal(steps, counted)


def test_one_program_is_compiled_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.ops.triton_kernels import flat_optimizers

    launched = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **named: launched.append((*grid, given[-1]))

    monkeypatch.setattr(flat_optimizers, "advance_kernel", Kernel())
    for rows in (1, 128, 129, 4096):
        flat_optimizers.advance_(torch.zeros(rows), torch.zeros(rows, 9), None)
    assert launched == [(1, 128), (1, 128), (2, 128), (32, 128)]


def assert_close(
    flats: Flats, place: str, buffer: Tensor, want: list[Tensor], atol: float = 3e-7
) -> None:
    torch.testing.assert_close(flats.of(buffer, place), want, rtol=3e-7, atol=atol)


def untouched(flats: Flats, before: Tensor) -> None:
    """Elements of no segment are what they were."""
    sevens = torch.full_like(before, 7.0)
    for buffer, place, was in ((flats.master, "master", before), (flats.out, "out", sevens)):
        inside = torch.zeros(buffer.numel(), dtype=torch.bool)
        for part in flats.of(inside, place):
            part.fill_(True)
        assert torch.equal(buffer[~inside], was[~inside].to(buffer.dtype))


@in_one_item((16, 64, 4096))
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
        want = torch.zeros_like(seen)
        for master, grad, moment, out, length, row, whole, _ in tiles.table.tolist():
            seen[master : master + length] += 1 + row
            piece, places = pieces[row], (master, grad, moment, out)
            first = (piece.master, piece.grad, piece.moment, piece.out)
            assert len({place - start for place, start in zip(places, first)}) == 1
            assert 0 < length <= tile
            aligned = all(place % PHASE == 0 for place in places)
            assert not whole or (length == tile and aligned)
        for piece in pieces:
            want[piece.master : piece.master + piece.length] = 1 + piece.row
        assert torch.equal(seen, want)
        assert tiles.table[:, 4].sum() == sum(piece.length for piece in pieces)


def test_many_tensors_of_one_buffer(watched_body: str) -> None:
    for dtype in FLOATS:
        buffer = torch.randn(RUN * 2 + 700).to(dtype)
        ends = ((0, 1), (8, RUN + 8), (RUN + 9, RUN * 2 + 100), (5, 5), (RUN * 2 + 699, None))
        parts = [buffer[start:stop] for start, stop in ends]
        want = torch.stack([part.double().square().sum() for part in parts])
        torch.testing.assert_close(squared_norms(parts), want, rtol=2e-7, atol=0)
    buffer, other = torch.randn(RUN + 500), torch.randn(50).bfloat16()
    alone = squared_norms([buffer[8 : RUN + 300]])
    beside = squared_norms([buffer[:8], other, buffer[8 : RUN + 300], torch.randn(30), other[3:20]])
    assert torch.equal(beside[2], alone[0]), "a sum depends on its tensor alone"
    for place, part in ((1, other), (4, other[3:20])):
        want = part.double().square().sum().item()
        assert beside[place].item() == pytest.approx(want, rel=2e-7)
    empty = [torch.ones(4), torch.empty(0), torch.empty(0, 3)]
    assert squared_norms(empty).tolist() == [4.0, 0.0, 0.0]


def test_more_accurate_than_one_fp32_sum_and_not_finite_where_an_element_is_not(watched_body):
    x = torch.randn(5 * RUN) + 3
    exact = x.double().square().sum().item()
    ours = abs(squared_norms([x]).item() / exact - 1)
    theirs = abs(x.square().cumsum(0)[-1].item() / exact - 1)
    assert ours < 1e-7 and ours < theirs
    for value in (1e30, 1e-30, 0.0):
        x = torch.full((100,), value)
        total = squared_norms([x]).item()
        assert total == pytest.approx(100 * x[0].double().item() ** 2, rel=1e-9)
    for dtype in FLOATS:
        for bad in (float("inf"), -float("inf"), float("nan")):
            x = torch.ones(300, dtype=dtype)
            x[-1] = bad
            finite = squared_norms([torch.ones(3, dtype=dtype), x]).isfinite()
            assert finite.tolist() == [True, False]

"""Selection of the cells of a product that the fast suite runs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.cells import off_turn

MARKS = [pytest.mark.parametrize("stage", range(4)), pytest.mark.parametrize("way, size", [])]
WAYS = [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1)]


class Cell(SimpleNamespace):
    """The part of a ``pytest.Item`` that the selection reads."""

    def __init__(self, *, marked: bool = True, **params: Any) -> None:
        super().__init__(nodeid=f"f::t[{params}]", callspec=SimpleNamespace(params=params))
        self.marked = marked

    __hash__ = object.__hash__

    def get_closest_marker(self, name: str) -> bool:
        return self.marked and name == "turns"

    def iter_markers(self, name: str) -> list[Any]:
        asked = [mark.mark for mark in MARKS if name == "parametrize"]
        return [mark for mark in asked if mark.args[0].partition(",")[0] in self.callspec.params]


def test_values_take_turns_at_stage_3_and_each_other_stage_is_met_once() -> None:
    cells: list[Any] = [
        Cell(stage=stage, way=way, size=size, core=core)
        for stage, (way, size), core in itertools.product(range(4), WAYS, ("x", "y"))
    ]
    late = off_turn(cells)
    ran = {tuple(cell.callspec.params.values()) for cell in cells if cell not in late}
    others = {(0, "a", 1, "x"), (1, "a", 2, "y"), (2, "b", 1, "x")}
    assert ran == others | {(3, *way, core) for way, core in zip(WAYS, "xyxyx")}


def test_without_stages_all_take_turns() -> None:
    cells: list[Any] = [
        Cell(kind=kind, way=way, size=size)
        for kind, (way, size) in itertools.product(("x", "y"), WAYS)
    ]
    ran = [cell.callspec.params for cell in cells if cell not in off_turn(cells)]
    assert {(each["kind"], each["way"], each["size"]) for each in ran} == {
        (kind, *way) for kind, way in zip("xyxyx", WAYS)
    }


def test_tests_that_do_not_ask_run_whole() -> None:
    cells: list[Any] = [Cell(marked=False, stage=3, way="a", size=size) for size in (1, 2)]
    assert off_turn(cells) == set()

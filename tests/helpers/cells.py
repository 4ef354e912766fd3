"""Selection of the cells of a matrix that the fast suite runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

_with_long = False


def configure(config: pytest.Config) -> None:
    """Note before tests are imported whether this run has the long suite's cells."""
    global _with_long
    _with_long = runs_long(config)


def runs_long(config: pytest.Config) -> bool:
    """Whether this run has the long suite's tests, too."""
    expression = config.getoption("markexpr") or ""
    return config.getoption("--long") or "long" in expression.replace("not long", "")


def fast(cells: Iterable[Any], often: Callable[..., bool]) -> list[Any]:
    """Return ``cells`` as parameters; those for which ``often`` is false are long."""
    chosen = []
    for cell in cells:
        values = cell if isinstance(cell, tuple) else (cell,)
        chosen.append(pytest.param(*values, marks=() if often(*values) else pytest.mark.long))
    assert any(not each.marks for each in chosen), "the fast suite would run none of these cells"
    return chosen


def by_stage(stages: Sequence[int], *axes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the cells of the product of ``stages`` and ``axes`` for the fast suite, and the
    others: all at stage 3, where parameters move; at another stage one, of which each axis has a
    turn.
    """
    cells = [*product(stages, *axes)]
    chosen = [
        cell
        for cell in cells
        if cell[0] == 3 or all(axis[cell[0] % len(axis)] is at for axis, at in zip(axes, cell[1:]))
    ]
    return chosen, [cell for cell in cells if cell not in chosen]


def in_one_item(
    values: Iterable[Any], named: Callable[[Any], object] = repr, long: Iterable[Any] = ()
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Makes a test of one argument, which takes less than an item of pytest does, one item over
    all ``values``; the long suite adds those of ``long``. Each that fails is told by its name.
    """
    values = [*values, *(long if _with_long else ())]  # a list: the test may run again

    def decorate(test: Callable[[Any], None]) -> Callable[[], None]:
        def over_all() -> None:
            _run_all((named(value), partial(test, value)) for value in values)

        over_all.__name__, over_all.__doc__ = test.__name__, test.__doc__
        return over_all

    return decorate


def in_turn(
    names: str | Sequence[str], cells: Iterable[Any], long: Iterable[Any] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize``, in one item that runs all ``cells`` and names those that
    fail; the long suite adds those of ``long``. Each has the fixed seed, and a ``tmp_path`` and a
    ``monkeypatch`` of its own.
    """
    keys = names.replace(" ", "").split(",") if isinstance(names, str) else names
    cells = [*cells, *(long if _with_long else ())]
    every = [cell if len(keys) > 1 else (cell,) for cell in cells]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(number: int, cell: tuple[Any, ...], given: dict[str, Any]) -> None:
            torch.manual_seed(0)
            with pytest.MonkeyPatch.context() as patch:
                if "monkeypatch" in given:
                    given = {**given, "monkeypatch": patch}
                if "tmp_path" in given:
                    given = {**given, "tmp_path": given["tmp_path"] / str(number)}
                    given["tmp_path"].mkdir()
                test(**given, **dict(zip(keys, cell, strict=True)))

        @wraps(test)
        def over_all(**given: Any) -> None:
            _run_all((cell, partial(run, at, cell, given)) for at, cell in enumerate(every))

        asked = inspect.signature(test).parameters.values()
        fixtures = [each for each in asked if each.name not in keys]
        over_all.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return over_all

    return decorate


def _run_all(cases: Iterable[tuple[object, Callable[[], None]]]) -> None:
    """Run each case; name all that fail in one error, caused by the first. Skip if all skip."""
    failed: list[str] = []
    first: BaseException | None = None
    skipped: list[str] = []
    ran = 0
    for name, case in cases:
        try:
            case()
            ran += 1
        except pytest.skip.Exception as skip:
            skipped.append(f"{name}: {skip}")
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            first = first or error
    if failed:
        raise AssertionError("\n".join(failed)) from first
    if skipped and not ran:
        pytest.skip("; ".join(skipped))


def parted(
    items: list[pytest.Item], part: int, parts: int, launches: Callable[[Path], bool]
) -> list[pytest.Item]:
    """Return the items of ``part``, from 1 to ``parts``: whole files, the largest dealt first to
    the part that has least. A test that starts processes counts as twenty others.
    """
    files: dict[Path, int] = {}
    for item in items:
        files[item.path] = files.get(item.path, 0) + (20 if launches(item.path) else 1)
    loads, chosen = [0] * parts, set[Path]()
    for path, weight in sorted(files.items(), key=lambda entry: (-entry[1], entry[0])):
        least = loads.index(min(loads))
        loads[least] += weight
        if least == part - 1:
            chosen.add(path)
    return [item for item in items if item.path in chosen]


def off_turn(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return those of ``items`` that the long suite alone runs, by the mark ``turns``. Of the
    product of a test's parametrizations the fast suite runs the cells that pair values at the same
    position (shorter lists start again); all cells with ``stage=3``, where parameters move; and one
    with each other stage.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("turns"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {item for cells in tests.values() for item in _off_turn(cells)}


def _off_turn(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    cells = [_axes(item) for item in items]
    axes = [list(dict.fromkeys(cell[at] for cell in cells)) for at in range(len(cells[0]))]
    stages = [at for at, values in enumerate(axes) if _are_stages(items, values)]
    others = [at for at in range(len(axes)) if at not in stages]
    for item, cell in zip(items, cells):
        place = [values.index(value) for values, value in zip(axes, cell)]
        if stages and item.callspec.params["stage"] != 3:  # type: ignore[attr-defined]
            turns: Iterable[int] = [place[at] for at in stages]
        else:
            turns = range(max((len(axes[at]) for at in others), default=1))
        if not any(all(place[at] == turn % len(axes[at]) for at in others) for turn in turns):
            yield item


def _axes(item: Any) -> list[tuple[int, ...]]:
    """The place of ``item`` in its parametrizations: the objects that each has given it."""
    values = dict(item.callspec.params)
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    several = [
        name.replace(" ", "").split(",") if isinstance(name, str) else name for name in names
    ]
    found = [tuple(id(values.pop(name)) for name in each) for each in several]
    return found + [(id(value),) for value in values.values()]  # of fixtures


def _are_stages(items: list[Any], values: list[tuple[int, ...]]) -> bool:
    """Whether ``values`` are stages, and 3 is one of them."""
    stages = {item.callspec.params.get("stage", "none") for item in items}
    return 3 in stages and set(values) == {(id(stage),) for stage in stages}

"""A parametrized test as one item: collection and fixtures cost more than most of its cells."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def in_turn(
    names: str | Sequence[str], cells: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize``, in one item that runs all ``cells`` and names those that
    fail. Each has a ``tmp_path`` and a ``monkeypatch`` of its own.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    every = [cell if len(keys) > 1 else (cell,) for cell in cells]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        asked = [
            each for name, each in inspect.signature(test).parameters.items() if name not in keys
        ]

        def over_all(**given: Any) -> None:
            failed = []
            for number, cell in enumerate(every):
                with pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in given:
                        given["monkeypatch"] = patch
                    own = dict(given)
                    if "tmp_path" in given:
                        own["tmp_path"] = given["tmp_path"] / str(number)
                        own["tmp_path"].mkdir()
                    try:
                        test(**own, **dict(zip(keys, cell, strict=True)))
                    except (Exception, pytest.fail.Exception) as error:
                        failed.append(f"{cell}: {type(error).__name__}: {error}")
            assert not failed, "\n".join(failed)

        over_all.__name__, over_all.__doc__ = test.__name__, test.__doc__
        over_all.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        return over_all

    return decorate

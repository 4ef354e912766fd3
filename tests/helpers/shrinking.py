"""The smallest random program that fails as another one does, and how to run both."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.helpers.random_programs import MICRO, Mesh, Program, check, runnable


def failure(program: Program) -> tuple[str, str]:
    """The kind of failure of ``program``, and its text; two empty strings where all is well, or
    nothing of it runs.
    """
    found = runnable(program)
    if found is None:
        return "", ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(*found, Path(folder))
        except AssertionError as error:
            return type(error.__cause__ or error).__name__, str(error)
    return "", ""


def smaller(program: Program) -> Iterator[Callable[[Program], Program]]:
    """What makes a program smaller: each act left out, the last first; then each feature."""
    for at in reversed(range(1, len(program.life))):
        yield lambda each, at=at: replace(each, life=each.life[:at] + each.life[at + 1 :])
    plain: dict[str, Any] = {"batch": "plain", "clip": 0.0, "adam": False, "tied": False}
    for name, value in {**plain, "kind": "llama", "meshes": (Mesh(data=2),)}.items():
        yield lambda each, name=name, value=value: replace(each, **{name: value})
    for change in ({"stage": 0}, {"micros": MICRO}):
        yield lambda each, change=change: replace(
            each, life=tuple(replace(act, **change) for act in each.life)
        )


def shrunk(program: Program, trials: int = 60) -> tuple[Program, str]:
    """A program that fails as ``program`` does and is the smallest that ``trials`` runs find, and
    the text of its failure.
    """
    (kind, text), tried, before = failure(program), {program}, None
    while program != before:
        before = program
        for change in smaller(before):
            simpler = change(program)
            if simpler in tried or len(tried) > trials:
                continue
            tried.add(simpler)
            found, said = failure(simpler)
            if found == kind != "":
                program, text = simpler, said
    return program, text


def story(program: Program) -> str:
    """How to run the program of a seed that has failed, and the smallest that fails like it."""
    seed = program.seed
    small, text = shrunk(program)
    return (
        f"HF_ZERO_SEEDS={seed + 1} python -m pytest -n 0 "
        f"'tests/matrix/test_random_programs.py::test_as_in_one_process[{seed}]'\n"
        f"seed {seed}: {program}\nshrunk: {small}\n    {small!r}\nwhich fails with {text}"
    )

"""No modules of the package import each other in a circle, read from the source.

A circle at load time is an error. One that imports inside functions or for types close is a sign of
two modules that are one concern: those that there are stand in a list, which may only get shorter.
"""

from __future__ import annotations

import pytest

from tests.helpers.house import circles, graph, sources
from tests.package.test_layering import PACKAGE

# closed by imports inside functions or for types alone
CIRCLES = {("hf_zero.units.flat_buffer", "hf_zero.units.unit")}


SOURCES = sources(PACKAGE)


def test_no_circle_at_load_time() -> None:
    assert circles(graph(SOURCES, everywhere=False)) == []


def test_circles_closed_inside_functions_only_get_fewer() -> None:
    found = circles(graph(SOURCES, everywhere=True))
    assert set(found) == CIRCLES, "a new circle, or one that is gone: take out its row"


@pytest.mark.parametrize(
    ("other", "load", "everywhere"),
    [
        ("from p import a", True, True),
        ("from p.a import name", True, True),
        ("import p.a", True, True),
        ("def f():\n    from p import a", False, True),
        ("if TYPE_CHECKING:\n    from p import a", False, True),
        ("try:\n    from .a import name\nexcept ImportError:\n    pass", True, True),
        ("from p import c", False, False),
    ],
)
def test_a_circle_is_seen(other: str, load: bool, everywhere: bool) -> None:
    sources = {
        "p": ("", True),
        "p.a": ("from p import b", False),
        "p.b": (other, False),
        "p.c": ("", False),
    }
    assert bool(circles(graph(sources, everywhere=False))) is load
    assert bool(circles(graph(sources, everywhere=True))) is everywhere

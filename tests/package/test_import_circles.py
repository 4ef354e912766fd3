"""No modules of the package import each other in a circle, read from the source.

Nor one that imports inside functions or for types close: such modules are one concern.
"""

from __future__ import annotations

import pytest

from tests.helpers.house import circles, graph, sources
from tests.package.test_layering import PACKAGE

SOURCES = sources(PACKAGE)


@pytest.mark.parametrize("everywhere", [False, True], ids=["at load time", "inside functions, too"])
def test_there_is_no_circle(everywhere: bool) -> None:
    # for types, the package's own file imports each public name, wherever it is
    held = {name: each for name, each in SOURCES.items() if not everywhere or name != "hf_zero"}
    assert circles(graph(held, everywhere=everywhere)) == []


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

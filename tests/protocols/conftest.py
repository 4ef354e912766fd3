"""Fixtures of the tests in virtual time."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator

import pytest

from tests.protocols.stand_ins import installed

LONG = 50_000  # schedules of a protocol in the long suite


@pytest.fixture(autouse=True)
def virtual_time() -> Iterator[None]:
    """Install the stand-ins; what the ranks log, and cycles of garbage, are not of interest."""
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        with installed():
            yield
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


@pytest.fixture(params=["few", pytest.param("many", marks=pytest.mark.long)])
def schedules(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Return how many schedules a case has: as many as given; in the long suite :data:`LONG` for
    all cases of a protocol.
    """
    return lambda few, cases=1: -(-LONG // cases) if request.param == "many" else few

"""All the ways people call a model: the table that the threaded and the gloo tests share."""

from __future__ import annotations

from tests.helpers.training import Job
from tests.helpers.ways_built import BUILT
from tests.helpers.ways_called import CALLED

WAYS: dict[str, Job] = {way.name: way for way in (*CALLED, *BUILT)}

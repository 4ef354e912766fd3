"""All the ways people call a model: the list that the threaded and the gloo tests share."""

from __future__ import annotations

from tests.helpers import ways_called, ways_checkpointed, ways_frozen, ways_parametrized
from tests.helpers.training import Job

WAYS: dict[str, Job] = {
    way.name: way for way in (*ways_checkpointed.ways(), *ways_called.ways(), *ways_frozen.ways(), *ways_parametrized.ways())
}

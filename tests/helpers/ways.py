"""All the ways people call a model: the list that the threaded and the gloo tests share."""

from __future__ import annotations

from tests.helpers import (
    ways_called,
    ways_checkpointed,
    ways_frozen,
    ways_in_blocks,
    ways_parametrized,
)
from tests.helpers.training import Job

WAYS: dict[str, Job] = {
    way.name: way
    for module in (ways_checkpointed, ways_called, ways_frozen, ways_parametrized, ways_in_blocks)
    for way in module.ways()
}

"""``engine.monitor`` of a configuration that switches no monitor on: all that there is in this
version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DisabledMonitor:
    """A monitor with nothing to write to."""

    enabled = False

    def write_events(self, event_list: Sequence[tuple[str, Any, int]], flush: bool = True) -> None:
        """Nothing is written."""

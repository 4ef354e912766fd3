"""``deepspeed.utils.RepeatingLoader``: an endless loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class RepeatingLoader:
    """Iterate over ``loader`` again and again.

    An endless stream of batches for loops that count steps.
    """

    def __init__(self, loader: Any):
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

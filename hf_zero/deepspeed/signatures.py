"""The types of what ``initialize`` may be given for an optimizer and a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]

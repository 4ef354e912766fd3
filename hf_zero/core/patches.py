"""What is put on a model together with an engine and knows nothing of sharding: activation
checkpointing and offload, compiled blocks, an order of attention kernels.

The engine does not import them (they import the engine's layer); it is given an object of this
form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from hf_zero.units.unit import Unit


class Patches(Protocol):
    """For one model and one engine."""

    def check(self, model: nn.Module, fixed_addresses: bool) -> None:
        """Raise ConfigError for what cannot be installed, before the model is changed.

        ``fixed_addresses``: parameters keep their memory for the life of the engine.
        """
        ...

    def install(
        self, model: nn.Module, units: Sequence[Unit], device: torch.device, logs: bool
    ) -> None:
        """Put everything on ``model``, whose hooks of the engine are in place.

        ``logs``: whether this rank says what was installed.
        """
        ...

    def remove(self) -> None:
        """Take everything off again, whatever of it is there. Idempotent."""
        ...

    def compile(self, backend: str | Callable[..., Any], **options: Any) -> None:
        """Compile each block's forward with these arguments of torch.compile."""
        ...

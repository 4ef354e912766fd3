"""Activations: which blocks recompute them in the backward, and which of them wait for it in host
memory.

The sections are small frozen dataclasses whose fields are rows of
:mod:`hf_zero.config.activation_keys`. :func:`settle` and :func:`check` hold what one key of theirs
means for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_zero.config.activation_keys import BLOCKS, ENABLED, NUMBER, OFFLOAD
from hf_zero.config.reading import Reading
from hf_zero.errors import ConfigError


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Blocks whose activations are recomputed in the backward (arXiv 1604.06174), without a change
    of the script.

    ``blocks`` True takes all of the model's repeated blocks, a number the first so many of them,
    and "selective" keeps the results of matrix products and attention and recomputes the rest
    (torch refuses blocks that change those results in place). ``number_checkpoints``, DeepSpeed's
    word, is a number of blocks, too. None leaves it to the model and the script, and False says so.
    ``cpu_checkpointing`` keeps what checkpoints keep in host memory. ``profile`` logs the time of
    forwards and recomputations, for which it waits for the device at each one's end; so does
    ``synchronize`` without the log.
    """

    blocks: bool | int | Literal["selective"] | None = None
    number_checkpoints: int | None = None
    cpu_checkpointing: bool = False
    synchronize: bool = False
    profile: bool = False

    @property
    def number(self) -> int | None:
        """How many blocks are checkpointed; None: all of them."""
        if self.blocks is False or (self.blocks is None and not self.number_checkpoints):
            return 0
        if isinstance(self.blocks, int) and not isinstance(self.blocks, bool):
            return self.blocks
        return self.number_checkpoints or None

    @property
    def selective(self) -> bool:
        return self.blocks == "selective"


@dataclass(frozen=True)
class ActivationOffload:
    """Tensors that a forward saves for its backward, in memory of the host until then.

    Those below ``min_bytes`` stay. ``in_flight_bytes`` of device memory may wait for copies to the
    host, and as much may be brought back ahead of its use; None is as much as two blocks save, 512
    MiB at least; what is still on the device when the forward ends stays there. ``pin_memory`` None
    pins where there is a GPU.
    """

    enabled: bool = False
    min_bytes: int = 1 << 20
    in_flight_bytes: int | None = None
    pin_memory: bool | None = None


def settle(reading: Reading) -> None:
    """Fill in, in place, that a section which is written is meant, unless it says ``enabled:
    false``.
    """
    if ENABLED in reading.filled:
        reading.discard(ENABLED)
    written = next((path for path in reading.values if path.startswith(f"{OFFLOAD}.")), None)
    if written is not None and ENABLED not in reading.values:
        reading.fill(ENABLED, True, f"computed: {written} is written")


def check(reading: Reading) -> None:
    """Note in ``reading`` two numbers of blocks."""
    values, sources = reading.values, reading.sources
    blocks, number = values.get(BLOCKS), values.get(NUMBER)
    if isinstance(blocks, int) and not isinstance(blocks, bool) and number and number != blocks:
        reading.mistakes.append(
            ConfigError(
                f"{BLOCKS} = {blocks} ({sources[BLOCKS]}) contradicts {NUMBER} = {number} "
                f"({sources[NUMBER]}): both say how many blocks are "
                "checkpointed; remove one of them"
            )
        )

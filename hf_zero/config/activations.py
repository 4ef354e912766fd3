"""Configuration of what runs in blocks: recomputation, offload, tiled MLPs, compilation, layouts of
sparse attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_zero.config.feature_rows import FeatureSection
from hf_zero.config.value_types import (
    BOOLEAN,
    COUNT,
    TEXT,
    ValueType,
    choice,
    integer,
    key,
    without,
)

if TYPE_CHECKING:
    from hf_zero.config.reading import ConfigReading

CHECKPOINTING = "activation_checkpointing"
BLOCKS = f"{CHECKPOINTING}.blocks"
NUMBER = f"{CHECKPOINTING}.number_checkpoints"
CPU = f"{CHECKPOINTING}.cpu_checkpointing"
OFFLOAD = "activation_offload"
ENABLED = f"{OFFLOAD}.enabled"


def sparse_layout(section: object) -> dict[str, Any] | None:
    """Return the layout that the ``section`` sparse_attention describes; None: dense attention."""
    layout = dict(section) if isinstance(section, Mapping) else {"enabled": False}
    enabled = layout.pop("enabled", True) and layout.get("mode", "fixed") != "dense"
    return layout if enabled else None


def attends_sparsely(values: Mapping[str, object]) -> bool:
    """Return whether ``values``, by key, switch sparse attention on."""
    return sparse_layout(values.get("sparse_attention")) is not None


def _blocks(value: object) -> bool | int | str:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if value.lower() != "selective":
            raise ValueError(value)
        return "selective"
    return int(integer(1).convert(value))


_BLOCKS_SCHEMA = {
    "anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1}, {"const": "selective"}]
}


def _idle_number(values: Mapping[str, object]) -> str:
    return f"{BLOCKS} is false" if values.get(BLOCKS) is False else ""


def _idle_offload(values: Mapping[str, object]) -> str:
    return "" if values.get(ENABLED) or values.get(CPU) else f"{OFFLOAD} is off"


@dataclass(frozen=True)
class ActivationCheckpointing(FeatureSection):
    """Activation checkpointing of the model's blocks (arXiv 1604.06174), without a change of the
    script.

    ``blocks``: True checkpoints all repeated blocks of the model, a number n the first n of them;
    "selective" saves the results of matrix products and attention and recomputes the rest (torch
    refuses blocks that modify those results in place). None leaves checkpointing to the model and
    the script, False disables it here. ``number_checkpoints``, DeepSpeed's key, is a number of
    blocks as well. ``cpu_checkpointing`` offloads the tensors that checkpoints save to host memory.
    ``profile`` logs the time of forwards and recomputations and synchronizes with the device at the
    end of each; ``synchronize`` does so without the log.
    """

    FIELD = SECTION_PATH = CHECKPOINTING

    blocks: bool | int | Literal["selective"] | None = key(
        ValueType("true, false, a number of blocks, or 'selective'", _blocks, _BLOCKS_SCHEMA),
        None,
        unit="blocks",
    )
    number_checkpoints: int | None = key(COUNT, None, idle=_idle_number, unit="blocks")
    cpu_checkpointing: bool = key(BOOLEAN, False)
    synchronize: bool = key(BOOLEAN, False, name="synchronize_checkpoint_boundary")
    profile: bool = key(BOOLEAN, False)

    @classmethod
    def check_reading(cls, reading: ConfigReading) -> None:
        """Record an error if ``blocks`` and ``number_checkpoints`` disagree."""
        values, sources = reading.values, reading.sources
        blocks, number = values.get(BLOCKS), values.get(NUMBER)
        whole = isinstance(blocks, int) and not isinstance(blocks, bool)
        if whole and number and number != blocks:
            reading.mistakes.add(
                f"{BLOCKS} = {blocks} ({sources[BLOCKS]}) contradicts {NUMBER} = {number} "
                f"({sources[NUMBER]}): both say how many blocks are checkpointed; remove one of "
                "them"
            )

    @property
    def number(self) -> int | None:
        """The number of checkpointed blocks; None for all of them."""
        if self.blocks is False or (self.blocks is None and not self.number_checkpoints):
            return 0
        if isinstance(self.blocks, int) and not isinstance(self.blocks, bool):
            return self.blocks
        return self.number_checkpoints or None

    @property
    def selective(self) -> bool:
        return self.blocks == "selective"


@dataclass(frozen=True)
class TiledMlpSection(FeatureSection):
    """Tiled MLPs: the MLPs of the model's blocks process the tokens tile by tile and recompute each
    tile in the backward; see :mod:`hf_zero.parallel.sequence.tiled_mlp`.
    """

    FIELD = SECTION_PATH = "tiled_mlp"

    enabled: bool = key(BOOLEAN, False)
    shards: int | None = key(integer(1), None, unit="stretches", idle=without("tiled_mlp.enabled"))


@dataclass(frozen=True)
class ActivationOffload(FeatureSection):
    """Offload of the tensors that a forward saves for its backward to host memory.

    Tensors smaller than ``min_bytes`` stay on the device. ``in_flight_bytes`` bounds the device
    memory that waits for copies to the host, and likewise the memory prefetched for the backward;
    None: as much as two blocks save, at least 512 MiB. Tensors still on the device when the forward
    ends stay there. ``pin_memory`` None pins host memory where there is a GPU.
    """

    FIELD = SECTION_PATH = OFFLOAD

    enabled: bool = key(BOOLEAN, False)
    min_bytes: int = key(COUNT, 1 << 20, idle=_idle_offload, unit="bytes")
    in_flight_bytes: int | None = key(integer(1), None, idle=_idle_offload, unit="bytes")
    pin_memory: bool | None = key(BOOLEAN, None, idle=_idle_offload)

    @classmethod
    def complete(cls, reading: ConfigReading) -> None:
        """Enable activation offload, in place, if its section has a key, but not ``enabled``."""
        if ENABLED in reading.filled:
            reading.discard(ENABLED)
        below = f"{OFFLOAD}."
        written = next((path for path in reading.values if path.startswith(below)), None)
        if written is not None and ENABLED not in reading.values:
            reading.fill(ENABLED, True, f"computed: {written} is written")


CAPTURE = "compile.capture"
_UNCOMPILED = without("compile.blocks")


@dataclass(frozen=True)
class CompileSection(FeatureSection):
    """torch.compile for the forwards of blocks; see :mod:`hf_zero.activations.compile`."""

    FIELD = SECTION_PATH = "compile"

    blocks: bool = key(BOOLEAN, False)
    # CUDA graphs fix the addresses of weights; gathers at stage 3 and checkpoints do not.
    mode: str = key(choice("default", "max-autotune-no-cudagraphs"), "default", idle=_UNCOMPILED)
    dynamic: bool | None = key(BOOLEAN, None, idle=_UNCOMPILED)
    backend: str = key(TEXT, "inductor", idle=_UNCOMPILED)
    capture: str | None = key(choice("step"), None)

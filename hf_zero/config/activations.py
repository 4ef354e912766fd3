"""Configuration of activation memory: recomputation in the backward, offload to host memory, tiled
MLPs. Checks across keys are in :mod:`hf_zero.config.checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_zero.config.kinds import BOOLEAN, COUNT, Kind, integer
from hf_zero.config.rows import inert, key, under, without

CHECKPOINTING = "activation_checkpointing"
BLOCKS = f"{CHECKPOINTING}.blocks"
NUMBER = f"{CHECKPOINTING}.number_checkpoints"
CPU = f"{CHECKPOINTING}.cpu_checkpointing"
OFFLOAD = "activation_offload"
ENABLED = f"{OFFLOAD}.enabled"


def _blocks(value: Any) -> bool | int | str:
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


def _idle_number(values: Mapping[str, Any]) -> str:
    return f"{BLOCKS} is false" if values.get(BLOCKS) is False else ""


def _idle_offload(values: Mapping[str, Any]) -> str:
    return "" if values.get(ENABLED) or values.get(CPU) else f"{OFFLOAD} is off"


@dataclass(frozen=True)
class ActivationCheckpointing:
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

    blocks: bool | int | Literal["selective"] | None = key(
        Kind("true, false, a number of blocks, or 'selective'", _blocks, _BLOCKS_SCHEMA),
        None,
        "blocks that recompute their activations; selective: all but products and "
        "attention; null: as the model does",
        unit="blocks",
    )
    number_checkpoints: int | None = key(
        COUNT,
        None,
        "how many blocks, from the first on, are checkpointed",
        idle=_idle_number,
        unit="blocks",
    )
    cpu_checkpointing: bool = key(BOOLEAN, False, "what checkpoints keep waits in host memory")
    synchronize: bool = key(
        BOOLEAN,
        False,
        "wait for the device around each checkpoint",
        name="synchronize_checkpoint_boundary",
    )
    profile: bool = key(
        BOOLEAN, False, "log the time of checkpointed forwards and of recomputations"
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
class TiledMlpSection:
    """Tiled MLPs: the MLPs of the model's blocks process the tokens tile by tile and recompute each
    tile in the backward; see :mod:`hf_zero.parallel.sequence.tiled_mlp`.
    """

    enabled: bool = key(
        BOOLEAN,
        False,
        "MLPs compute one stretch of the tokens after another, and again in the backward: less "
        "memory for long sequences",
    )
    shards: int | None = key(
        integer(1),
        None,
        "stretches; null: tokens / hidden size, the most of any rank",
        unit="stretches",
        idle=without("tiled_mlp.enabled"),
    )


@dataclass(frozen=True)
class ActivationOffload:
    """Offload of the tensors that a forward saves for its backward to host memory.

    Tensors smaller than ``min_bytes`` stay on the device. ``in_flight_bytes`` bounds the device
    memory that waits for copies to the host, and likewise the memory prefetched for the backward;
    None: as much as two blocks save, at least 512 MiB. Tensors still on the device when the forward
    ends stay there. ``pin_memory`` None pins host memory where there is a GPU.
    """

    enabled: bool = key(BOOLEAN, False, "tensors saved for the backward wait in host memory")
    min_bytes: int = key(
        COUNT, 1 << 20, "smaller ones stay on the device", idle=_idle_offload, unit="bytes"
    )
    in_flight_bytes: int | None = key(
        integer(1),
        None,
        "device memory that waits for copies; null: two blocks' worth",
        idle=_idle_offload,
        unit="bytes",
    )
    pin_memory: bool | None = key(
        BOOLEAN, None, "page-locked memory; null: where there is a GPU", idle=_idle_offload
    )


ACTIVATIONS = under(
    CHECKPOINTING,
    inert(
        "partition_activations",
        BOOLEAN,
        "divides activations among tensor-parallel ranks, of which there is one",
    ),
    inert(
        "contiguous_memory_optimization",
        BOOLEAN,
        "no buffer is set aside; expandable_segments:True in PYTORCH_ALLOC_CONF keeps the "
        "device's memory whole",
    ),
)

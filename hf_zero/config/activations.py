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
        "which blocks recompute their activations; selective recomputes all except matrix "
        "products and attention; null leaves it to the model",
        unit="blocks",
    )
    number_checkpoints: int | None = key(
        COUNT,
        None,
        "number of blocks, from the first on, that recompute their activations",
        idle=_idle_number,
        unit="blocks",
    )
    cpu_checkpointing: bool = key(
        BOOLEAN, False, "keep the inputs of recomputed blocks in host memory"
    )
    synchronize: bool = key(
        BOOLEAN,
        False,
        "wait for the device before and after each checkpointed forward",
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
        "MLPs compute one chunk of tokens after another, and again in the backward, which "
        "saves memory with long sequences",
    )
    shards: int | None = key(
        integer(1),
        None,
        "number of chunks; null uses tokens / hidden size, the largest number of any rank",
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

    enabled: bool = key(
        BOOLEAN, False, "keep tensors that are saved for the backward in host memory"
    )
    min_bytes: int = key(
        COUNT,
        1 << 20,
        "tensors with fewer bytes stay on the device",
        idle=_idle_offload,
        unit="bytes",
    )
    in_flight_bytes: int | None = key(
        integer(1),
        None,
        "the limit of device memory in unfinished copies; null means as much as two blocks save",
        idle=_idle_offload,
        unit="bytes",
    )
    pin_memory: bool | None = key(
        BOOLEAN, None, "use page-locked memory; null uses it if there is a GPU", idle=_idle_offload
    )


ACTIVATIONS = under(
    CHECKPOINTING,
    inert(
        "partition_activations",
        BOOLEAN,
        "hf-zero does not divide saved activations among tensor-parallel ranks",
        bool,
    ),
    inert(
        "contiguous_memory_optimization",
        BOOLEAN,
        "hf-zero reserves no buffer; set PYTORCH_ALLOC_CONF=expandable_segments:True to "
        "avoid fragmentation",
        bool,
    ),
)

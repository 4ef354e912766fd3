"""The rows of the key table about activations, and when a value that was written has no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.kinds import BOOLEAN, COUNT, Kind, integer
from hf_zero.config.rows import active, inert, under

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


def _idle_number(values: Mapping[str, Any]) -> str:
    return f"{BLOCKS} is false" if values.get(BLOCKS) is False else ""


def _idle_offload(values: Mapping[str, Any]) -> str:
    return "" if values.get(ENABLED) or values.get(CPU) else f"{OFFLOAD} is off"


ACTIVATIONS = (
    *under(
        CHECKPOINTING,
        active(
            "blocks",
            Kind("true, false, a number of blocks, or 'selective'", _blocks),
            None,
            note="blocks that recompute their activations; selective: all but products and "
            "attention; null: as the model does",
        ),
        active(
            "number_checkpoints",
            COUNT,
            None,
            note="how many blocks, from the first on, are checkpointed",
            idle=_idle_number,
        ),
        active(
            "cpu_checkpointing", BOOLEAN, False, note="what checkpoints keep waits in host memory"
        ),
        active(
            "synchronize_checkpoint_boundary",
            BOOLEAN,
            False,
            f"{CHECKPOINTING}.synchronize",
            "wait for the device around each checkpoint",
        ),
        active(
            "profile",
            BOOLEAN,
            False,
            note="log the time of checkpointed forwards and of recomputations",
        ),
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
    ),
    *under(
        OFFLOAD,
        active(
            "enabled", BOOLEAN, False, note="tensors saved for the backward wait in host memory"
        ),
        active(
            "min_bytes", COUNT, 1 << 20, note="smaller ones stay on the device", idle=_idle_offload
        ),
        active(
            "in_flight_bytes",
            integer(1),
            None,
            note="device memory that waits for copies; null: two blocks' worth",
            idle=_idle_offload,
        ),
        active(
            "pin_memory",
            BOOLEAN,
            None,
            note="page-locked memory; null: where there is a GPU",
            idle=_idle_offload,
        ),
    ),
)

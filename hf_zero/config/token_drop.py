"""Configuration of random layerwise token dropping, by which middle blocks read part of the tokens.

DeepSpeed's section ``data_efficiency.data_routing.random_ltd``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.curriculum import EFFICIENCY
from hf_zero.config.kinds import BOOLEAN, TEXT, Kind, choice, integer
from hf_zero.config.rows import inert, key

ROUTING = f"{EFFICIENCY}.data_routing"
TOKEN_DROP = f"{ROUTING}.random_ltd"
SCHEDULE = "random_ltd_schedule"
MASK = "attention_mask"
ORDERS = ("batch_seq_dim", "seq_batch_dim")


def _layers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(value)
    return tuple(int(integer(0).convert(each)) for each in value)


LAYERS = Kind(
    "a list of layers, counted from 0",
    _layers,
    {"type": "array", "items": {"type": "integer", "minimum": 0}},
)


def _idle(values: Mapping[str, Any]) -> str:
    if not values.get(f"{TOKEN_DROP}.enabled"):
        return f"{TOKEN_DROP}.enabled is false"
    outer = (f"{path}.enabled" for path in (EFFICIENCY, ROUTING))
    return next((f"{path} is false" for path in outer if values.get(path) is False), "")


@dataclass(frozen=True)
class DataRouting:
    """The master switch of token dropping; ``enabled`` None: its own switch decides."""

    enabled: bool | None = key(BOOLEAN, None, "false: nothing of this section acts")


@dataclass(frozen=True)
class TokenDropSection:
    """Random layerwise token dropping (arXiv 2211.11586): blocks read a random part of the tokens,
    which grows during training; see :mod:`hf_zero.techniques.token_drop`.
    """

    enabled: bool = key(
        BOOLEAN, False, "let chosen blocks read a random part of the tokens while the model trains"
    )
    total_layer_num: int | None = key(
        integer(1), None, "blocks of the model, which is checked", unit="blocks", idle=_idle
    )
    random_ltd_layer_num: int | None = key(
        integer(1), None, "how many blocks are in random_ltd_layer_id", unit="blocks", idle=_idle
    )
    random_ltd_layer_id: tuple[int, ...] | None = key(
        LAYERS,
        None,
        "the blocks that read a part; null: all but the first and last of each stack",
        idle=_idle,
    )
    model_mask_name: str = key(TEXT, MASK, "the blocks' argument that holds the mask", idle=_idle)
    hidden_state_order: str = key(
        choice(*ORDERS),
        ORDERS[0],
        "which dimensions hidden states have",
        idle=_idle,
    )
    min_value: int | None = key(
        integer(1),
        None,
        "tokens that they read in the first step",
        name=f"{SCHEDULE}.min_value",
        unit="tokens",
        idle=_idle,
    )
    max_value: int | None = key(
        integer(1),
        None,
        "tokens that they read in the end: the length of a sequence",
        name=f"{SCHEDULE}.max_value",
        unit="tokens",
        idle=_idle,
    )
    schedule_type: str = key(
        choice("fixed_linear"),
        "fixed_linear",
        "how that number grows",
        name=f"{SCHEDULE}.schedule_type",
        idle=_idle,
    )
    require_steps: int | None = key(
        integer(1),
        None,
        "steps until max_value",
        name=f"{SCHEDULE}.schedule_config.require_steps",
        unit="steps",
        idle=_idle,
    )
    seq_per_step: int | None = key(
        integer(1),
        None,
        "the number is a multiple of this",
        name=f"{SCHEDULE}.schedule_config.seq_per_step",
        unit="tokens",
        idle=_idle,
    )
    model_type: str | None = key(
        choice("encoder", "decoder"),
        row=inert("model_type", choice("encoder", "decoder"), "tokens keep their order in both"),
    )
    micro_batch_size: int | None = key(
        integer(1), row=inert("micro_batch_size", integer(1), "each batch is looked at")
    )
    global_batch_size: int | None = key(
        integer(1), row=inert("global_batch_size", integer(1), "tokens are not counted")
    )

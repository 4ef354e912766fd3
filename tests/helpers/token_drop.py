"""Random layerwise token dropping by hand, for the oracle: a plain model whose chosen blocks are
given the tokens that the engine draws, one sequence at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.config.techniques import TokenDropSection
from hf_zero.techniques.token_drop import sample, tokens_read
from hf_zero.zero.layout.tree import is_cache
from tests.helpers.layer_drop import FAMILIES, LayerDropJob
from tests.helpers.training import At, Driver

SEED = 1234  # DeepSpeed's default
LOW, HIGH, STEPS, EVERY = 3, 20, 10, 2


def section(ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    schedule = {
        "min_value": LOW,
        "max_value": HIGH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": STEPS, "seq_per_step": EVERY},
    }
    ltd = {"enabled": True, "random_ltd_schedule": schedule, **more}
    if ids is not None:
        ltd |= {"random_ltd_layer_id": ids, "random_ltd_layer_num": len(ids)}
    routing = {"enabled": True, "random_ltd": ltd}
    return {"data_efficiency": {"enabled": True, "data_routing": routing}}


@dataclass
class TokenDropJob(LayerDropJob):
    """The plain model gives chosen blocks their tokens row by row."""

    chosen: tuple[int, ...] = (1, 2, 3)
    padded: bool = False
    eager: bool = False
    dropped: int = 0

    def __post_init__(self) -> None:
        self.name = f"token drop {self.family} {self.padded}"

    @property
    def keys(self) -> dict[str, Any]:
        return section(list(self.chosen))

    def build(self) -> nn.Module:
        model: Any = super().build()
        if self.eager:
            model.set_attn_implementation("eager")
        return model

    def loss_of(self, net: Driver, at: At) -> torch.Tensor:
        batch = FAMILIES[self.family][1](at.step, at.micro, at.rank)
        if self.padded:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1, -3:] = 0
        loss: torch.Tensor = net(**batch).loss
        return loss

    def by_hand(self, model: nn.Module, at: At) -> None:
        """Let the plain ``model`` run what the engine runs at ``at``."""
        blocks = [block for stack in self.blocks(model) for block in stack]
        made = TokenDropSection(
            min_value=LOW, max_value=HIGH, require_steps=STEPS, seq_per_step=EVERY
        )
        read = int(tokens_read(made).at(at.step))
        for number in self.chosen:
            place = (at.step, at.micro, at.rank)
            plain = partial(type(blocks[number]).forward, blocks[number])
            blocks[number].forward = self.narrowed(plain, number, place, read)  # type: ignore

    def narrowed(
        self, plain: Callable[..., Any], number: int, at: Any, read: int
    ) -> Callable[..., Any]:
        """Return ``plain``, the forward of block ``number``, over the tokens that it reads."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(plain).bind(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            x = given.pop("hidden_states")
            size = x.shape[1]
            if read >= size:
                return plain(*args, **kwargs)
            kept = sample(SEED, at, number, len(x), size, read, x.device)
            self.dropped += size - read
            new = x.clone()
            for row, own in enumerate(kept):
                named = {name: one_row(name, each, row, own, size) for name, each in given.items()}
                out = plain(hidden_states=x[row : row + 1, own], **named)
                new[row, own] = (out[0] if isinstance(out, tuple) else out)[0]
            if isinstance(out, tuple):
                return new, given["position_bias"], given["encoder_decoder_position_bias"]
            return new

        return forward


def one_row(name: str, value: Any, row: int, own: torch.Tensor, size: int) -> Any:
    """An argument of a block for one sequence and the tokens ``own`` of ``size``."""
    if isinstance(value, tuple):  # of tensors
        return tuple(one_row(name, each, row, own, size) for each in value)
    if is_cache(value):
        return None
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    value = value[row : row + 1] if value.shape[0] > 1 else value
    if name.startswith("encoder"):  # queries alone are of this sequence
        return value[:, :, own] if value.dim() == 4 and value.shape[2] == size else value
    if value.dim() == 4:
        value = value[..., own] if value.shape[-1] == size else value
        return value[:, :, own] if value.shape[-2] == size else value
    return value[:, own]

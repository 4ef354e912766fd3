"""Training state in fewer bits than fp32, which a proposal tries last: the optimizer and the keys
that select it, and what it cost the loss where that was measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hf_zero.config import OptimizerConfig, ZeroConfig
from hf_zero.optim import Adam8bit, AdamW8bit, Lion, Lion8bit, SGD8bit

MASTERS = {"bf16": {"bf16_master_weights_and_grads": True}}
MASTERS_AND_MOMENTS = {"bf16": {**MASTERS["bf16"], "bf16_optimizer_states": True}}
EIGHT_BITS: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.AdamW: AdamW8bit,
    torch.optim.Adam: Adam8bit,
    torch.optim.SGD: SGD8bit,
    Lion: Lion8bit,
}
# parameters that change how an update is computed, and not what
SAME_UPDATE = {"torch_adam", "adam_w_mode", "adamw_mode", "bias_correction", "set_grad_none"}
SAME_UPDATE |= {"foreach", "fused", "capturable", "fp32_optimizer_states"}
# losses of a Llama of 1.2B parameters after 15 steps from one seed, of which that in fp32 is the
# reference; rows of scripts/bench/results/gpu-2026-11-27-peers.jsonl
MEASURED = {"fp32": 5.5287, "8 bits": 5.5285, "8 bits, bf16": 5.5325}
NOT_MEASURED = "what it costs the loss was not measured"


def cost(state: str) -> str:
    """Return what ``state``, a key of :data:`MEASURED`, cost the loss, in words."""
    if state not in MEASURED:
        return NOT_MEASURED
    return (
        f"loss {MEASURED[state]} where state in fp32 reached {MEASURED['fp32']}: a Llama of 1.2B "
        "parameters, 15 steps from one seed on one H200; nothing longer was measured"
    )


@dataclass(frozen=True)
class NarrowState:
    """``name`` says what is narrow; ``keys`` of the configuration select it, but for the optimizer;
    ``optimizer`` is the section to write, None to leave it as it is.
    """

    name: str
    keys: Mapping[str, Mapping[str, object]]
    optimizer: OptimizerConfig | None
    cost: str

    def applied(self, settings: ZeroConfig) -> ZeroConfig:
        """Return ``settings`` with this state; moments in 8 bits take no other format."""
        offload = settings.offload_optimizer
        if self.optimizer is not None and offload.moments != "fp32":
            settings = settings.override(
                {"zero_optimization": {"offload_optimizer": {"moments": "fp32"}}}, "proposed"
            )
        return settings.override(self.keys, "proposed") if self.keys else settings


def narrow_states(
    settings: ZeroConfig,
    section: OptimizerConfig,
    optimizer: torch.optim.Optimizer | None,
    may_change: bool,
) -> Iterator[NarrowState]:
    """Yield the narrow states of a job whose ``optimizer`` is that of ``section``, from the widest
    on. ``may_change``: whether the proposal writes that section, which a script that makes its own
    optimizer would contradict.
    """
    if optimizer is None:
        return
    twin = in_8_bits(section, optimizer) if may_change else None
    masters = settings.precision == "bf16" and not settings.bf16.bf16_master_weights_and_grads
    if twin is not None:
        yield NarrowState("moments in 8 bits", {}, twin, cost("8 bits"))
        if masters:
            name = "moments in 8 bits, master weights in bf16"
            yield NarrowState(name, MASTERS, twin, cost("8 bits, bf16"))
    elif masters:
        name = "moments and master weights in bf16"
        yield NarrowState(name, MASTERS_AND_MOMENTS, None, cost("bf16"))


def in_8_bits(section: OptimizerConfig, optimizer: torch.optim.Optimizer) -> OptimizerConfig | None:
    """Return the section that makes the update of ``optimizer``, that of ``section``, with moments
    in 8 bits; None if there is none, or if it would not take the parameters.
    """
    twin = EIGHT_BITS.get(type(optimizer))
    if twin is None or (twin is SGD8bit and not optimizer.defaults["momentum"]):
        return None
    accepted = inspect.signature(twin.__init__).parameters.keys() - {"self", "params"}
    given = {key: value for key, value in section.params.items() if value not in (None, False)}
    if given.keys() - accepted - SAME_UPDATE:
        return None
    taken = {key: value for key, value in given.items() if key in accepted}
    # the classes have other defaults
    defaults = {key: optimizer.defaults[key] for key in ("lr", "weight_decay")}
    return OptimizerConfig(twin.__name__, {**defaults, **taken})

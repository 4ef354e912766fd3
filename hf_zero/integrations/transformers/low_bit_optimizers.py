"""8-bit optimizers that ``TrainingArguments(optim=…)`` names, without bitsandbytes installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_zero.integrations.transformers.trainer_route import under_zero
from hf_zero.optim import AdamW8bit, Lion8bit

# the names whose optimizers of bitsandbytes have a counterpart, and the bits of their moments
NAMES: dict[str, tuple[type, int]] = {
    "adamw_bnb_8bit": (AdamW8bit, 8),
    "adamw_8bit": (AdamW8bit, 8),
    "paged_adamw_8bit": (AdamW8bit, 8),
    "paged_adamw_32bit": (AdamW8bit, 32),
    "lion_8bit": (Lion8bit, 8),
    "paged_lion_8bit": (Lion8bit, 8),
    "lion_32bit": (Lion8bit, 32),
    "paged_lion_32bit": (Lion8bit, 32),
}


def build_without_bitsandbytes(original: Callable[..., Any], self: Any, model: Any = None) -> Any:
    """Wraps ``Trainer.create_optimizer``: names of bitsandbytes' optimizers give those of hf-zero
    where bitsandbytes is not installed. As with it, embeddings keep moments in fp32.
    """
    from transformers.utils import is_bitsandbytes_available

    args = self.args
    name = str(getattr(args.optim, "value", args.optim))
    chosen = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
    if name not in NAMES or chosen or is_bitsandbytes_available() or not under_zero(self):
        return original(self, model)
    cls, bits = NAMES[name]
    settings = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    if cls is AdamW8bit:
        settings["eps"] = args.adam_epsilon
    for module in (self.model if model is None else model).modules():
        if isinstance(module, nn.Embedding):
            weight: Any = module.weight
            weight.optim_bits = 32
    self.optimizer_cls_and_kwargs = cls, {**settings, "optim_bits": bits}
    try:
        return original(self, model)
    finally:
        self.optimizer_cls_and_kwargs = None

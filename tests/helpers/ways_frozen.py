"""Ways in which part of the model is frozen: parameters, blocks, the bottom, the top, all but
adapters, integer weights.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.models import ARCHITECTURES, HIDDEN, Stack, seeded
from tests.helpers.training import ArchitectureJob, Job
from tests.helpers.ways_checkpointed import StackJob


class SomeFrozen(StackJob):
    name = "frozen parameters inside blocks, and a block frozen whole"

    def build(self) -> nn.Module:
        model = super().build()
        for block in model.blocks:
            block.up.weight.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        return model


class _EightBit(nn.Module):
    """Frozen int8 weights with a trained scale, as in adapters over quantised models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randint(-100, 100, (HIDDEN, HIDDEN), dtype=torch.int8), requires_grad=False
        )
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight.to(x.dtype)) * self.scale


class IntegerWeights(StackJob):
    name = "frozen int8 weights beside trained scales"

    class model(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(_EightBit() for _ in range(3))


class FrozenBottom(ArchitectureJob):
    name = (
        "frozen embeddings and first layer: the first trained block gets an input without gradient"
    )

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["llama"])
        self.name = type(self).name

    def build(self) -> nn.Module:
        model = super().build()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        return model


class FrozenTop(ArchitectureJob):
    name = "only the embeddings trained, everything above frozen"

    def __init__(self) -> None:
        super().__init__(ARCHITECTURES["llama"])
        self.name = type(self).name

    def build(self) -> nn.Module:
        model = super().build()
        model.requires_grad_(False)
        model.model.embed_tokens.requires_grad_(True)
        return model


class LoRA(ArchitectureJob):
    """Adapters over frozen blocks; with ``checkpointing`` as TRL sets it up: reentrant, inputs
    made to require gradients.
    """

    def __init__(self, checkpointing: bool) -> None:
        super().__init__(ARCHITECTURES["llama"])
        self.checkpointing = checkpointing
        self.name = (
            f"LoRA over frozen blocks{' with reentrant checkpointing' if checkpointing else ''}"
        )

    def build(self) -> nn.Module:
        def make() -> nn.Module:
            import peft

            base = ARCHITECTURES["llama"].make()
            if self.checkpointing:
                base.gradient_checkpointing_enable({"use_reentrant": True})
                base.enable_input_require_grads()
                base.config.use_cache = False
            config = peft.LoraConfig(
                r=3,
                lora_alpha=6,
                target_modules=["q_proj", "v_proj"],
                lora_dropout=0.0,
                init_lora_weights=False,
            )
            return peft.get_peft_model(base, config)

        return seeded(make)


def ways() -> list[Job]:
    kinds = (SomeFrozen, IntegerWeights, FrozenBottom, FrozenTop)
    return [*(kind() for kind in kinds), LoRA(checkpointing=False), LoRA(checkpointing=True)]

"""torchao's cast of weights to float8."""

from __future__ import annotations

import torch

from hf_zero.techniques.float8_weights import FLOAT8


def cast(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes and the scale of torchao's cast of a whole weight."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    done = hp_tensor_to_float8_dynamic(weight.detach(), FLOAT8, LinearMMConfig())
    return done._data.view(torch.uint8), done._scale

"""hf-zero: ZeRO for Hugging Face. The public names are listed below and imported on first use.

Importing this package costs next to nothing: torch runs our autoload hook at the end of every
``import torch``, so every process of every user pays for the code in this file.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "ZeroConfig": "hf_zero.config",
    "Engine": "hf_zero.engine",
    "initialize": "hf_zero.initialize",
    "init_distributed": "hf_zero.distributed.init",
    "PipelineModule": "hf_zero.parallel.pipeline.module",
    "LayerSpec": "hf_zero.parallel.pipeline.module",
    "TiedLayerSpec": "hf_zero.parallel.pipeline.module",
    "pipeline_stages": "hf_zero.integrations.transformers.pipeline_stages",
    "GatheredParameters": "hf_zero.zero.access.full",
    "summon_full_params": "hf_zero.zero.access.full",
    "safe_get_full_fp32_param": "hf_zero.zero.access.full",
    "safe_get_full_grad": "hf_zero.zero.access.full",
    "safe_get_full_optimizer_state": "hf_zero.zero.access.full",
    "safe_set_full_fp32_param": "hf_zero.zero.access.full",
    "safe_set_full_grad": "hf_zero.zero.access.full",
    "safe_set_full_optimizer_state": "hf_zero.zero.access.full",
    "TrainingArguments": "hf_zero.integrations.transformers",
    "ZeroCallback": "hf_zero.integrations.transformers",
    "from_pretrained": "hf_zero.integrations.transformers.loading",
    "Init": "hf_zero.deepspeed.zero_init",
    "optimize": "hf_zero.integrations.fused",
    "restore": "hf_zero.integrations.fused",
    "expert_parallel": "hf_zero.parallel.expert.model",
    "convert_checkpoint": "hf_zero.checkpoint",
    "verify_checkpoint": "hf_zero.checkpoint",
    "tensor_parallel": "hf_zero.parallel.tensor",
    "sequence_parallel": "hf_zero.parallel.sequence.sequence_parallel",
    "analyze": "hf_zero.integrations.datasets.analyze",
    "estimate": "hf_zero.planning.estimate",
    "propose": "hf_zero.planning.estimate",
    "HfZeroError": "hf_zero.errors",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from hf_zero.errors import HfZeroError as HfZeroError


class _Package(ModuleType):
    """Keep ``hf_zero.initialize`` the function when the module of that name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds a submodule to its name in the package after it has run.
        if not (name in _EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(
            f"module 'hf_zero' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])

"""hf-zero: ZeRO for Hugging Face. The public names are listed below and imported on first use.

Importing this package costs next to nothing: torch runs our autoload hook at the end of every
``import torch``, so every process of every user pays for the code in this file.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the time to import typing

_EXPORTS = {
    "ZeroConfig": "hf_zero.config",
    "Engine": "hf_zero.engine",
    "initialize": "hf_zero.initialize",
    "init_distributed": "hf_zero.distributed.init",
    "PipelineEngine": "hf_zero.setup.pipeline_engine",
    "PipelineModule": "hf_zero.parallel.pipeline.module",
    "LayerSpec": "hf_zero.parallel.pipeline.layer_specs",
    "TiedLayerSpec": "hf_zero.parallel.pipeline.layer_specs",
    "pipeline_stages": "hf_zero.integrations.transformers.pipeline_stages",
    "GatheredParameters": "hf_zero.zero.access.gathered_parameters",
    "summon_full_params": "hf_zero.zero.access.gathered_parameters",
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
    "parity": "hf_zero.parity.in_process",
    "propose": "hf_zero.planning.estimate",
    "simulate": "hf_zero.planning.simulation",
    "HfZeroError": "hf_zero.errors",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from typing import Any

    __version__: str
    from hf_zero.checkpoint import convert_checkpoint as convert_checkpoint
    from hf_zero.checkpoint import verify_checkpoint as verify_checkpoint
    from hf_zero.config import ZeroConfig as ZeroConfig
    from hf_zero.deepspeed.zero_init import Init as Init
    from hf_zero.distributed.init import init_distributed as init_distributed
    from hf_zero.engine import Engine as Engine
    from hf_zero.errors import HfZeroError as HfZeroError
    from hf_zero.initialize import initialize as initialize
    from hf_zero.integrations.datasets.analyze import analyze as analyze
    from hf_zero.integrations.fused.optimize import optimize as optimize
    from hf_zero.integrations.fused.optimize import restore as restore
    from hf_zero.integrations.transformers import TrainingArguments as TrainingArguments
    from hf_zero.integrations.transformers import ZeroCallback as ZeroCallback
    from hf_zero.integrations.transformers.loading import from_pretrained as from_pretrained
    from hf_zero.integrations.transformers.pipeline_stages import pipeline_stages as pipeline_stages
    from hf_zero.parallel.expert.model import expert_parallel as expert_parallel
    from hf_zero.parallel.pipeline.layer_specs import LayerSpec as LayerSpec
    from hf_zero.parallel.pipeline.layer_specs import TiedLayerSpec as TiedLayerSpec
    from hf_zero.parallel.pipeline.module import PipelineModule as PipelineModule
    from hf_zero.parallel.sequence.sequence_parallel import sequence_parallel as sequence_parallel
    from hf_zero.parallel.tensor import tensor_parallel as tensor_parallel
    from hf_zero.parity.in_process import parity as parity
    from hf_zero.planning.estimate import estimate as estimate
    from hf_zero.planning.estimate import propose as propose
    from hf_zero.planning.simulation import simulate as simulate
    from hf_zero.setup.pipeline_engine import PipelineEngine as PipelineEngine
    from hf_zero.zero.access.full import safe_get_full_fp32_param as safe_get_full_fp32_param
    from hf_zero.zero.access.full import safe_get_full_grad as safe_get_full_grad
    from hf_zero.zero.access.full import (
        safe_get_full_optimizer_state as safe_get_full_optimizer_state,
    )
    from hf_zero.zero.access.full import safe_set_full_fp32_param as safe_set_full_fp32_param
    from hf_zero.zero.access.full import safe_set_full_grad as safe_set_full_grad
    from hf_zero.zero.access.full import (
        safe_set_full_optimizer_state as safe_set_full_optimizer_state,
    )
    from hf_zero.zero.access.gathered_parameters import GatheredParameters as GatheredParameters
    from hf_zero.zero.access.gathered_parameters import summon_full_params as summon_full_params


class _Package(ModuleType):
    """Keep ``hf_zero.initialize`` the function when the module of that name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds a submodule to its name in the package after it has run.
        if not (name in _EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _lazy(name: str) -> Any:
    value: Any
    if name == "__version__":
        value = _version()
    elif name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    else:
        # Python's traceback adds the name that it resembles
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a checker reports an unknown name
    __getattr__ = _lazy


def _version() -> str:
    """Return the version in the file VERSION: of a tree of sources from that file, else from the
    metadata of the distribution, which was built from it; "unknown" without either.
    """
    import os
    from importlib import metadata

    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.isfile(os.path.join(root, "pyproject.toml")):
        with open(os.path.join(root, "VERSION")) as file:
            return file.read().strip()
    try:
        return metadata.version("hf-zero")
    except metadata.PackageNotFoundError:
        return "unknown"


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])

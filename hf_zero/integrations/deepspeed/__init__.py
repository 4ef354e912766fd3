"""``import deepspeed``, answered by hf-zero: DeepSpeed's names for what hf_zero has. No logic lives
here.

Nothing is installed under this name; ``__file__`` says where the answer comes from. Imported as
``deepspeed`` only.
"""

from hf_zero import initialize
from hf_zero.core.engine import Engine as DeepSpeedEngine
from hf_zero.integrations.arguments import add_config_arguments
from hf_zero.integrations.facade import VERSION as __version__
from hf_zero.integrations.not_built import function as _not_built

from . import accelerator, checkpoint, checkpointing, comm, launcher, ops, pipe, runtime, utils
from . import comm as dist
from .accelerator import get_accelerator
from .comm import init_distributed
from .pipe import PipelineModule
from .runtime import zero
from .runtime.config import DeepSpeedConfigError
from .utils import log_dist, logger

init_inference = _not_built(
    "deepspeed.init_inference", "generate with the engine's module, `engine.module.generate(...)`"
)
tp_model_init = _not_built(
    "deepspeed.tp_model_init", "remove `tensor_parallel` from the configuration"
)

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "PipelineModule",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "dist",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "launcher",
    "log_dist",
    "logger",
    "ops",
    "pipe",
    "runtime",
    "tp_model_init",
    "utils",
    "zero",
]

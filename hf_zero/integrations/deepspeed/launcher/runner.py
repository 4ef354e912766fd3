"""``deepspeed.launcher.runner``: the name that ``accelerate launch`` reads on every launch."""

import os

from hf_zero.integrations.not_built import function

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")

main = function("the `deepspeed` launcher", "start scripts with `accelerate launch` or torchrun")

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main"]

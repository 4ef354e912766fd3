"""``deepspeed.launcher.runner``: the launcher, and the name that ``accelerate launch`` reads on
every launch.
"""

from hf_zero.integrations.deepspeed_command import ENVIRONMENT_FILE as DEEPSPEED_ENVIRONMENT_NAME
from hf_zero.integrations.deepspeed_command import main

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main"]

if __name__ == "__main__":
    main()

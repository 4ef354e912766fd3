"""``deepspeed.utils.logging``."""

from hf_zero.integrations.telling import log_dist, print_dist, print_rank_0
from hf_zero.logs import logger

__all__ = ["log_dist", "logger", "print_dist", "print_rank_0"]

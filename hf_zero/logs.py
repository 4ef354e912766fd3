"""One logger for the whole package, named ``hf_zero``; ``HF_ZERO_LOG_LEVEL`` sets its level (default INFO)."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("hf_zero")

if not logger.handlers:
    _handler = logging.StreamHandler()
    _handler.setFormatter(
        logging.Formatter("[hf-zero %(levelname)s rank %(rank)s] %(message)s", defaults={"rank": os.environ.get("RANK", "0")})
    )
    logger.addHandler(_handler)
    logger.setLevel(os.environ.get("HF_ZERO_LOG_LEVEL", "INFO").upper())
    logger.propagate = False


def log_rank0(message: str, level: int = logging.INFO) -> None:
    """Log once per job: on the process whose ``RANK`` is 0 (or unset)."""
    if os.environ.get("RANK", "0") == "0":
        logger.log(level, message)

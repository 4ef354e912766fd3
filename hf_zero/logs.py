"""One logger for the whole package, named ``hf_zero``; ``HF_ZERO_LOG_LEVEL`` sets its level (default INFO)."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("hf_zero")


class _Formatter(logging.Formatter):
    """Names the rank as it is when something is said: a launcher's variables may come after the import."""

    def format(self, record: logging.LogRecord) -> str:
        record.rank = os.environ.get("RANK", "0")
        return super().format(record)


if not logger.handlers:
    _handler = logging.StreamHandler()
    _handler.setFormatter(_Formatter("[hf-zero %(levelname)s rank %(rank)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(os.environ.get("HF_ZERO_LOG_LEVEL", "INFO").upper())
    logger.propagate = False


def log_rank0(message: str, level: int = logging.INFO) -> None:
    """Log once per job: on the process whose ``RANK`` is 0 (or unset)."""
    if os.environ.get("RANK", "0") == "0":
        logger.log(level, message)

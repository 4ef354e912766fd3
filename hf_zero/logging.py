"""One logger for the whole package, named ``hf_zero``; ``HF_ZERO_LOG_LEVEL`` sets its level
(default INFO), and so does ``HF_ZERO_LOG`` where the former is not set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping


def _rank_of(record: logging.LogRecord) -> bool:
    # when it is said: under srun and mpirun RANK is found after this import
    record.rank = os.environ.get("RANK", "0")
    return True


LEVELS = ("debug", "info", "warning", "error", "critical")


def level_in(environment: Mapping[str, str]) -> str:
    """The level that the variables of ``environment`` set."""
    asked = environment.get("HF_ZERO_LOG", "").lower()
    default = asked if asked in LEVELS else "info"
    return environment.get("HF_ZERO_LOG_LEVEL", default).upper()


logger = logging.getLogger("hf_zero")

if not logger.handlers:
    _handler = logging.StreamHandler()
    _handler.addFilter(_rank_of)
    _handler.setFormatter(logging.Formatter("[hf-zero %(levelname)s rank %(rank)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(level_in(os.environ))
    logger.propagate = False


def log_rank0(message: str, level: int = logging.INFO) -> None:
    """Log once per job: on the process whose ``RANK`` is 0 (or unset)."""
    if os.environ.get("RANK", "0") == "0":
        logger.log(level, message)


def set_level(level: int | str, of: logging.Logger = logger) -> None:
    """Log what has at least this level, in ``of`` and its handlers."""
    of.setLevel(level)
    for handler in of.handlers:
        handler.setLevel(level)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names for a message: the first ``most``, and how many more there are."""
    ordered = list(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more

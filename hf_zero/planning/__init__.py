"""Memory planning before training starts: bytes needed in each tier, and what would fit."""

from hf_zero.planning.checking import PreflightReport, check, check_on_all_ranks, free_memory_for
from hf_zero.planning.fit import ACTIVATIONS, Fit, MemoryVerdict, Trial, fit, judge
from hf_zero.planning.needs import NamedBytes, Needs, needs

__all__ = [
    "ACTIVATIONS",
    "Fit",
    "MemoryVerdict",
    "NamedBytes",
    "Needs",
    "PreflightReport",
    "Trial",
    "check",
    "check_on_all_ranks",
    "fit",
    "free_memory_for",
    "judge",
    "needs",
]

"""Memory planning before training starts: bytes needed in each tier, and what would fit."""

from hf_zero.planning.checking import PreflightReport, check, room_for
from hf_zero.planning.fit import Fit, Trial, fit
from hf_zero.planning.moments import moments_of
from hf_zero.planning.needs import NamedBytes, Needs, needs
from hf_zero.planning.on_all_ranks import check_on_all_ranks
from hf_zero.planning.plan import FlatParameters, MemoryPlan, groups_of
from hf_zero.planning.verdict import ACTIVATIONS, MemoryVerdict, judge

__all__ = [
    "ACTIVATIONS",
    "Fit",
    "FlatParameters",
    "MemoryPlan",
    "MemoryVerdict",
    "NamedBytes",
    "Needs",
    "PreflightReport",
    "Trial",
    "check",
    "check_on_all_ranks",
    "fit",
    "groups_of",
    "judge",
    "moments_of",
    "needs",
    "room_for",
]

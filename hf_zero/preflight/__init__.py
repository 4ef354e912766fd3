"""Honest before it starts: what training needs in each tier, whether that fits, and what would."""

from hf_zero.preflight.checking import Report, check, room_for
from hf_zero.preflight.fit import Fit, Trial, fit
from hf_zero.preflight.moments import moments_of
from hf_zero.preflight.needs import Needs, Part, needs
from hf_zero.preflight.plan import Group, Plan, groups_of
from hf_zero.preflight.verdict import ACTIVATIONS, Verdict, judge

__all__ = [
    "ACTIVATIONS",
    "Fit",
    "Group",
    "Needs",
    "Part",
    "Plan",
    "Report",
    "Trial",
    "Verdict",
    "check",
    "fit",
    "groups_of",
    "judge",
    "moments_of",
    "needs",
    "room_for",
]

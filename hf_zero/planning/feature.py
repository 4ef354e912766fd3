"""The check of memory as a feature: before an engine is built, and its summary once it is."""

from __future__ import annotations

from hf_zero.config import ZeroConfig
from hf_zero.planning.checking import PreflightReport, check_on_all_ranks
from hf_zero.planning.start_summary import describe
from hf_zero.zero.feature import Feature
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.training_engine import TrainingEngine


class MemoryCheck(Feature):
    """Refuse a plan that does not fit, and log what one that fits takes."""

    def __init__(self, settings: ZeroConfig):
        self._report: PreflightReport | None = None

    def admit(self, plan: EnginePlan, freed: tuple[int, int]) -> bool:
        self._report = check_on_all_ranks(plan, freed)
        return self._report.spare

    def apply(self, engine: TrainingEngine) -> None:
        report, self._report = self._report, None  # an engine that is built anew logs nothing
        if report is not None and engine.global_rank == 0:
            describe(report)

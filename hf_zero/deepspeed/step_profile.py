"""The profile of one step that ``flops_profiler`` of the configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_zero.config.sections import FlopsProfilerSection
from hf_zero.deepspeed.flops_profiler import FlopsProfiler


class StepProfile:
    """Counts the operations of rank 0's forwards in the step that ``section`` names, the last
    micro-batch's, and prints them once that step has ended.
    """

    def __init__(self, engine: Any, section: FlopsProfilerSection) -> None:
        self.section, self.counters = section, engine.counters
        self.profiler = FlopsProfiler(engine.module, engine, section.recompute_fwd_factor or 0.0)
        self._wanted = engine.global_rank == 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around every forward."""
        if not self._wanted or self.counters.global_steps != self.section.profile_step:
            yield
            return
        self.profiler.start_profile()
        try:
            yield
        finally:
            self.profiler.stop_profile()

    def step_has_ended(self) -> None:
        """Print what was counted, once."""
        section = self.section
        if self.profiler.started and self.counters.global_steps > section.profile_step:
            self.profiler.print_model_profile(
                section.profile_step,
                section.module_depth,
                section.top_modules,
                section.detailed,
                section.output_file,
            )
            self.profiler.end_profile()
            self._wanted = False

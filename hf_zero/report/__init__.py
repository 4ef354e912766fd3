"""One page that shows a run: figures, memory, traffic, the timeline of a step, configuration."""

from hf_zero.report.page import write_report

__all__ = ["write_report"]

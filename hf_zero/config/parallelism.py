"""Configuration of tensor, expert and pipeline parallelism: their sections, and the other keys of
DeepSpeed's sections.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.config.kinds import BOOLEAN, COUNT, DTYPE, TEXT, choice, integer
from hf_zero.config.rows import inert, key, switched, unbuilt, under, without
from hf_zero.errors import ConfigError

TENSOR = "tensor_parallel"
TENSOR_SIZE = f"{TENSOR}.autotp_size"
VERIFY = f"{TENSOR}.verify"


@dataclass(frozen=True)
class TensorParallelSection:
    """Tensor parallelism (arXiv 1909.08053): neighbouring ranks read the same batches and hold
    parts of every matrix, by the plan of the model; see :mod:`hf_zero.parallel.tensor`.
    """

    autotp_size: int = key(
        COUNT,
        0,
        "number of neighbouring ranks that split each layer's matrices, heads and "
        "vocabulary and read the same batches; 0 or 1 splits nothing",
        unit="ranks",
    )
    verify: bool = key(
        BOOLEAN,
        False,
        "compare the first forward and backward with those of the whole model, and raise "
        "an error if they differ; each rank holds the whole model during the comparison",
    )

    @property
    def size(self) -> int:
        """The number of tensor-parallel ranks; 1 without tensor parallelism."""
        return max(self.autotp_size, 1)


TENSOR_KEYS = (
    inert(f"{TENSOR}.dtype", DTYPE, "the sections bf16 and fp16 set the dtype of training"),
    inert(
        f"{TENSOR}.keep_module_on_host",
        BOOLEAN,
        "hf-zero splits the model on the device that holds it",
    ),
    unbuilt(f"{TENSOR}.tp_overlap_comm", BOOLEAN, "tensor-parallel sums that overlap computation"),
    unbuilt(f"{TENSOR}.replace_with_kernel_inject", BOOLEAN, "injected kernels; write kernels"),
    unbuilt(
        f"{TENSOR}.preset_model",
        TEXT,
        "preset plans; models have their own, which hf_zero.tensor_parallel(..., plan=) changes",
        None,
    ),
    switched(
        f"{TENSOR}.partition_config",
        "plans in the configuration; hf_zero.tensor_parallel(model, size, plan=...) takes one",
        asks=bool,
        off="null",
    ),
)
TENSOR_ALIASES = {f"{TENSOR}.tp.tp_size": TENSOR_SIZE}


EXPERT_PARALLEL = "expert_parallel"
AUTOEP_SIZE = f"{EXPERT_PARALLEL}.autoep_size"


@dataclass(frozen=True)
class ExpertParallelSection:
    """Expert parallelism for models of transformers: data-parallel ranks hold different experts and
    exchange their tokens; see :mod:`hf_zero.parallel.expert`.
    """

    enabled: bool = key(
        BOOLEAN, False, "each rank keeps some of the experts, and ranks send tokens to them"
    )
    autoep_size: int = key(
        integer(1),
        1,
        "number of neighbouring ranks that together hold one set of experts",
        unit="ranks",
        idle=without(f"{EXPERT_PARALLEL}.enabled"),
    )

    @property
    def size(self) -> int:
        """The number of ranks that hold one set of the experts together; 1 if expert parallelism is
        off.
        """
        return self.autoep_size if self.enabled else 1


EXPERT_KEYS = under(
    EXPERT_PARALLEL,
    inert("preset_model", TEXT, "the model itself names its experts (ep_plan)"),
    inert("use_grouped_mm", BOOLEAN, "the model's experts_implementation decides"),
)


PIPELINE = "pipeline"
INTERLEAVED = "interleaved_1f1b"
SCHEDULES = ("1f1b", "gpipe", INTERLEAVED)


@dataclass(frozen=True)
class PipelineSection:
    """Schedule and recomputation of a ``PipelineModule``; see :mod:`hf_zero.parallel.pipeline`."""

    schedule: str | None = key(
        choice(*SCHEDULES),
        None,
        "the order of forwards and backwards; null uses 1f1b, or interleaved_1f1b if a "
        "rank holds several stages",
    )
    activation_checkpoint_interval: int = key(
        integer(0),
        0,
        "number of layers of a PipelineModule that are recomputed together in the "
        "backward; 0 leaves it to the PipelineModule",
        unit="layers",
    )

    def schedule_for(self, stages_per_rank: int) -> str:
        """Return the schedule for ranks with ``stages_per_rank`` stages each. Raises ConfigError if
        the written schedule does not support that number.
        """
        if self.schedule is None:
            return INTERLEAVED if stages_per_rank > 1 else "1f1b"
        if (self.schedule == INTERLEAVED) != (stages_per_rank > 1):
            raise ConfigError(
                f"{PIPELINE}.schedule is {self.schedule!r} with stages_per_rank={stages_per_rank}; "
                f'"{INTERLEAVED}" is for ranks with several stages, the others for one: change '
                "one of them, or remove the key"
            )
        return self.schedule

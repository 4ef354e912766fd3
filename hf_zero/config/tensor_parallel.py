"""Configuration of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.config.kinds import BOOLEAN, COUNT, DTYPE, TEXT
from hf_zero.config.rows import inert, key, switched, unbuilt

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
        "neighbouring ranks that share each layer's matrices, heads and vocabulary and read the "
        "same batches; 0 or 1: none",
        unit="ranks",
    )
    verify: bool = key(
        BOOLEAN,
        False,
        "compare the first forward and backward with those of the whole model, which each rank "
        "holds for that long, and raise where they differ",
    )

    @property
    def size(self) -> int:
        """The number of tensor-parallel ranks; 1 without tensor parallelism."""
        return max(self.autotp_size, 1)


OTHERS = (
    inert(f"{TENSOR}.dtype", DTYPE, "bf16 and fp16 say in what a model trains"),
    inert(f"{TENSOR}.keep_module_on_host", BOOLEAN, "parts are cut where the model is"),
    unbuilt(f"{TENSOR}.tp_overlap_comm", BOOLEAN, "sums that run beside the computation"),
    unbuilt(f"{TENSOR}.replace_with_kernel_inject", BOOLEAN, "injected kernels; write kernels"),
    unbuilt(
        f"{TENSOR}.preset_model",
        TEXT,
        "plans by a preset; models bring theirs, hf_zero.tensor_parallel(..., plan=) changes them",
        None,
    ),
    switched(
        f"{TENSOR}.partition_config",
        "plans in the configuration; hf_zero.tensor_parallel(model, size, plan=...) takes one",
        asks=bool,
        off="null",
    ),
)
ALIASES = {f"{TENSOR}.tp.tp_size": TENSOR_SIZE}

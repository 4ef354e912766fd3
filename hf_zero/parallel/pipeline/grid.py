"""Position of a rank in a pipeline, with the method names of a Megatron ``mpu``."""

from __future__ import annotations

from typing import Any

from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.process_group import get_rank
from hf_zero.errors import ConfigError
from hf_zero.parallel.pipeline.topology import ProcessTopology


class PipelineParallelGrid:
    """Position of this rank in ``topology``, with the method names of a Megatron ``mpu``. The
    process groups are those that a ``PipelineModule`` has created. Raises ConfigError if none
    exists yet.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None):
        groups = get_parallel()
        if topology is None or groups is None:
            raise ConfigError(
                "PipelineParallelGrid needs the topology of a PipelineModule that was made; make "
                "that first, and ask its mpu()"
            )
        self._groups, self._topology = groups, topology
        self.global_rank = get_rank()
        self.world_size = topology.world_size()
        self._coord = topology.get_coord(self.global_rank)
        self.stage_id = self.pipe_parallel_rank = int(self._coord.pipe)
        self.data_parallel_id = self.data_parallel_rank = int(self._coord.data)
        self.pipe_parallel_size = topology.get_dim("pipe")
        self.data_parallel_size = topology.get_dim("data")
        self.model_parallel_size = max(1, topology.get_dim("model"))

    def topology(self) -> ProcessTopology:
        return self._topology

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **coords: int) -> int:
        """Return the rank at ``stage_id`` of this rank's pipeline, or of the one at ``coords``."""
        here = {**self._coord._asdict(), **coords, "pipe": stage_id}
        return self._topology.get_rank(**here)

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Return the process group of this rank's pipeline; None for one rank."""
        return self._groups.group("pipeline")

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group_ranks(self) -> list[int]:
        return next(
            ranks
            for ranks in self._topology.get_axis_comm_lists("data")
            if self.global_rank in ranks
        )

    def get_model_parallel_rank(self) -> int:
        return int(getattr(self._coord, "model", 0))

    def get_model_parallel_world_size(self) -> int:
        return self.model_parallel_size

    def get_model_parallel_group(self) -> Any:
        """Return the process group of this rank's tensor-parallel ranks; None for one rank."""
        return self._groups.group("tensor")

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_slice_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group

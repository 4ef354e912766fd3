"""Topology of ranks: points of a grid with named axes, and the position of a rank in a pipeline,
with the method names of a Megatron ``mpu``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from hf_zero.distributed.parallel_dims import check_size
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.process_group import get_rank
from hf_zero.errors import ConfigError


class ProcessTopology:
    """Grid of ranks: ``dims[i]`` along ``axes[i]``, consecutive along the last axis. Raises
    ConfigError for names that cannot be fields of a tuple, and for what is not a size.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        listed = all(isinstance(given, (list, tuple)) for given in (axes, dims))
        if not listed or len(axes) != len(dims):
            raise ConfigError(
                f"the topology has the axes {axes!r} and the sizes {dims!r}; give a list of axes, "
                "and one size for each"
            )
        self.axes = list(axes)
        self.dims = list(dims)
        for axis, size in zip(self.axes, self.dims):
            check_size(size, f"the size of axis {axis!r}")
        try:
            self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        except ValueError as error:
            raise ConfigError(
                f"the axes of the topology are {self.axes}: {error}; give each a name of its own"
            ) from None
        coordinate: Any = self.ProcessCoord
        self.mapping: dict[object, int] = {
            coordinate(*coordinates): rank
            for rank, coordinates in enumerate(product(*map(range, self.dims)))
        }
        self._coords = list(self.mapping)

    def get_rank(self, **coords: int) -> int:
        """Return the rank at a point. Raises ConfigError unless axes have valid coordinates."""
        ranks = self.filter_match(**coords) if set(coords) == set(self.axes) else []
        if not ranks:
            raise ConfigError(
                f"get_rank({coords}) names no rank of {self}; give each of {self.axes} a "
                "coordinate, or ask filter_match for several ranks"
            )
        return ranks[0]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the coordinates of ``rank`` as text, such as "model_00"."""
        coord, left_out = self.get_coord(rank), set(omit_axes)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(coord, axis):02d}"
            for axis in self.axes
            if axis not in left_out
        )

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along ``axis``; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the point of ``rank``, a named tuple. Raises ConfigError for an unknown rank."""
        if rank not in range(len(self._coords)):
            raise ConfigError(
                f"rank {rank} is not in {self}, which has {self.world_size()} ranks; start as many "
                "ranks as its axes have places"
            )
        return self._coords[int(rank)]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the sets of ranks that differ only along ``axis``; [] for an unknown axis."""
        if axis not in self.axes:
            return []
        others = [other for other in self.axes if other != axis]
        return [
            self.filter_match(**dict(zip(others, coordinates)))
            for coordinates in product(*(range(self.get_dim(other)) for other in others))
        ]

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks with these coordinates. Raises ConfigError for an unknown axis."""
        if unknown := [axis for axis in coords if axis not in self.axes]:
            raise ConfigError(
                f"{self} has no axis {', '.join(unknown)}; choose among {', '.join(self.axes)}"
            )
        return [
            rank
            for coord, rank in self.mapping.items()
            if all(getattr(coord, axis) == at for axis, at in coords.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at ``idx`` of ``axis``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return len(self.mapping)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.dims))


class PipeDataParallelTopology(ProcessTopology):
    """Stages of ``num_dp`` data-parallel ranks each; the ranks of a stage are consecutive."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, data-parallel ranks and tensor-parallel ranks; the last are consecutive."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """Position of this rank in ``topology``, with the method names of a Megatron ``mpu``. The
    process groups are those that a ``PipelineModule`` has created. Raises ConfigError if none
    exists yet.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: object = None):
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
        coordinates = {**self._coord._asdict(), **coords, "pipe": stage_id}
        return self._topology.get_rank(**coordinates)

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> object:
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

    def get_model_parallel_group(self) -> object:
        """Return the process group of this rank's tensor-parallel ranks; None for one rank."""
        return self._groups.group("tensor")

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_slice_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group

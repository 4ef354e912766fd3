"""An engine as the readers and writers of its state use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from hf_zero.distributed.mesh import Mesh
    from hf_zero.optim.bound_optimizer import BoundOptimizer
    from hf_zero.zero.gather.unit import Unit
    from hf_zero.zero.layout.flat_buffer import FlatBuffer
    from hf_zero.zero.sharded_model import ShardedModel
    from hf_zero.zero.step.optimizer_step import OptimizerStep


class ShardedEngine(Protocol):
    """The parts of an engine that hold its state, in modules that the engine imports."""

    # options and changes of the weights that the last stream sent
    sent_changes: tuple[tuple[object, ...], Mapping[FlatBuffer, int]] | None

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def sharded_model(self) -> ShardedModel: ...

    @property
    def optimizer_step(self) -> OptimizerStep: ...

    @property
    def bound(self) -> BoundOptimizer:
        """None without an optimizer."""

    @property
    def optimizer(self) -> object: ...

    @property
    def units(self) -> Sequence[Unit]: ...

    @property
    def flats(self) -> Sequence[FlatBuffer]: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def global_steps(self) -> int: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    @property
    def kept_when_frozen(self) -> frozenset[str]: ...

    @property
    def destroyed(self) -> bool: ...

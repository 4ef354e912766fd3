"""What saving and loading need of an engine.

``hf_zero.core.engine.Engine`` has it; so has the fake of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from hf_zero.core.layout import FlatLayout


class OptimizerShard(Protocol):
    """Master weights and optimizer state of a flat, over ``owned``."""

    @property
    def master(self) -> torch.Tensor | None:
        """float32, or float64 for parameters that are; None for a frozen flat."""

    @property
    def states(self) -> Any:
        """The :class:`hf_zero.storage.states.States` where they live if they are offloaded, else
        None.
        """

    def wait_for_update(self) -> None:
        """Return when no update is under way."""

    def store_master(self, values: torch.Tensor) -> None:
        """Overwrite the master weights; ``master`` may be a copy of them."""


class Flat(Protocol):
    """A run of parameters, of which this rank owns the elements ``owned``."""

    @property
    def key(self) -> str: ...
    @property
    def layout(self) -> FlatLayout: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def raw(self) -> bool:
        """Whether the values are bytes that only their module can read: never cast."""

    @property
    def owned(self) -> tuple[int, int]: ...
    @property
    def optimizer_shard(self) -> OptimizerShard: ...
    @property
    def shard(self) -> torch.Tensor:
        """The values in the compute dtype over ``owned``."""

    @property
    def writes(self) -> bool:
        """Whether this rank is the one, among those that own the same elements, that saves them."""

    def store_shard(self, values: torch.Tensor) -> None:
        """Overwrite this rank's elements, casting to the compute dtype."""


class Bound(Protocol):
    """The optimizer over the flats."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def group_of(self) -> Mapping[str, int]:
        """Parameter name to the index of its optimizer group."""

    def tensors(self, flat: Any) -> Mapping[str, torch.Tensor]: ...
    def names(self, flat: Any) -> Sequence[str]:
        """Arrays of a flat whose states are offloaded that hold something."""

    def forget(self) -> None: ...
    def keeps(self, name: str) -> bool:
        """Whether some group has a state of that name."""

    def load_tensor(self, flat: Any, name: str, tensor: torch.Tensor) -> None: ...
    def scalars(self) -> Sequence[Mapping[str, Any]]: ...
    def apart(self) -> Sequence[Mapping[str, Mapping[str, Any]]]: ...
    def load_scalars(self, scalars: Any, apart: Any = ()) -> None: ...
    def hyperparameters(self) -> Sequence[Mapping[str, Any]]: ...
    def load_hyperparameters(self, hyperparameters: Any) -> None: ...


class Comm(Protocol):
    def broadcast_object(self, obj: Any, src: int = 0) -> Any: ...
    def all_gather_object(self, obj: Any) -> list[Any]: ...
    def store_messages(self, topic: str) -> Any:
        """A :class:`hf_zero.distributed.store.StoreMessages` for a thread of this rank; None for
        one rank, and where ranks share no store.
        """


class Engine(Protocol):
    @property
    def destroyed(self) -> bool: ...
    @property
    def module(self) -> torch.nn.Module: ...
    @property
    def flats(self) -> Sequence[Any]:
        """Of :class:`Flat`."""

    @property
    def bound(self) -> Any:
        """A :class:`Bound`, or None without an optimizer."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied name to the name under which a flat holds the parameter."""

    @property
    def param_dtypes(self) -> Mapping[str, str]:
        """The dtype each parameter had when it was handed to training, such as ``"bfloat16"``."""

    @property
    def mesh(self) -> Any:
        """A :class:`Comm` over all ranks."""

    @property
    def config(self) -> Any:
        """Its ``precision`` is ``fp32``, ``bf16`` or ``fp16``."""

    @property
    def scaler(self) -> Any: ...
    @property
    def counters(self) -> Any:
        """A dataclass of integers with ``global_steps``."""

    @property
    def lr_scheduler(self) -> Any: ...
    @property
    def stage(self) -> int: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def shard_world(self) -> int: ...
    def refresh_params(self) -> None: ...
    def consolidated(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole CPU tensor of every parameter in its compute dtype.

        Collective: exhaust it on every rank.
        """

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None: ...

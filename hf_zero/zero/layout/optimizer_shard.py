"""What the optimizer keeps of one flat buffer on this rank: master weights, where they and the
moments live, and the update of them that is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from hf_zero.device import streams
from hf_zero.storage.base import MASTER, Storage
from hf_zero.storage.memory import DeviceStorage
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.flat_spec import FlatSpec, reading
from hf_zero.zero.layout.gradient_buffer import GradientBuffer


class OptimizerShard:
    """The elements ``owned`` of one flat buffer as the optimizer sees them.

    An update runs on another thread where state is offloaded. A parameter shard, a
    master weight, a moment or a whole parameter is used after :meth:`wait_for_update`.
    """

    key: str = reading("spec.key")
    layout: FlatLayout = reading("spec.layout")
    owned: tuple[int, int] = reading("spec.owned")
    trainable: bool = reading("spec.trainable")
    grad: torch.Tensor | None = reading("gradient.shard")
    unused: frozenset[str] = reading("gradient.unused")
    # whether master weights and moments live elsewhere than on the device
    offloaded: bool = reading("storage.offloaded")

    def __init__(self, spec: FlatSpec, gradient: GradientBuffer):
        self.spec = spec
        self.gradient = gradient
        # where master weights live, and moments that are offloaded; torch makes the others
        self.storage: Storage = DeviceStorage({})
        # whether the master weights are others than the parameter shard
        self.has_own_master = False
        # waits for the update that is under way; None: there is none
        self.finish_update: Callable[[], None] | None = None
        # done when that update is, with the event of its last copy to the device
        self._update: Future[streams.Event | None] | None = None
        # that event of the last update that is over, for which streams that compute wait
        self._copied: streams.Event | None = None

    def __repr__(self) -> str:
        return f"OptimizerShard({self.key}, owned {self.owned})"

    # ---- master weights ----

    def keep_in(self, storage: Storage, own_master: bool) -> None:
        """Keep master weights in ``storage``, under the name ``MASTER``; where it is offloaded,
        moments as well. Unless ``own_master``, they are the memory of the parameter shard.
        """
        self.storage, self.has_own_master = storage, own_master

    def move_to_device(
        self, master: torch.Tensor | None, shard: torch.Tensor, own_master: bool
    ) -> None:
        """End the offload of master weights; the caller takes the moments first.

        ``master`` [owned] is their memory on the device; None where it is that of ``shard``: the
        parameter shard, or a copy of one that is elsewhere (``own_master``).
        """
        values = self.master
        assert values is not None
        kept = shard if master is None else master.copy_(values)
        self.storage.close()
        self.keep_in(DeviceStorage({MASTER: kept}), own_master)

    @property
    def master(self) -> torch.Tensor | None:
        """The master weights: [owned], fp32, or fp64 of parameters that are; None for what does
        not train. Written with :meth:`store_master`.
        """
        self.wait_for_update()
        return self.storage.fetch(MASTER) if self.has_master else None

    def store_master(self, values: torch.Tensor, start: int = 0) -> None:
        """Overwrite the master weights from element ``start`` of ``owned`` on."""
        if self.has_master:
            self.wait_for_update()
            self.storage.store(MASTER, start, values)

    @property
    def has_master(self) -> bool:
        """Whether these parameters train, and so have master weights."""
        return MASTER in self.storage.names()

    def free(self) -> None:
        """Let go of the memory."""
        self.storage.close()
        self.keep_in(DeviceStorage({}), False)

    # ---- the update under way ----

    def wait_for_update(self) -> None:
        """Return when no update is under way. Raises what it has raised."""
        if self.finish_update is not None:
            self.finish_update()

    @property
    def update_runs(self) -> bool:
        """Whether an update is being made on its thread."""
        return self._update is not None and not self._update.done()

    def begin_update(
        self, finish: Callable[[], None], update: Future[streams.Event | None]
    ) -> None:
        """An update was begun: ``finish`` waits for it and ends in :meth:`end_update`; ``update``
        gives the event of its last copy to the device.
        """
        self.finish_update, self._update = finish, update

    def end_update(self, copied: streams.Event | None) -> None:
        """The update is over, but for copies to the device until ``copied``."""
        self._copied = copied  # first: another thread reads this or ``_update``
        self.finish_update = self._update = None

    def synchronize_update(self) -> None:
        """As :meth:`wait_for_update`, for a thread other than the one that trains: the host waits
        for the last copy, too, because no stream of this thread does.
        """
        update = self._update
        copied = update.result() if update is not None else self._copied
        if copied is not None:
            copied.synchronize()

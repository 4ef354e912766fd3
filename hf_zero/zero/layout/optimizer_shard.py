"""The optimizer state of one flat buffer on this rank: master weights, the storage of master
weights and moments, and the update under way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from hf_zero.device import streams
from hf_zero.offload.storage import MASTER, DeviceStorage, Storage
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.flat_spec import FlatSpec, reading
from hf_zero.zero.layout.gradient_buffer import GradientBuffer


class OptimizerShard:
    """The optimizer's view of the elements ``owned`` of one flat buffer.

    Offloaded state is updated on another thread: call :meth:`wait_for_update` before using a
    parameter shard, a master weight, a moment or a whole parameter.
    """

    key: str = reading("spec.key")
    layout: FlatLayout = reading("spec.layout")
    owned: tuple[int, int] = reading("spec.owned")
    trainable: bool = reading("spec.trainable")
    grad: torch.Tensor | None = reading("gradient.shard")
    unused: frozenset[str] = reading("gradient.unused")
    # whether master weights and moments are offloaded
    offloaded: bool = reading("storage.offloaded")

    def __init__(self, spec: FlatSpec, gradient: GradientBuffer):
        self.spec = spec
        self.gradient = gradient
        # storage of master weights, and of offloaded moments; torch allocates moments on the device
        self.storage: Storage = DeviceStorage({})
        # whether the master weights are separate from the parameter shard
        self.has_own_master = False
        # waits for the update under way; None if there is none
        self.finish_update: Callable[[], None] | None = None
        # result of that update: the event of its last copy to the device
        self._update: Future[streams.Event | None] | None = None
        # that event of the last finished update; compute streams wait for it
        self._copied: streams.Event | None = None

    def __repr__(self) -> str:
        return f"OptimizerShard({self.key}, owned {self.owned})"

    # ---- master weights ----

    def keep_in(self, storage: Storage, own_master: bool) -> None:
        """Keep master weights in ``storage``, under the name ``MASTER``, and moments as well if it
        is offloaded. Unless ``own_master``, the master weights are the memory of the parameter
        shard.
        """
        self.storage, self.has_own_master = storage, own_master

    def move_to_device(
        self, master: torch.Tensor | None, shard: torch.Tensor, own_master: bool
    ) -> None:
        """End the offload of master weights; the caller moves the moments first.

        ``master`` [owned] is their memory on the device; None if ``shard`` is: the parameter shard,
        or a copy of an offloaded one (``own_master``).
        """
        values = self.master
        assert values is not None
        kept = shard if master is None else master.copy_(values)
        self.storage.close()
        self.keep_in(DeviceStorage({MASTER: kept}), own_master)

    @property
    def master(self) -> torch.Tensor | None:
        """The master weights: [owned], fp32, or fp64 for fp64 parameters; None for frozen
        parameters. Waits for the update under way. Written with :meth:`store_master`.
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
        """Whether these parameters train and so have master weights."""
        return MASTER in self.storage.names()

    def free(self) -> None:
        """Free the memory."""
        self.storage.close()
        self.keep_in(DeviceStorage({}), False)

    # ---- the update under way ----

    def wait_for_update(self) -> None:
        """Wait for the update under way, if any, and raise its exception."""
        if self.finish_update is not None:
            self.finish_update()

    @property
    def update_runs(self) -> bool:
        """Whether the update thread still works on this shard."""
        return self._update is not None and not self._update.done()

    def begin_update(
        self, finish: Callable[[], None], update: Future[streams.Event | None]
    ) -> None:
        """Register an update: ``finish`` waits for it and calls :meth:`end_update`; ``update``
        returns the event of its last copy to the device.
        """
        self.finish_update, self._update = finish, update

    def end_update(self, copied: streams.Event | None) -> None:
        """Record the end of the update; its copies to the device end with the event ``copied``."""
        self._copied = copied  # first: another thread reads this or ``_update``
        self.finish_update = self._update = None

    def synchronize_update(self) -> None:
        """Wait for the update on a thread other than the training thread. The host also waits for
        the last copy, because no stream of this thread does.
        """
        update = self._update
        copied = update.result() if update is not None else self._copied
        if copied is not None:
            copied.synchronize()

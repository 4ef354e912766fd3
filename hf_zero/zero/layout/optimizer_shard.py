"""The optimizer state of one flat buffer on this rank, with the update and the copy under way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from hf_zero.device import streams
from hf_zero.offload.storage import MASTER, DeviceStorage, ReadableStorage, Storage, StorageContents
from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.gradients import GradientBuffer


class CopyGate:
    """The wait of changes of state that a save in the background copies after its call, in each
    lease for writing.
    """

    # of the copy under way; None if there is none
    wait_until_copied: Callable[[], None] | None = None

    def begin_copy(self, wait_until_copied: Callable[[], None]) -> None:
        """Register a copy, for which ``wait_until_copied`` waits."""
        self.wait_until_copied = wait_until_copied

    def end_copy(self) -> None:
        """Record the end of the copy, on any thread."""
        self.wait_until_copied = None

    def wait_for_copy(self) -> None:
        """Wait for the copy under way, if any. Returns also if the save has failed."""
        wait = self.wait_until_copied  # another thread may end the copy
        if wait is not None:
            wait()


class OptimizerShard(CopyGate):
    """The optimizer's view of the elements ``owned`` of one flat buffer: its master weights and its
    offloaded moments. Moments on the device are in ``optim/device_state.py``.

    Their memory is used under a lease: :meth:`reading`, :meth:`writing`, and :meth:`updating` of
    the update itself. A lease ends where the next update begins.
    """

    def __init__(self, spec: FlatSpec, gradient: GradientBuffer):
        self.spec = spec
        self.key, self.layout, self.owned = spec.key, spec.layout, spec.owned
        self.trainable, self.tied_pp_stages = spec.trainable, spec.sharding.pp_stages
        self.gradient = gradient
        gradient.reader = self
        self.keep_in(DeviceStorage({}), False)
        # memory of the members of optimizer groups, which counts a script's writes in ``_version``
        self.members: torch.Tensor | None = None
        self._writes_before = 0  # to the memory that members had before
        self.has_update = False  # an update is under way: nobody has waited for it
        self._finish_update: Callable[[], None]  # waits for it
        # result of that update: the event of its last copy to the device
        self._update: Future[streams.Event | None] | None = None
        # that event of the last finished update; compute streams wait for it
        self._copied: streams.Event | None = None

    def __repr__(self) -> str:
        return f"OptimizerShard({self.key}, owned {self.owned})"

    def keep_in(self, storage: Storage, separate_master: bool) -> None:
        """Keep master weights in ``storage``, under the name ``MASTER``, and moments as well if it
        is offloaded. Unless ``separate_master``, the master weights are the memory of the parameter
        shard.
        """
        # whether the master weights are separate from the parameter shard
        self.has_separate_master = separate_master
        self.offloaded = storage.offloaded  # master weights and moments are
        self._storage = storage
        # names, formats and bytes of the arrays, which need no lease
        self.contents: StorageContents = storage

    def move_to_device(
        self, master: torch.Tensor | None, shard: torch.Tensor, separate_master: bool
    ) -> None:
        """End the offload of master weights; the caller moves the moments first.

        ``master`` [owned] is their memory on the device; None if ``shard`` is: the parameter shard,
        or a copy of an offloaded one (``separate_master``).
        """
        former = self.writing()
        target = shard if master is None else master.copy_(former.fetch(MASTER))
        former.close()
        self.keep_in(DeviceStorage({MASTER: target}), separate_master)

    @property
    def master(self) -> torch.Tensor | None:
        """The master weights, under a lease for reading: [owned], in ``spec.master_dtype``; None
        for frozen parameters. Written with :meth:`store_master`.
        """
        storage = self.reading()
        return storage.fetch(MASTER) if MASTER in storage.names() else None

    def memory_of_members(self) -> torch.Tensor:
        """Return the memory of the master weights for the members of optimizer groups to be views
        of: a script's writes to them are counted in :attr:`member_writes`, the engine's are not.
        """
        self._writes_before = self.member_writes
        self.members = self.contents.entry(MASTER).data
        return self.members

    @property
    def member_writes(self) -> int:
        """Number of a script's writes to members of optimizer groups in this flat buffer."""
        return self._writes_before + (0 if self.members is None else self.members._version)

    def store_master(self, values: torch.Tensor, start: int = 0) -> None:
        """Overwrite the master weights, which exist, from element ``start`` of ``owned`` on."""
        self.writing().store(MASTER, start, values)

    @property
    def has_master(self) -> bool:
        """Return whether these parameters have master weights, which may be the parameter shard
        itself: those that train, until their memory is freed.
        """
        return MASTER in self._storage.names()

    def free(self) -> None:
        """Free the memory."""
        self._writes_before, self.members = self.member_writes, None
        self.updating().close()
        self.keep_in(DeviceStorage({}), False)

    def reading(self) -> ReadableStorage:
        """Return the storage, to be read: the update under way is over."""
        self.wait_for_update()
        return self._storage

    def writing(self) -> Storage:
        """Return the storage, to be written to: the update under way is over, and so is the copy
        of a save.
        """
        self.wait_for_update()
        return self.updating()

    def updating(self) -> Storage:
        """Return the storage to the update under way, on any thread, which excludes all other
        leases from :meth:`begin_update` to :meth:`end_update`. The copy of a save is over.
        """
        if self.wait_until_copied is not None:
            self.wait_for_copy()
        return self._storage

    def wait_for_update(self) -> None:
        """Wait for the update under way, if any, and raise its exception."""
        if self.has_update:
            self._finish_update()

    @property
    def update_runs(self) -> bool:
        """Return whether the update thread still works on this shard."""
        return self._update is not None and not self._update.done()

    def begin_update(
        self, finish: Callable[[], None], update: Future[streams.Event | None] | None
    ) -> None:
        """Register an update: ``finish`` waits for it and calls :meth:`end_update`; ``update``
        returns the event of its last copy to the device. None: the shard itself is up to date, and
        only whole parameters are still to come.
        """
        self._finish_update, self._update, self.has_update = finish, update, True

    def end_update(self, copied: streams.Event | None) -> None:
        """Record the end of the update; its copies to the device end with the event ``copied``."""
        self._copied = copied  # first: another thread reads this or ``_update``
        self._update, self.has_update = None, False

    def synchronize_update(self) -> None:
        """Wait for the update on a thread other than the training thread. The host also waits for
        the last copy, because no stream of this thread does.
        """
        update = self._update
        copied = update.result() if update is not None else self._copied
        if copied is not None:
            copied.synchronize()

"""Blocking collectives over some ranks of the job, each verified on all of them before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.collective_handle import Handle
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.group_ends import CPU, destroy_group
from hf_zero.distributed.process_group import backend_serving, backends_for, default_device
from hf_zero.distributed.tagged_barrier import tagged_barrier
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import ConfigError


class RankGroup:
    """Blocking, rarely used collectives over ``ranks`` (global) on ``group`` (None: the default
    group). ``agrees``: the ranks agree on each by gloo messages first.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: Any,
        log: CollectiveLog,
        watchdog: Watchdog,
        agrees: bool,
    ):
        self.ranks, self.rank = tuple(ranks), rank
        self.log, self.watchdog = log, watchdog
        self._group, self._agrees = group, agrees

    def _call(self, what: str, call: Callable[[], Any], source: int | None = None) -> Any:
        if len(self.ranks) == 1:
            return call()
        pending = self.log.issue(
            what, None if source is None else () if source == self.rank else (source,)
        )
        late = (
            tagged_barrier(
                pending,
                self.ranks,
                self.ranks.index(self.rank),
                self._group,
                self.watchdog,
                None if source is None else self.ranks.index(source),
            )
            if self._agrees
            else []
        )
        try:
            with self.watchdog.watching(pending):
                answer = call()
        except RuntimeError as error:
            raise self.watchdog.explain_failure(pending, error) from error
        Handle(late, self.watchdog, pending).wait()
        return answer

    def close(self) -> None:
        """Release the communicator, if it is this group's own."""
        destroy_group(self._group)
        self._group = None
        self.log.close()

    def barrier(self) -> None:
        if len(self.ranks) > 1:
            self._call("barrier", lambda: dist.barrier(self._group))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy global rank ``source``'s ``tensor`` to every rank of the group, in place.

        Raises ConfigError for a tensor in host memory without a backend for it.
        """
        if len(self.ranks) == 1 or not tensor.numel():
            return
        if tensor.device.type == CPU.type and not backend_serving(CPU):
            raise ConfigError(
                f"the process group ({dist.get_backend_config()}) has no backend for tensors on "
                f"{tensor.device.type}, where a parameter lies that is "
                "to be the same on all ranks; make the group with "
                f"init_process_group({backends_for(default_device())!r}), leave that to "
                "hf_zero.init_distributed(), or move the parameter to the device"
            )
        # As bytes: not every backend supports every dtype. A conjugate or negative view, or one
        # with gaps, is sent as a resolved contiguous copy.
        held = tensor.resolve_conj().resolve_neg().contiguous()
        flat = held.as_strided((held.numel(),), (1,)).view(torch.uint8)
        self._call(
            f"broadcast of {tuple(tensor.shape)} {tensor.dtype} from rank {source}",
            lambda: dist.broadcast(flat, source, self._group),
            source,
        )
        if held.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
            tensor.copy_(held)

    def broadcast_object(
        self, value: Any, source: int | None = None, what: str = "an object"
    ) -> Any:
        """Return ``value`` of global rank ``source``, by default the first of the group."""
        source = self.ranks[0] if source is None else source
        if len(self.ranks) == 1:
            return value
        box = [value]
        self._call(
            f"broadcast of {what} from rank {source}",
            lambda: dist.broadcast_object_list(box, source, self._group),
            source,
        )
        return box[0]

    def all_gather_object(self, value: Any, what: str = "objects") -> list[Any]:
        """Return ``value`` of each rank, in the order of :attr:`ranks`."""
        if len(self.ranks) == 1:
            return [value]
        box: list[Any] = [None] * len(self.ranks)
        self._call(f"exchange of {what}", lambda: dist.all_gather_object(box, value, self._group))
        return box

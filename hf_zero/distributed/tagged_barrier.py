"""Small messages between hosts: the agreement on gloo that ranks are at the same collective
(collectives.py, the note), and an element-wise maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.collective_handle import Handle
from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.watchdog import Watchdog


def tagged_barrier(
    pending: PendingCollective,
    ranks: Sequence[int],
    rank: int,
    group: Any,
    watchdog: Watchdog,
    source: int | None = None,
) -> list[Any]:
    """Return when the ranks that ``pending`` needs are at the same collective. ``rank`` and
    ``source`` are indices into ``ranks``.

    The ``source`` of a broadcast waits for no rank: it gets the works to wait for once its values
    are sent.
    """
    peers = [peer for peer in range(len(ranks)) if peer != rank]
    empty, tag = torch.zeros(1, dtype=torch.uint8), pending.tag
    watchdog.check()
    try:
        sent = [
            dist.isend(empty, ranks[peer], group, tag)
            for peer in peers
            if source is None or rank == source
        ]
        came = [
            dist.irecv(empty.clone(), ranks[peer], group, tag)
            for peer in peers
            if source is None or peer == source
        ]
    except RuntimeError as error:
        raise watchdog.explain_failure(pending, error) from error
    if rank == source:
        return sent
    Handle([*came, *sent], watchdog, pending).wait()
    return []


def maximum_between_hosts(
    own: torch.Tensor,
    ranks: Sequence[int],
    rank: int,
    pending: PendingCollective,
    watchdog: Watchdog,
) -> torch.Tensor:
    """Return the element-wise maximum of ``own``, in host memory, over ``ranks`` (global), of which
    this one is number ``rank``: in log2(ranks) rounds over the default group.
    """
    for step in (1 << power for power in range((len(ranks) - 1).bit_length())):
        came = torch.empty_like(own)
        source, target = (ranks[(rank + way) % len(ranks)] for way in (-step, step))
        works = [
            dist.irecv(came, source, None, pending.tag),
            dist.isend(own, target, None, pending.tag),
        ]
        Handle(works, watchdog, pending).wait()
        own = torch.maximum(own, came)
    return own

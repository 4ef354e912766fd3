"""The agreement on gloo that ranks are at the same collective (collectives.py, the note)."""

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
    """Return when those that ``wait`` needs are at the same collective. ``rank`` and ``source``
    count within ``ranks``.

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

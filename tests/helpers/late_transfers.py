"""Copies of activations that run as late as the rules allow, in order: what a GPU may do at
worst, on the CPU.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch


class Late:
    """Transfers whose copies wait until somebody has to have them. It records what was asked in
    ``log``.

    Memory that may be used again is filled with NaN bits at once, so that a copy which is later
    than it may be is seen.
    """

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.log: list[tuple[str, int]] = []
        self.sent_bytes = 0
        self.under_way = 0  # bytes on the device whose copies nobody has waited for
        self.most_under_way = 0

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        job = [target, source, False]
        self.queue.append(job)
        self.log.append(("send", source.numel()))
        self.sent_bytes += source.numel()
        self.under_way += source.numel()
        self.most_under_way = max(self.most_under_way, self.under_way)
        return job

    def leave(self, sent: Any) -> None:
        self.log.append(("leave", sent[0].numel()))
        self.under_way -= sent[0].numel()
        self.run_to(sent)

    def reload(self, source: torch.Tensor) -> _Later:
        values = torch.full((source.numel(),), 255, dtype=torch.uint8)
        job = [values, source, False]
        self.queue.append(job)
        self.log.append(("reload", source.numel()))
        return _Later(self, job)

    def run_to(self, job: Any) -> None:
        while not job[2]:
            first = self.queue.popleft()
            first[0].copy_(first[1])
            first[2], first[1] = True, None

    def close(self) -> None:
        while self.queue:
            self.run_to(self.queue[0])


class _Later:
    def __init__(self, transfers: Late, job: Any) -> None:
        self.transfers, self.job = transfers, job

    def use(self) -> torch.Tensor:
        self.transfers.log.append(("use", self.job[0].numel()))
        self.transfers.run_to(self.job)
        return self.job[0]

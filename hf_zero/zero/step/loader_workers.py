"""Workers of a DataLoader under signals to the process group of their rank: torchrun and Accelerate
send them to the group, and a worker that ends fails its rank before it can save.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.utils.data._utils import signal_handling

from hf_zero.ops import native

_signals: set[int] = set()  # what the ranks of this process listen for
_begin = signal_handling._set_worker_signal_handlers


def _begin_worker() -> None:
    _begin()
    if _signals:
        native.end_by_parent_only(_signals)


def keep(signals: Iterable[int]) -> None:
    """Let workers that are forked from now on pass over ``signals``, unless their rank sends them:
    it ends its workers by SIGTERM. No signals: let the next ones act as torch has it.
    """
    _signals.clear()
    _signals.update(signals)
    signal_handling._set_worker_signal_handlers = _begin_worker

"""Patches of torchrun under ``hf-zero launch``: the store listens on the rendezvous address alone;
a signal goes to each rank's process first, and to its children once the process has ended; one that
arrives while ranks start is handled once all have started.

torchrun unpickles values of its store, and the store asks for no password. A server of TCPStore
listens on all addresses of its host, also if it was made for 127.0.0.1, unless it gets a socket.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hf_zero.distributed.rendezvous import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


class RendezvousStore(dist.TCPStore):
    """A TCPStore whose server listens on ``host_name`` alone, if that is ``localhost`` or an IP
    address of this host. It listens on all addresses for another name, because each host may
    resolve a name differently, and for an address that a router translates.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *args: Any,
        **options: Any,
    ) -> None:
        bound = _bind(host_name, port) if is_master else None
        if bound is not None:
            port = bound.getsockname()[1]
            options["master_listen_fd"] = bound.detach()
        super().__init__(host_name, port, world_size, is_master, *args, **options)


def bind_rendezvous() -> None:
    """Make the stores of launchers that are imported after this call :class:`RendezvousStore`."""
    dist.TCPStore = RendezvousStore  # type: ignore[misc]


def _bind(host: str, port: int) -> socket.socket | None:
    """Return a socket that is bound to ``host`` and ``port``. None if ``host`` is a name, or if the
    socket cannot be bound: TCPStore then shares the server of this process at that port, or raises
    its error.
    """
    try:
        address = ipaddress.ip_address(LOOPBACK if host == "localhost" else host)
    except ValueError:
        return None
    bound = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of a job just ended
        bound.bind((str(address), port))
    except OSError:
        bound.close()
        return None
    return bound


def signal_ranks_alone() -> None:
    """Make torchrun send a signal to a rank's process first, and to its children once the process
    has ended: a rank that saves on SIGTERM needs the workers of its data loader until then.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    close = SubprocessHandler.close

    def close_rank(self: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        if death_sig in (None, signal.SIGKILL) or self.proc.poll() is not None:
            close(self, death_sig)
            return
        self.proc.send_signal(death_sig)

        def end_group() -> None:
            self.proc.wait()
            with suppress(ProcessLookupError):
                close(self, death_sig)

        threading.Thread(target=end_group).start()

    SubprocessHandler.close = close_rank  # type: ignore[method-assign]


def start_ranks_whole() -> None:
    """Make torchrun handle a signal that arrives while ranks start once it has started all of them:
    its handlers raise, and a rank that it does not know yet would be left running.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    start: Any = SubprocessContext._start

    def start_all(self: SubprocessContext) -> None:
        if threading.current_thread() is not threading.main_thread():  # has no handlers
            start(self)
            return
        arrived: list[int] = []
        former = ((number, signal.getsignal(number)) for number in signal.valid_signals())
        handlers = {number: handler for number, handler in former if callable(handler)}
        for number in handlers:
            signal.signal(number, lambda number, _: arrived.append(number))
        try:
            start(self)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if arrived:
            self.close(signal.Signals(arrived[0]))
            # not by a signal: what its handler raises in a finalizer, which may run first, is lost
            handlers[signal.Signals(arrived[0])](arrived[0], None)

    SubprocessContext._start = start_all  # type: ignore[method-assign]

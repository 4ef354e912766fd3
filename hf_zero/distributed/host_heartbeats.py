"""Heartbeats between the hosts of a job: an unreachable host (no power, no network, a kernel that
hangs) is named on every rank within seconds.

[Note: an unreachable host]
No proof exists that such a host will not answer: its connections stay open, and no post in the
store tells of it. A rank that posts nothing may compile, and hold the interpreter lock for minutes.
Heartbeats come from a native thread that takes no lock of the interpreter
(kernels/cpu/heartbeats.h), and from another rank of the host where the process of the first ends or
is stopped. So they are missing only if none of the host's processes runs, or no packet of it
arrives. After ``host_timeout`` seconds without one, a choice of the user, the host is unreachable,
and all ranks of the job end.

If the processes have exited, the host refuses packets to their ports: such a host is not
unreachable, and its ranks count as ended, which ends only the waits that need them.

Ranks exchange where they listen together with their hosts, so a start has no further message. A
host is judged once its heartbeats have arrived regularly, for ten intervals: in a network that
drops them, or lets only the first ones pass, a warning says that only ``timeout`` limits waits. A
rank whose engines have ended says so, and its thread ends; the next engine of the process starts it
again.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Protocol

from hf_zero.config.variables import is_off
from hf_zero.distributed import rank_hosts
from hf_zero.logging import log_rank0, logger

SWITCH = "HF_ZERO_NATIVE"
TOKEN_BYTES = 16
UNHEARD_SECONDS = 30.0  # after which a host without regular heartbeats is reported, at least
DESCRIPTORS = "/proc/self/fd"
ONE_HOST = "all ranks are on one host"  # whatever names they give it
NOT_ASKED = "host_timeout is 0"
OFF = "!"  # begins an entry of a rank that has no socket, before the reason


class NativeHeartbeats(Protocol):
    """The socket of the native core, with the thread that sends and receives heartbeats."""

    port: int

    def join(
        self,
        token: bytes,
        rank: int,
        members: Sequence[tuple[int, str, int]],
        timeout: float,
        now: float,
    ) -> None: ...
    def run(self) -> None: ...
    def stop(self) -> None: ...
    def unreachable(self) -> Sequence[int]: ...
    def exited(self) -> Iterable[int]: ...
    def unheard(self) -> Sequence[int]: ...


class HostHeartbeats:
    """The heartbeats of this rank's host, and the hosts that are unreachable.

    ``native``: the socket, opened before the ranks exchanged where they listen; ``contacts``: of
    each rank, its address and port; ``wait_timeout``: seconds after which a wait is an error in
    any case.
    """

    def __init__(
        self,
        native: NativeHeartbeats,
        rank: int,
        token: bytes,
        contacts: Sequence[tuple[str, int]],
        wait_timeout: float,
    ) -> None:
        self.timeout, self._wait_timeout = 0.0, wait_timeout  # seconds
        self._native, self._rank, self._token = native, rank, token
        names = list(dict.fromkeys(map(rank_hosts.host_of, range(len(contacts)))))
        hosts = [names.index(rank_hosts.host_of(r)) for r in range(len(contacts))]
        self._members = [(host, *contact) for host, contact in zip(hosts, contacts)]
        self._ranks = [
            [rank for rank, host in enumerate(hosts) if host == index]
            for index in range(len(names))
        ]
        self._holders = 0
        self._unheard_at = 0.0  # when to report hosts without regular heartbeats; 0: never

    def hold(self, timeout: float) -> None:
        """Count an engine; the first starts the thread. A host is unreachable after the first's
        ``timeout`` seconds without a heartbeat, until :meth:`release` has counted the last engine.
        """
        self._holders += 1
        if self._holders == 1:
            now = time.monotonic()
            self.timeout, self._unheard_at = timeout, now + max(timeout, UNHEARD_SECONDS)
            self._native.join(self._token, self._rank, self._members, timeout, now)
            self._native.run()

    def release(self) -> None:
        """Count an engine less; the last ends the thread."""
        self._holders -= 1
        if self._holders == 0:
            self.close()

    def close(self) -> None:
        """Tell the other hosts that this rank leaves, and end the thread. Idempotent."""
        self._native.stop()

    def unreachable(self) -> list[int]:
        """Return the ranks on hosts that are unreachable."""
        return [rank for host in self._native.unreachable() for rank in self._ranks[host]]

    def exited(self) -> list[int]:
        """Return ranks on other hosts that have exited without a call of :meth:`close`."""
        return list(self._native.exited())

    def cause(self) -> str:
        """Return why the ranks on unreachable hosts will not answer; "" if there are none."""
        ranks = self.unreachable()
        if not ranks:
            return ""
        one = len({rank_hosts.host_of(rank) for rank in ranks}) == 1
        return (
            f"{rank_hosts.named(ranks)} {'is' if len(ranks) == 1 else 'are'} unreachable: no "
            f"heartbeat of {'this host' if one else 'these hosts'} for {self.timeout:g} s "
            "(host_timeout), because of a crash, a hang or the network, perhaps that of the host "
            "that reports this. Restart the job; if a host may pause for longer, set a longer "
            "host_timeout"
        )

    def report_unheard(self) -> None:
        """Warn, once, of watched hosts whose heartbeats do not arrive regularly."""
        if not 0 < self._unheard_at <= time.monotonic():
            return
        self._unheard_at = 0.0
        ranks = [self._ranks[host] for host in self._native.unheard()]
        first = min(self._ranks[self._members[self._rank][0]])
        if ranks and first == self._rank:
            logger.warning(
                "the heartbeats of %s do not arrive regularly: does the network drop UDP between "
                "hosts? If such a host becomes unreachable, ranks notice only after the timeout of "
                "%g s",
                rank_hosts.named(rank for group in ranks for rank in group),
                self._wait_timeout,
            )

    def sever(self) -> None:
        """Shut down the connections of this process to unreachable hosts: calls of a store on such
        a host block in native code, and then raise. An address that another host shares is left
        alone.
        """
        gone = set(self.unreachable())
        near = {address for rank, (_, address, _) in enumerate(self._members) if rank not in gone}
        away = {self._members[rank][1] for rank in gone} - near
        for descriptor in map(int, os.listdir(DESCRIPTORS) if away else ()):
            with suppress(OSError, IndexError):  # closed by now, or connected to nothing
                copied = os.dup(descriptor)
                if not stat.S_ISSOCK(os.fstat(copied).st_mode):
                    os.close(copied)
                    continue
                with socket.socket(fileno=copied) as connection:
                    if str(connection.getpeername()[0]).removeprefix("::ffff:") in away:
                        connection.shutdown(socket.SHUT_RDWR)


# by number of ranks; None: not possible. Missing while no engine of all ranks has asked for them
_started: dict[int, HostHeartbeats | None] = {}


@atexit.register
def _leave() -> None:
    """Leave last of all: this rank may serve others until its interpreter ends."""
    for heartbeats in filter(None, _started.values()):
        heartbeats.close()


def learn_hosts(
    exchange: rank_hosts.Exchange, rank: int, world: int, host_timeout: float, timeout: float
) -> HostHeartbeats | None:
    """Learn the hosts of all ranks by ``exchange`` (collective, until one engine of all ranks has
    asked for heartbeats), and return the heartbeats between them; None on one host, if
    ``host_timeout`` is 0, or without the native core.

    ``timeout``: the timeout of waits, for the warning that heartbeats are not possible.
    """
    if world not in _started:
        address, native, reason = _open(world, host_timeout)
        token = secrets.token_hex(TOKEN_BYTES) if rank == 0 else ""
        contact = f"{OFF}{reason}" if native is None else f"{address} {native.port} {token}"
        entries = rank_hosts.learn(exchange, contact)
        reasons = [entry.removeprefix(OFF) if entry.startswith(OFF) else "" for entry in entries]
        if host_timeout:
            _warn(reasons, world, timeout)
        if NOT_ASKED in reasons:  # a later engine may ask
            return None
        _started[world] = None
        if native is not None and not any(reasons) and not _is_one_host(world):
            split = [entry.split(" ") for entry in entries]
            contacts = [(address, int(port)) for address, port, _ in split]
            of_all = bytes.fromhex(split[0][2])
            _started[world] = HostHeartbeats(native, rank, of_all, contacts, timeout)
    return _started[world] if host_timeout else None


def _is_one_host(world: int) -> bool:
    return len(set(map(rank_hosts.host_of, range(world)))) == 1


def _warn(reasons: Sequence[str], world: int, timeout: float) -> None:
    """Warn of the first of ``reasons``, by rank, why there are no heartbeats."""
    missing = [rank for rank, reason in enumerate(reasons) if reason not in ("", ONE_HOST)]
    if missing and not _is_one_host(world):
        log_rank0(
            f"no heartbeats between hosts: {reasons[missing[0]]} "
            f"({rank_hosts.named(missing[:1])}). If a host becomes unreachable, ranks notice only "
            f"after the timeout of {timeout:g} s",
            logging.WARNING,
        )


def _open(world: int, host_timeout: float) -> tuple[str, NativeHeartbeats | None, str]:
    """Return this host's address and a socket there, or ("", None, the reason why not)."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        return "", None, ONE_HOST
    if not host_timeout:
        return "", None, NOT_ASKED
    if is_off(SWITCH):
        return "", None, f"{SWITCH}={os.environ[SWITCH]} switches the native core off"
    core: ModuleType | None = None
    with suppress(ImportError):
        core = importlib.import_module("hf_zero._cpu")
    if core is None or not hasattr(core, "Heartbeats"):
        return "", None, "the native core is missing or of another version, see hf-zero doctor"
    address = rank_hosts.address_for_others(os.environ.get("MASTER_ADDR"))
    if address is None:
        return "", None, "no IPv4 route leads to MASTER_ADDR"
    try:
        return address, core.Heartbeats(address), ""
    except RuntimeError as error:
        return "", None, str(error)

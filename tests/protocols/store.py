"""A simulated TCPStore: torch's calls, their timeouts, and when they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from tests.protocols.simulation import Process, Simulation, Task

TIMEOUT = timedelta(seconds=300)
LOST = "Connection was closed"


def as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class Server:
    """The keys of a store. ``host``: the process that hosts it; None: the launcher."""

    def __init__(self, simulation: Simulation, host: Process | None = None) -> None:
        self.simulation, self.host = simulation, host
        self.data: dict[str, bytes] = {}

    @property
    def gone(self) -> bool:
        return self.host is not None and not self.host.alive


class Client:
    """A connection to ``server``. torch's client sends set, append and multi_set without an answer,
    so that they may be under way while other ranks act; one call at a time uses a connection.
    """

    def __init__(self, server: Server, timeout: timedelta = TIMEOUT) -> None:
        self._server, self._timeout = server, timeout
        self._simulation = server.simulation
        self.under_way: list[Callable[[dict[str, bytes]], None]] = []
        self._user: Task | None = None
        self.requests = 0
        self._simulation.clients.append(self)

    def clone(self) -> Client:
        return Client(self._server, self._timeout)

    def deliver(self) -> None:
        """Let the oldest message that is under way arrive."""
        self.under_way.pop(0)(self._server.data)

    def _begin(self, what: str) -> None:
        self._simulation.point(what)
        self.requests += 1
        me = self._simulation.current
        if self._user not in (None, me):
            self._simulation.wait(lambda: self._user is None, None, f"the connection for {what}")
        if self._server.gone:
            raise dist.DistNetworkError(LOST)

    def _send(self, what: str, act: Callable[[dict[str, bytes]], None]) -> None:
        self._begin(what)
        self.under_way.append(act)

    def _ask(self, what: str, act: Callable[[dict[str, bytes]], Any]) -> Any:
        self._begin(what)
        while self.under_way:
            self.deliver()
        answer = act(self._server.data)
        self._simulation.point("answered: " + what)
        if self._server.gone:
            raise dist.DistNetworkError(LOST)
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        content = as_bytes(value)
        self._send(f"set {key}", lambda data: data.update({key: content}))

    def append(self, key: str, value: str | bytes) -> None:
        content = as_bytes(value)
        self._send(f"append {key}", lambda data: data.update({key: data.get(key, b"") + content}))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        contents = dict(zip(keys, map(as_bytes, values), strict=True))
        self._send(f"multi_set {keys}", lambda data: data.update(contents))

    def add(self, key: str, amount: int) -> int:
        def act(data: dict[str, bytes]) -> int:
            number = int(data.get(key, b"0")) + amount
            data[key] = str(number).encode()
            return number

        return int(self._ask(f"add {key} {amount}", act))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        def act(data: dict[str, bytes]) -> bytes:
            if data.get(key, b"") == expected.encode():
                data[key] = value.encode()
            return data.get(key, expected.encode())

        return bytes(self._ask(f"compare_set {key}", act))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(f"check {keys}", lambda data: all(key in data for key in keys)))

    def delete_key(self, key: str) -> bool:
        return self._ask(f"delete {key}", lambda data: data.pop(key, None)) is not None

    def list_keys(self) -> list[str]:
        return list(self._ask("list_keys", list))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout or self._timeout)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(keys, self._timeout)

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        """Return the values of ``keys``, as of the moment at which all of them existed."""
        server = self._server
        self._begin(f"wait for {keys}")
        while self.under_way:
            self.deliver()
        values: list[bytes] = []

        def there() -> bool:
            if not values and all(key in server.data for key in keys):
                values.extend(server.data[key] for key in keys)
            return bool(values) or server.gone or not keys

        self._user = self._simulation.current
        try:
            if not there():
                seconds = timeout.total_seconds()
                self._simulation.wait(there, seconds, f"wait for {keys}")
            else:
                self._simulation.point(f"answered: {keys}")
        finally:
            self._user = None
        if server.gone:
            raise dist.DistNetworkError(LOST)
        if not values and keys:
            raise dist.DistStoreError(f"wait timeout, keys: {', '.join(keys)}")
        return values


class PrefixStore:
    """``torch.distributed.PrefixStore``."""

    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix, self.underlying_store = prefix, store

    def clone(self) -> PrefixStore:
        return PrefixStore(self.prefix, self.underlying_store.clone())

    def list_keys(self) -> list[str]:
        """Return the keys with the prefix, without it."""
        start = f"{self.prefix}/"
        keys = self.underlying_store.list_keys()
        return [key.removeprefix(start) for key in keys if key.startswith(start)]

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.underlying_store, name)

        def with_prefix(keys: Any, *args: Any) -> Any:
            if isinstance(keys, str):
                return call(f"{self.prefix}/{keys}", *args)
            return call([f"{self.prefix}/{key}" for key in keys], *args)

        return with_prefix


DIST = SimpleNamespace(PrefixStore=PrefixStore, DistStoreError=dist.DistStoreError)

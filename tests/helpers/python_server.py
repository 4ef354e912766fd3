"""A Python that has imported torch, transformers and accelerate, and forks a process for each
command that it is sent: scripts of tests start in milliseconds instead of three seconds each.

``server(environment)`` starts one and gives ``python``, a command that takes the place of
``sys.executable``: options ``-u``, ``-c`` and ``-m``, a script, its arguments, the environment, the
working folder, standard streams, signals and the exit code are those of a process of its own. A
launcher under it starts its ranks by it, too (``PYTHON_EXEC``). What a variable changes while a
library is imported is not seen: a command that sets one needs a Python of its own, or a function
that each process calls first (``begin``).

The server runs this file as a script, the command is ``python_client.py``.
"""

from __future__ import annotations

import array
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PRELOADED = ("torch", "datasets", "accelerate", "transformers.trainer")
CLIENT = Path(__file__).with_name("python_client.py")


@contextmanager
def server(
    environment: Mapping[str, str], preloaded: Sequence[str] = PRELOADED, begin: str = ""
) -> Iterator[str]:
    """The path of a command that runs Python as the server does, while the server lives.

    It has imported ``preloaded``. ``begin`` is ``module:function``, called in each process once it
    has its environment.
    """
    with tempfile.TemporaryDirectory(prefix="python-") as folder:
        address, command = os.path.join(folder, "socket"), os.path.join(folder, "python")
        quoted = " ".join(f"'{word}'" for word in (sys.executable, "-ES", str(CLIENT), address))
        Path(command).write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
        os.chmod(command, 0o700)
        process = subprocess.Popen(
            [sys.executable, __file__, address, begin, *preloaded],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError(f"the server of Python ended with {process.wait()}")
            yield command
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


class Request:
    """The request of a client: ``arguments`` as of ``python``, its environment, folder and
    streams.
    """

    def __init__(self, connection: socket.socket):
        size = array.array("i")
        message, fds, _, _ = socket.recv_fds(connection, 8, 3)
        size.frombytes(message[:4])
        content = b""
        while len(content) < size[0]:
            if not (part := connection.recv(size[0] - len(content))):
                raise EOFError("a client that went before it had asked")
            content += part
        self.streams = fds
        self.__dict__.update(json.loads(content))


class Server:
    def __init__(self, address: str):
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.running: dict[socket.socket, tuple[int, int]] = {}
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)

    def serve(self) -> Request | None:
        """The request of this process, where it is the one that was forked; None at the end."""
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    self.close()
                    return None
                if (request := key.data(key.fileobj)) is not None:
                    return request

    def accept(self, listener: socket.socket) -> Request | None:
        connection, _ = listener.accept()
        try:
            request = Request(connection)
        except EOFError:
            connection.close()
            return None
        child = os.fork()
        if child == 0:
            self.forget()
            connection.close()
            return request
        for stream in request.streams:
            os.close(stream)
        ended = os.pidfd_open(child)
        self.running[connection] = child, ended
        self.selector.register(connection, selectors.EVENT_READ, self.heard)
        self.selector.register(ended, selectors.EVENT_READ, lambda _: self.ended(connection))
        return None

    def heard(self, connection: socket.socket) -> None:
        """A signal that the client has got, or that the client is gone."""
        child, _ = self.running[connection]
        try:
            number = connection.recv(1)
        except ConnectionError:
            number = b""
        if number:
            os.kill(child, number[0])
        else:
            self.selector.unregister(connection)
            os.kill(child, signal.SIGKILL)

    def ended(self, connection: socket.socket) -> None:
        child, ended = self.running.pop(connection)
        _, status = os.waitpid(child, 0)
        self.selector.unregister(ended)
        os.close(ended)
        if connection in self.selector.get_map():
            self.selector.unregister(connection)
        try:
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        except OSError:
            pass  # the client is gone
        connection.close()

    def forget(self) -> None:
        """In a forked process: nothing of the server's is open."""
        self.selector.close()
        self.listener.close()
        for connection, (_, ended) in self.running.items():
            connection.close()
            os.close(ended)

    def close(self) -> None:
        for child, _ in self.running.values():
            os.kill(child, signal.SIGKILL)


def become(request: Any, begin: str) -> None:
    """This process is the one that was asked for: streams, folder, environment."""
    os.setsid()
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    import logging

    import numpy

    numpy.random.seed()
    logging.getLogger("hf_zero").setLevel(os.environ.get("HF_ZERO_LOG_LEVEL", "INFO").upper())
    if begin:
        module, _, function = begin.partition(":")
        getattr(sys.modules[module], function)()


def run(arguments: list[str]) -> None:
    """Run ``python *arguments`` in this process; return if it ends without an exception."""
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        option = arguments.pop(0)
        if option != "-u":
            raise SystemExit(f"the server of Python knows no option {option}")
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    import runpy
    import types

    if arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv[:] = ["-m", *arguments[2:]]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path[0] = ""
        code = compile(arguments[1], "<string>", "exec")
    else:
        main.__file__ = script = arguments[0]
        sys.argv[:] = arguments
        sys.path[0] = os.path.dirname(os.path.realpath(script))
        with open(script, "rb") as file:
            code = compile(file.read(), script, "exec")
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def main(address: str, begin: str, *preloaded: str) -> None:
    for name in preloaded:
        __import__(name)
    import gc

    gc.collect()
    gc.freeze()
    served = Server(address)
    print("ready", flush=True)
    request: Any = served.serve()
    if request is None:
        os._exit(0)  # nothing of what is imported has anything to end
    become(request, begin)
    try:
        run(request.arguments)
    except Exception as error:
        trace = error.__traceback__
        # from the script's own frame on, as where it was started by itself
        while trace is not None and trace.tb_frame.f_code.co_filename in (
            __file__,
            "<frozen runpy>",
        ):
            trace = trace.tb_next
        # as the interpreter leaves what it has not caught
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(*sys.argv[1:])

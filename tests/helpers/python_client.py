"""The command of ``python_server.py``: has its arguments run by the server, passes signals on, and
ends as that process does. Imports little: it starts in milliseconds.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(address: str, arguments: list[str]) -> int:
    asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    content = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(content).to_bytes(4, sys.byteorder)], [0, 1, 2])
        server.sendall(content)
        for number in PASSED_ON:
            signal.signal(number, lambda got, _: server.send(bytes([got])))
        return int(server.recv(16) or b"-9")


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)

"""``hf-zero report --serve``: a page that follows a run, on this machine alone."""

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.report import serve
from hf_zero.report.serve import ReportServer
from tests.cli.invoked import invoke, refusal
from tests.report.test_timeline import STEP, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    append(tmp_path / "run", range(1, 4))
    return tmp_path / "run"


def append(folder: Path, steps: range) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "loss": {9 - step}.5}}\n' for step in steps)


@contextmanager
def serving(*folders: Path, **options: Any) -> Iterator[ReportServer]:
    with ReportServer(*map(str, folders), **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def updates(server: ReportServer, version: str = "") -> tuple[dict[str, Any], str]:
    with urlopen(Request(f"{server.url}run.json", headers={"If-None-Match": version})) as answer:
        return json.load(answer), answer.headers["ETag"]


def losses(shown: dict[str, Any]) -> list[float]:
    return [row["value"] for row in shown["specs"]["loss"]["data"]["values"]]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "javascript", lambda: "LIBRARY")


@pytest.mark.usefixtures("undrawn")
def test_what_a_run_appends_is_served_once(run: Path) -> None:
    with serving(run) as server:
        assert server.url.startswith("http://127.0.0.1:")
        page = urlopen(server.url).read().decode()
        found = re.search(r"data-refresh='3' data-version='([^']+)'", page)
        assert found is not None and "LIBRARY" in page and "<!--" not in page
        with pytest.raises(HTTPError, match="304"):
            updates(server, found[1])
        append(run, range(4, 6))
        shown, version = updates(server, found[1])
        assert losses(shown) == [8.5, 7.5, 6.5, 5.5, 4.5] and version != found[1]
        with pytest.raises(HTTPError, match="304"):
            updates(server, version)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": "six"}\n{"step": 7, "loss": "low"}\n')
        for _ in range(2):
            assert "a row of step 7 is damaged" in updates(server)[0]["body"]
        (run / "metrics.jsonl").unlink()
        assert "has no metrics.jsonl, from which" in updates(server)[0]["body"]
        append(run, range(1, 2))
        assert losses(updates(server)[0]) == [8.5]


@pytest.mark.usefixtures("undrawn")
def test_a_trace_is_shown_once_it_is_written(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "run"
    other.parent.mkdir()
    append(other, range(1, 4))
    trace = other / "trace-steps-2-3.json.gz"
    with serving(run, other) as server:
        shown, version = updates(server)
        assert shown["title"] == f"{tmp_path.name}/run against other/run"
        trace.write_bytes(b"begun")
        shown, version = updates(server, version)
        assert "timeline0" not in shown["specs"]
        write(trace, STEP)
        assert "timeline1" in updates(server, version)[0]["specs"]


@pytest.mark.usefixtures("undrawn")
def test_only_this_machine_is_answered(run: Path, tmp_path: Path) -> None:
    """Neither names of other sites that lead here, nor other paths."""
    (run / "secret").write_text("secret")
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        for path in ("run.json?", "secret", "../run/secret", "metrics.jsonl"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(server.url + path)
        for host, status in (
            (f"localhost:{server.server_port}", 200),
            ("localhost:8080", 200),
            ("127.0.0.1", 200),
            ("elsewhere.org", 403),
            (f"localhost.elsewhere.org:{server.server_port}", 403),
        ):
            asked = http.client.HTTPConnection("127.0.0.1", server.server_port)
            asked.request("GET", "/", headers={"Host": host})
            assert asked.getresponse().status == status
            asked.close()
        port = server.server_port
        assert f"--port {port} cannot be used on 127.0.0.1 (Address already in use); leave" in (
            refusal(f"report {run} --serve --port {port}")
        )
    assert "there is no folder" in refusal(f"report {tmp_path / 'no'} --serve")
    assert f"--against {run} is the folder" in refusal(f"report {run} --against {run} --serve")
    for option in ("--json", "--output page.html"):
        ran = CliRunner().invoke(app, ["report", str(run), "--serve", *option.split()])
        said = f"--serve writes and prints no report; leave {option.split()[0]} out"
        assert ran.exit_code and said in ran.output + str(ran.exception)
    assert "--port is that of --serve; leave it out" in refusal(f"report {run} --port 9")


@pytest.mark.usefixtures("undrawn")
def test_the_command_serves_until_it_is_interrupted(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: ReportServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReportServer, "serve_forever", interrupted)
    said = invoke(f"report {run} --serve")
    assert re.fullmatch(r"the page: http://127\.0\.0\.1:\d+/ \(Ctrl-C ends\)\n", said)
    assert not (run / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_client_that_breaks_off_is_no_error(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has asked, and while it is answered; other errors are printed."""
    begun, reset, ended = threading.Event(), threading.Event(), threading.Semaphore(0)
    close = ReportServer.shutdown_request

    def slow(server: ReportServer) -> str:
        begun.set()
        reset.wait(30)
        return "x" * (64 << 20)

    def closed(server: ReportServer, request: Any) -> None:
        close(server, request)
        ended.release()

    monkeypatch.setattr(ReportServer, "page", slow)
    monkeypatch.setattr(ReportServer, "shutdown_request", closed)
    with serving(run) as server:
        for asked in (b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            client = socket.create_connection(("127.0.0.1", server.server_port))
            client.sendall(asked)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert asked.endswith(b"HT") or begun.wait(30)
            client.close()  # by a reset
            reset.set()
            assert ended.acquire(timeout=30)
        assert "Traceback" not in capsys.readouterr().err
        try:
            raise ValueError("of our own")
        except ValueError:
            server.handle_error(None, None)
        assert "ValueError: of our own" in capsys.readouterr().err

"""A server on 127.0.0.1 for the page of a run, which the page asks again while the run writes."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.report.page import PageContent, content, distinct, javascript, page, readers, timeline
from hf_zero.report.run import RecordedRun
from hf_zero.report.timeline import Timeline

HOST = "127.0.0.1"
REFRESH_SECONDS = 3
UPDATES = "/run.json"


class ReportServer(ThreadingHTTPServer):
    """Serves the page of the run in the folder ``run`` on ``port`` of 127.0.0.1; 0: a free one.

    Args:
        against: the folder of another run, which is shown beside it.
        trace: a trace of ``engine.trace``, by default the last one of the run.

    Raises:
        ConfigError: a folder or the trace does not exist, both folders are one, the port is in use,
            or the package that draws is not installed. A run without steps is shown as such.
    """

    def __init__(
        self, run: str, against: str | None = None, trace: str | None = None, port: int = 0
    ):
        self._readers = readers(run, against, trace)
        self._script = javascript()
        self._timelines: dict[tuple[Path, float], Timeline | None] = {}
        self._reading = threading.Lock()
        try:
            super().__init__((HOST, port), _PageHandler)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be used on {HOST} ({error.strerror}); leave it out for a "
                "free one"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a client that has closed its connection, as a page that is left does."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def content(self) -> tuple[str, PageContent]:
        """Return what the page shows now, and its version."""
        with self._reading:
            try:
                runs = distinct([reader.read() for reader in self._readers])
            except ConfigError as error:
                body = f"<header><p>{escape(str(error))}</p></header>"
                return f'"{abs(hash(body))}"', PageContent("hf-zero report", body, {})
            traces = [_identity(run) for run in runs]
            version = "-".join(f"{run.updated}-{len(run.steps)}" for run in runs)
            self._timelines = {
                trace: self._timelines.get(trace) or _timeline(run)
                for run, trace in zip(runs, traces)
                if trace is not None
            }
            timelines = [None if trace is None else self._timelines[trace] for trace in traces]
            return f'"{version}-{abs(hash((*traces,)))}"', content(runs, timelines)

    def page(self) -> str:
        """Return the page as it is now."""
        version, shown = self.content()
        attributes = f" data-refresh='{REFRESH_SECONDS}' data-version='{version}'"
        return page(shown, self._script, attributes)


def _identity(run: RecordedRun) -> tuple[Path, float] | None:
    if run.trace is None:
        return None
    try:
        return run.trace, os.path.getmtime(run.trace)
    except OSError:
        return None  # removed since the run was read


def _timeline(run: RecordedRun) -> Timeline | None:
    try:
        return timeline(run)
    except ConfigError:
        return None  # it is being written; the page has the other sections


class _PageHandler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Answer with the page, or with what has changed in it."""
        # Of a browser that reached it through another port, as ssh forwards it, too; not of a site
        # whose name leads here.
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", self.server.page(), None)
        elif self.path == UPDATES:
            version, shown = self.server.content()
            if self.headers.get("If-None-Match") == version:
                self.send_response(HTTPStatus.NOT_MODIFIED)
                self.end_headers()
            else:
                self._answer("application/json", json.dumps(asdict(shown)), version)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, text: str, version: str | None) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        if version is not None:
            self.send_header("ETag", version)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the page asks every few seconds."""

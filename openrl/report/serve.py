"""Serves a report that refreshes by itself, to this machine only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from openrl.errors import UserError
from openrl.report.page import build_page, escaped
from openrl.report.rollouts import Pieces, data_url, images_in, in_full
from openrl.report.run import read_run
from openrl.trace.reader import Trace

HOST = "127.0.0.1"
READ = ("metrics.jsonl", "summary.json", "config.yaml", "trace/index.jsonl")


@dataclass
class LiveReport:
    """The report on runs that may go on. A page is built again once a file has changed."""

    directories: Sequence[Path]
    _lock: Lock = field(default_factory=Lock)
    _page: tuple[str, str] | None = None  # stamp, page

    def stamp(self) -> str:
        """Return a text that changes when a run has written something."""
        paths = (directory / name for directory in self.directories for name in READ)
        return "-".join(str(path.stat().st_mtime_ns) for path in paths if path.is_file())

    def page(self) -> str:
        with self._lock:
            stamp = self.stamp()
            if self._page is None or self._page[0] != stamp:
                runs = [read_run(directory) for directory in self.directories]
                self._page = stamp, build_page(runs, served=True)
            return self._page[1]

    def trajectory(self, run: int, step: int, number: int) -> str:
        """Return a trajectory that the page does not hold, with the texts of its own tokens and its
        images, as JSON. Raises UserError if there is none."""
        if not 0 <= run < len(self.directories):
            raise UserError(f"there is no run {run}", "one that the page names")
        trace, pieces = Trace(self.directories[run]), Pieces()
        record = in_full(trace.trajectory(step, number), pieces)
        images = {name: data_url(trace.image(name)) for name in {*images_in(record)}}
        return escaped(record | {"pieces": pieces.texts, "image_data": images})


class Handler(BaseHTTPRequestHandler):
    """Answers the page, its stamp and single trajectories."""

    def __init__(self, report: LiveReport, *args: object) -> None:
        self.report = report
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (HOST, "localhost"):  # a foreign name that was made to point here
            self._answer(403, "text/plain", "this page is for this machine")
            return
        url = urlsplit(self.path)
        try:
            if url.path == "/":
                self._answer(200, "text/html", self.report.page())
            elif url.path == "/stamp":
                self._answer(200, "text/plain", self.report.stamp())
            elif url.path == "/trajectory":
                query = parse_qs(url.query)
                place = [int(query[name][0]) for name in ("run", "step", "number")]
                self._answer(200, "application/json", self.report.trajectory(*place))
            else:
                self._answer(404, "text/plain", "there is nothing here")
        except (UserError, OSError, KeyError, ValueError) as error:
            self._answer(404, "application/json", json.dumps({"error": str(error)}))

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line in the terminal."""


def start_server(report: LiveReport, port: int) -> ThreadingHTTPServer:
    """Return a server of the report, bound but not yet serving. Raises UserError if the port is
    taken."""
    try:
        return ThreadingHTTPServer((HOST, port), partial(Handler, report))
    except OSError as error:
        message = f"--port {port} on {HOST} cannot be bound: {error.strerror}"
        raise UserError(message, "another --port; 0 takes any free one") from error

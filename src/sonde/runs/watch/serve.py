"""Serves the reports of runs that are being written, on this machine alone and to who knows the address."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from sonde.runs.names import names_apart
from sonde.runs.report.how_measured import how_measured
from sonde.runs.report.page import check_bokeh, drawing, part_of_page, whole_page
from sonde.runs.report.write import report_sections, said_first
from sonde.runs.watch.follow import FollowedRun

_HOST = "127.0.0.1"


class Site(ThreadingHTTPServer):
    """A server of one page.

    Args:
        runs: what the page shows.
        port: 0 for a free one.

    Raises:
        ValueError: when the port cannot be used.
        ImportError: without the `bokeh` package.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[FollowedRun], port: int = 0) -> None:
        check_bokeh()
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"--port {port} cannot be used ({why}): leave --port out for a free one") from None
        self.token = secrets.token_urlsafe(24)
        self.runs = {str(k): run for k, run in enumerate(runs)}
        self._drawing = threading.Lock()  # Bokeh's theme and its settings are shared by all threads
        self._drawn: dict[str, dict[str, Any]] = {}
        """By the run's number."""
        self.page = whole_page(
            [], template="watch/watch.html", scripts=("report/page.js", "watch/watch.js"), name="sonde watch"
        )

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{_HOST}:{self.server_port}/?token={self.token}"

    def news(self, number: str, seen: str) -> dict[str, Any]:
        """What a page says of a run before its figures; the runs alone if it has seen the newest version."""
        shown, names = self.runs[number], names_apart([each.run for each in self.runs.values()])
        rows = [(*each, number == each[0]) for each in zip(self.runs, names, self.runs.values(), strict=True)]
        bar = part_of_page("watch/watch.html", "bar", rows=rows, shown=shown, token=self.token)
        news = {"version": shown.version, "title": f"{names[int(number)]}: {shown.badges}", "bar": bar}
        if seen != str(shown.version):
            news["top"] = part_of_page("report/page.html", "top", **said_first(shown.run))
        return news

    def figures(self, number: str) -> dict[str, Any]:
        """Figures and tables of a run. Several pages share them."""
        version, run = self.runs[number].version, self.runs[number].run
        with self._drawing:
            if self._drawn.get(number, {}).get("version") != version:
                sections = [] if run.is_empty else report_sections(run)
                rest = part_of_page("report/page.html", "rest", sections=sections, rows=how_measured(run))
                self._drawn[number] = {"version": version, "rest": rest, **drawing(sections)}
            return self._drawn[number]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a browser that has gone away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds in which a request must have arrived
    server_version, sys_version = "sonde", ""

    def do_GET(self) -> None:
        """Answer who calls this machine by its own name and knows the token: with the page, or with news of a run."""
        site, url = cast(Site, self.server), urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        before, _, after = self.headers.get("Host", "").rpartition(":")
        token = query.get("token", "").encode("utf-8", "replace")
        # Another name of this machine is one that another site has pointed here. How long the comparison takes says
        # nothing about the token.
        if (before or after) not in (_HOST, "localhost") or not hmac.compare_digest(token, site.token.encode()):
            self._answer("Open the address that sonde watch has printed, with its token.", HTTPStatus.FORBIDDEN)
        elif url.path == "/":
            self._answer(site.page, kind="text/html")
        elif url.path in ("/news", "/figures") and (run := query.get("run", "")) in site.runs:
            found = site.figures(run) if url.path == "/figures" else site.news(run, query.get("seen", ""))
            self._answer(json.dumps(found), kind="application/json")
        else:
            self._answer("There is no such page.", HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, status: HTTPStatus = HTTPStatus.OK, *, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the address has the token
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal shows the runs."""


@contextlib.contextmanager
def served(runs: Sequence[FollowedRun], port: int = 0) -> Iterator[Site]:
    """A site that answers in a thread of its own until the end of the block. Arguments are those of `Site`."""
    with Site(runs, port) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        try:
            yield site
        finally:
            site.shutdown()

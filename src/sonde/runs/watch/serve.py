"""Serves the reports of runs that are being written, on this machine alone and to who knows the address."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from sonde.runs.report.how_measured import how_measured
from sonde.runs.report.page import check_bokeh, live_part, part_of_page, whole_page
from sonde.runs.report.write import report_sections, said_first
from sonde.runs.watch.follow import FollowedRun

_HOST = "127.0.0.1"
_OWN_NAMES = (_HOST, "localhost")
"""What a browser calls this machine. Another name in a request is one that another site has pointed here."""
_SHARE = 0.2
"""Largest part of the time in which the figures of a run are drawn anew."""


class Shown:
    """What the page shows of one run. It is made when a page asks for it.

    Args:
        followed: the run.
    """

    def __init__(self, followed: FollowedRun) -> None:
        self.followed = followed
        self._rest: dict[str, Any] = {}
        self._due = 0.0
        """When figures may be drawn again."""

    def in_list(self) -> dict[str, str]:
        """The line of the run in the list of runs."""
        followed = self.followed
        badges = ", ".join(panel.badge for panel in followed.panels) or "No reading yet"
        live = followed.liveness
        return {"name": followed.run.name, "badges": badges, "live": live, "problem": followed.problem}

    def first(self) -> dict[str, Any]:
        """What the page says before its figures."""
        version = self.followed.version
        return {"version": version, "html": part_of_page("top", **said_first(self.followed.run))}

    def rest(self) -> dict[str, Any]:
        """Figures and tables: not the newest ones until the share of time allows it."""
        version, began = self.followed.version, time.monotonic()
        if self._rest.get("version") != version and began >= self._due:
            run = self.followed.run
            sections = [] if run.is_empty else report_sections(run)
            self._rest = {"version": version, **live_part(sections, rows=how_measured(run))}
            self._due = time.monotonic() + (time.monotonic() - began) / _SHARE
        return self._rest


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
        self.shown = {str(k): Shown(run) for k, run in enumerate(runs)}
        self.drawing = threading.Lock()  # Bokeh's theme and its settings are shared by all threads
        self.page = whole_page(
            [], template="watch/watch.html", scripts=("report/page.js", "watch/watch.js"), name="sonde watch"
        )

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{_HOST}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a browser that has gone away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds in which a request must have arrived
    server_version, sys_version = "sonde", ""

    def do_GET(self) -> None:
        """Answer who calls this machine by its own name and knows the token.

        /news has the list of runs and what a page says first, /figures what takes long to draw: of the run with this
        number from 0, if it is newer than the version that was `seen`.
        """
        site, url = cast(Site, self.server), urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        shown, seen = site.shown.get(query.get("run", "")), query.get("seen", "")
        before, _, after = self.headers.get("Host", "").rpartition(":")
        token = query.get("token", "").encode("utf-8", "replace")
        # How long the comparison takes says nothing about the token.
        if (before or after) not in _OWN_NAMES or not hmac.compare_digest(token, site.token.encode()):
            self._answer("Open the address that sonde watch has printed, with its token.", HTTPStatus.FORBIDDEN)
        elif url.path == "/":
            self._answer(site.page, kind="text/html")
        elif url.path == "/news" and shown:
            first = None if seen == str(shown.followed.version) else shown.first()
            self._answer_json(runs=[each.in_list() for each in site.shown.values()], first=first)
        elif url.path == "/figures" and shown:
            with site.drawing:
                rest = shown.rest()
            self._answer_json(rest=None if seen == str(rest["version"]) else rest)
        else:
            self._answer("There is no such page.", HTTPStatus.NOT_FOUND)

    def _answer_json(self, **values: Any) -> None:
        self._answer(json.dumps(values), kind="application/json")

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

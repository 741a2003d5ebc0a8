"""Serves the reports of runs that are being written, on this machine alone and to who knows the address."""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from sonde.runs.report.how_measured import how_measured
from sonde.runs.report.page import check_bokeh, figures_of, in_one_document, part_of_page, whole_page
from sonde.runs.report.write import report_sections, said_first
from sonde.runs.watch.follow import FollowedRun
from sonde.runs.watch.terminal import liveness, panels

_HOST = "127.0.0.1"
_OWN_NAMES = (_HOST, "localhost")
"""What a browser calls this machine. Another name in a request is one that another site has pointed here."""
_SHARE = 0.2
"""Largest part of the time in which the figures of a run are drawn anew."""
_SECONDS = 10
"""How long a request may take to arrive."""


class Shown:
    """What the page shows of one run. It is made when a page asks for it, and only if something has changed.

    Args:
        followed: the run.
    """

    def __init__(self, followed: FollowedRun) -> None:
        self.followed = followed
        self._first: dict[str, Any] = {}
        self._rest: dict[str, Any] = {}
        self._due = 0.0
        """When figures may be drawn again."""

    def in_list(self) -> dict[str, str]:
        """The line of the run in the list of runs."""
        followed = self.followed
        badges = [panel.badge for panel in panels(followed)] or ["No reading yet"]
        name = followed.run.name
        return {"name": name, "badges": ", ".join(badges), "live": liveness(followed), "problem": followed.problem}

    def first(self) -> dict[str, Any]:
        """What the page says before its figures."""
        version = self.followed.version
        if self._first.get("version") != version:
            html = part_of_page("top", **said_first(self.followed.run))
            self._first = {"version": version, "html": html}
        return self._first

    def rest(self) -> dict[str, Any]:
        """Figures and tables, for `Bokeh.embed.embed_items`; not the newest until the share of time allows it."""
        version, began = self.followed.version, time.monotonic()
        if self._rest.get("version") != version and began >= self._due:
            run = self.followed.run
            sections = [] if run.is_empty else report_sections(run)
            figures = figures_of(sections)
            divs = (f'<div id="of-{each.id}" data-root-id="{each.id}"></div>' for each in figures)
            self._rest = {
                "version": version,
                "html": part_of_page("rest", sections=sections, rows=how_measured(run), next_div=_markup(divs)),
                "document": in_one_document(figures).to_json(deferred=False),
                "roots": {each.id: f"of-{each.id}" for each in figures},
            }
            self._due = time.monotonic() + (time.monotonic() - began) / _SHARE
        return self._rest


def _markup(divs: Any) -> Any:
    from markupsafe import Markup

    return lambda: Markup(next(divs))


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

    def __init__(self, runs: Sequence[FollowedRun], *, port: int = 0) -> None:
        check_bokeh()
        if not 0 <= port < 2**16:
            raise ValueError(f"a port is a number from 0 to 65535, got {port}: leave --port out for a free one")
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise ValueError(f"port {port} of {_HOST} cannot be used, {why}: leave --port out for a free one") from None
        self._token = secrets.token_urlsafe(24)
        self._shown = {str(k): Shown(run) for k, run in enumerate(runs)}
        self._drawing = threading.Lock()  # one page is drawn at a time: Bokeh's models are shared by threads
        self.page = whole_page(
            [], template="watch/watch.html", scripts=("report/page.js", "watch/watch.js"), name="sonde watch"
        )

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{_HOST}:{self.server_port}/?token={self._token}"

    def knows(self, token: str) -> bool:
        """Whether this is the token of the address. How long the answer takes says nothing of it."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())

    def news(self, run: str, *, first: str, rest: str) -> dict[str, Any] | None:
        """What a page does not show yet.

        Args:
            run: the one that the page shows, by its number from 0.
            first: version of what it says first.
            rest: version of its figures.

        Returns:
            JSON values; None if there is no such run.
        """
        if (shown := self._shown.get(run)) is None:
            return None
        with self._drawing:
            newest = {"first": shown.first(), "rest": shown.rest()}
            seen = {"first": first, "rest": rest}
            news = {name: part if str(part["version"]) != seen[name] else None for name, part in newest.items()}
            return news | {"runs": [each.in_list() for each in self._shown.values()]}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    server_version = "sonde"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer who calls this machine by its own name and knows the token."""
        site = cast(Site, self.server)
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        host = self.headers.get("Host", "").rpartition(":")
        if (host[0] or host[2]) not in _OWN_NAMES or not site.knows(query.get("token", "")):
            self._answer("Open the address that sonde watch has printed, with its token.", HTTPStatus.FORBIDDEN)
        elif url.path == "/":
            self._answer(site.page, kind="text/html")
        elif url.path == "/news" and (
            news := site.news(query.get("run", ""), first=query.get("first", ""), rest=query.get("rest", ""))
        ):
            self._answer(json.dumps(news), kind="application/json")
        else:
            self._answer("There is no such page.", HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, status: HTTPStatus = HTTPStatus.OK, *, kind: str = "text/plain") -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",  # the address has the token
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal shows the runs."""

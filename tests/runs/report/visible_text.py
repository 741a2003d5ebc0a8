"""The text of a report as a reader sees it."""

from __future__ import annotations

import html
import re
from pathlib import Path


def visible_text(report: Path) -> str:
    """The text of the page without scripts and styles. A space takes the place of each tag, and spaces are single."""
    page = report.read_text(encoding="utf-8")
    body = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())

"""The documentation as a site: it builds without a warning, and has every page and every public name."""

from __future__ import annotations

import html
import re
from collections import Counter
from pathlib import Path

import pytest

import sonde
from tests.docs_blocks import DOCS, ROOT
from tests.site.conftest import AS_MAKE_DOES


def test_make_builds_it_in_the_same_way() -> None:
    (recipe,) = re.findall(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.M)
    assert " ".join(AS_MAKE_DOES) in recipe


@pytest.mark.slow
def test_every_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    index = (site / "docs" / "index.html").read_text()
    for page in (*DOCS.glob("*.md"), *DOCS.glob("api/*.rst"), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"):
        path = page.relative_to(ROOT).with_suffix(".html")
        assert (site / path).is_file(), page
        if page.stem != "index":
            assert f'href="{path.relative_to("docs") if path.parts[0] == "docs" else f"../{path}"}"' in index, page
    assert 'url=docs/index.html"' in (site / "index.html").read_text()


@pytest.mark.slow
def test_every_public_name_is_in_the_reference_once(site: Path) -> None:
    found = Counter(name for page in site.glob("docs/api/*.html") for name in documented(page.read_text()))
    assert {name: n for name, n in found.items() if n > 1} == {}
    assert {name for name in found if name.count(".") == 1} == {f"sonde.{name}" for name in sonde.__all__}


def documented(page: str) -> list[str]:
    """Names of the functions, classes and data that a page describes."""
    return re.findall(r'<dt class="sig sig-object py" id="([\w.]+)"', page)


@pytest.mark.slow
def test_docstrings_are_shown_in_parts(site: Path) -> None:
    """Google's sections become lists, a reference its own paragraph, and an example a block of code."""
    page = (site / "docs" / "api" / "batch-size.html").read_text()
    for part in ("Parameters", "Returns", "Raises", "Attributes"):
        assert re.search(rf'<dt class="field-(odd|even)">{part}<', page), part
    assert re.search(r'<p class="rubric">Reference</p>\s*<p>McCandlish', page)
    assert re.search(r'<p class="rubric">Example</p>\s*<div class="doctest highlight', page)
    for api in site.glob("docs/api/*.html"):
        text = api.read_text()
        left = re.findall(r"<p>(?:Args|Returns|Raises|Yields|Attributes|Example|Reference):", text)
        assert left == [], api.name
        assert not re.search(r"<p>[^<]*&gt;&gt;&gt; ", text), api.name


@pytest.mark.slow
def test_every_command_is_on_the_page_of_commands(site: Path) -> None:
    from sonde.cli import COMMANDS

    page = (site / "docs" / "api" / "commands.html").read_text()
    for name in COMMANDS:
        assert f"usage: sonde {name} [-h]" in page


@pytest.mark.slow
def test_every_metric_is_on_the_page_of_metrics(site: Path) -> None:
    """With its unit and meaning, which are those of the log's header."""
    page = html.unescape((site / "docs" / "api" / "metrics.html").read_text())
    shown = re.sub(r"<[^>]+>", "", page).replace("’", "'")  # Sphinx sets apostrophes
    for name in sonde.__all__:
        for metric, of in getattr(getattr(sonde, name), "METRICS", {}).items():
            assert metric in shown
            assert of.meaning in shown, metric


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(\w+:)?//', page.read_text())
        assert loaded == [], page

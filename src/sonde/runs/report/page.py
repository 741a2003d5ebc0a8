"""One HTML file that needs nothing else, from sections, panels and texts; what it says is decided elsewhere.

Every text of the user is escaped, and only the page's own three scripts may run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from sonde.runs.report.how_measured import cut
from sonde.version import __version__, install_hint

GENERATOR = '<meta name="generator" content="sonde '
"""A report contains this text. Other HTML files do not."""


def check_bokeh() -> None:
    """Refuse to begin without the package that draws the figures.

    Raises:
        ImportError: without `bokeh`.
    """
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the report needs bokeh: {install_hint('report')}") from error


def whole_page(
    sections: Sequence[Any],
    *,
    template: str = "report/page.html",
    scripts: Sequence[str] = ("report/page.js",),
    **values: Any,
) -> str:
    """The page with these sections.

    Args:
        sections: `figures.Section`s, in order.
        template: of the page, a path in `runs`.
        scripts: what runs before the figures are drawn, paths in `runs`.
        **values: `name`, `subject`, `facts`, `panels`, `rows` and what else `page.html` shows.
    """
    # Here, since Bokeh and Jinja2 are an extra, and only the page needs them.
    from bokeh.resources import Resources
    from markupsafe import Markup

    drawn = drawing(sections)
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn", minified=True).js_raw)
    as_json = json.dumps(drawn).replace("<", "\\u003c")  # text of the user cannot end the script
    codes = [bokeh, *map(_text, scripts), f"drawFigures({as_json})" if drawn["roots"] else ""]
    page = _templates().get_template(template)
    rendered: str = page.render(
        version=__version__,
        hashes=Markup(" ".join(map(_hash, codes))),
        style=Markup(_text("report/page.css")),
        scripts=[Markup(code) for code in codes],
        sections=sections,
        **values,
    )
    return rendered


def part_of_page(template: str, block: str, **values: Any) -> str:
    """A block of a template.

    Args:
        template: a path in `runs`.
        block: its name.
        **values: as for the whole page.
    """
    found = _templates().get_template(template)
    return "".join(found.blocks[block](found.new_context(values)))


def drawing(sections: Sequence[Any]) -> dict[str, Any]:
    """The figures of sections for `drawFigures` in page.js: Bokeh's document, and the place of each figure."""
    from bokeh.document import Document

    from sonde.runs.report.figures import Plot

    plots = [part for section in sections for part in section.content if isinstance(part, Plot)]
    figures = [figure for plot in plots for figure in plot.figures]
    document = Document()
    with document.models.freeze():  # otherwise Bokeh walks through all figures after each of them
        for each in figures:
            document.add_root(each)
    return {"figures": document.to_json(deferred=False), "roots": {each.id: f"of-{each.id}" for each in figures}}


def _text(name: str) -> str:
    return (files("sonde.runs") / name).read_text(encoding="utf-8")


@functools.cache
def _templates() -> Any:
    """Jinja's environment. All texts are escaped."""
    from jinja2 import Environment, FunctionLoader
    from markupsafe import Markup

    def formula(text: str) -> Markup:
        """B_crit, S_min and similar names get subscripts, and no line ends within a number."""
        whole = str(Markup.escape(text)).replace(" × 10", "\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}10")
        return Markup(re.sub(r"\b([BSEV])_(simple|crit|noise|min|[EUXY])\b", r"\1<sub>\2</sub>", whole))

    environment = Environment(autoescape=True, loader=FunctionLoader(_text))
    environment.filters.update(formula=formula, cut=cut)
    return environment


def _hash(script: str) -> str:
    """The source expression with which a Content-Security-Policy admits this one inline script."""
    digest = hashlib.sha256(script.encode("utf-8", "replace")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def check_target(target: Path) -> None:
    """Refuse to replace anything but an older report.

    Raises:
        ValueError: when `target` is a folder, or a file that is not a report.
    """
    if target.is_dir():
        raise ValueError(
            f"the report is one file, got the folder {target}: give a file name such as {target / 'report.html'}"
        )
    if target.exists():
        with target.open("rb") as file:
            beginning = file.read(1000)
        if GENERATOR.encode() not in beginning:
            raise ValueError(
                f"{target} exists and is not a report of sonde, so nothing was written: choose another file name"
            )


def write_page(target: Path, page: Callable[[], str]) -> Path:
    """Write a page: one HTML file that opens in any browser.

    Args:
        target: the file. An older report is replaced in one step. Any other file is left alone.
        page: makes the whole page.

    Returns:
        The file that was written.

    Raises:
        ValueError: when `target` exists and is not a report.
        ImportError: without the `bokeh` package.
    """
    check_bokeh()
    check_target(target)
    write_in_one_step(target, page())
    return target


def write_in_one_step(target: Path, text: str) -> None:
    """Write the file so that a reader sees the old report or the new report, never half of a report."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(text.encode("utf-8", "replace"))  # a name may contain lone surrogates
        unfinished.replace(target)
    except OSError as error:
        raise OSError(error.errno, f"it could not be written: {error.strerror}", str(target)) from error
    finally:
        unfinished.unlink(missing_ok=True)

"""One HTML file that needs nothing else, from sections, panels and texts; what it says is decided elsewhere.

Every text of the user is escaped, and only the page's own three scripts may run.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Sequence
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


def whole_page(sections: Sequence[Any], **values: Any) -> str:
    """The page with these sections.

    Args:
        sections: `figures.Section`s, in order.
        **values: `name`, `subject`, `facts`, `panels`, `rows` and what else `page.html` shows.
    """
    # Here, since Bokeh and Jinja2 are an extra, and only the page needs them.
    from bokeh.resources import Resources
    from markupsafe import Markup

    from sonde.runs.report.figures import Plot

    plots = [part for section in sections for part in section.content if isinstance(part, Plot)]
    drawing, divs = _drawn([figure for plot in plots for figure in plot.figures])
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn", minified=True).js_raw)
    folder = files("sonde.runs.report")
    page, style, keys = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    scripts = [bokeh, drawing, keys]
    places = iter(divs)
    return _rendered(
        page,
        version=__version__,
        hashes=Markup(" ".join(map(_hash, scripts))),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        sections=sections,
        next_div=lambda: Markup(next(places)),
        **values,
    )


def _rendered(page: str, **values: Any) -> str:
    """The page with these values. All texts are escaped."""
    from jinja2 import Environment
    from markupsafe import Markup

    def formula(text: str) -> Markup:
        """B_crit, S_min and similar names get subscripts, and no line ends within a number."""
        whole = str(Markup.escape(text)).replace(" × 10", "\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}10")
        return Markup(re.sub(r"\b([BSEV])_(simple|crit|noise|min|[EUXY])\b", r"\1<sub>\2</sub>", whole))

    environment = Environment(autoescape=True)
    environment.filters.update(formula=formula, cut=cut)
    return environment.from_string(page).render(values)


def _drawn(figures: Sequence[Any]) -> tuple[str, Sequence[str]]:
    """The script that draws all figures, and the HTML of each one's place."""
    from bokeh.document import Document
    from bokeh.embed import components

    if not figures:
        return "", ()
    document = Document()
    with document.models.freeze():  # otherwise Bokeh walks through all figures after each of them
        for each in figures:
            document.add_root(each)
    script, divs = components(figures, wrap_script=False)
    return script, divs


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


def write_in_one_step(target: Path, text: str) -> None:
    """Write the file so that a reader sees the old report or the new report, never half of a report."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(text.encode("utf-8", "replace"))  # a name may contain lone surrogates
        unfinished.replace(target)
    except OSError as error:
        raise OSError(error.errno, f"the report could not be written: {error.strerror}", str(target)) from error
    finally:
        unfinished.unlink(missing_ok=True)

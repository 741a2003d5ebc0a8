"""Writes the report of a run: one HTML file that needs nothing else, which says first what to do.

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

from sonde.runs.reader import read_run
from sonde.runs.report.how_measured import cut, how_measured
from sonde.runs.report.verdicts import failed_checks, position_text, verdict_panels
from sonde.runs.run import Run
from sonde.version import __version__, install_hint
from sonde.wording import duration, moment, plural

GENERATOR = '<meta name="generator" content="sonde '
"""A report contains this text. Other HTML files do not."""


def write_report(run_path: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run.

    Args:
        run_path: the run's folder, or its `.jsonl` file.
        out: the file to write; `report.html` beside the log by default. An older report is replaced in one step.
            Any other file is left alone.

    Returns:
        The file that was written.

    Raises:
        FileNotFoundError: when there is no such run.
        ValueError: when the file is not the log of a run, the log holds no reading yet, or `out` exists and is not a
            report.
        ImportError: without the `bokeh` package.
    """
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the report needs bokeh: {install_hint('report')}") from error
    run = read_run(run_path)
    if run.is_empty:
        every = run.probe("reading").setup.get("log_every") or "few"
        raise ValueError(
            f"{run.path} holds no reading yet, expected at least one (a run writes one every {every} windows and at "
            "its end): let the run continue, then try again"
        )
    target = run.path.parent / "report.html" if out is None else Path(out)
    _check_target(target)
    _write_in_one_step(target, render_page(run))
    return target


def render_page(run: Run) -> str:
    """The whole page of a run in which something was measured."""
    # Here, since Bokeh and Jinja2 are an extra, and only the page needs them.
    from bokeh.resources import Resources
    from markupsafe import Markup

    from sonde.runs.report.comparison_section import comparison_sections
    from sonde.runs.report.figures import Plot
    from sonde.runs.report.policy_sections import policy_sections
    from sonde.runs.report.sections import declared_sections, noise_scale_sections

    sections = [
        *(noise_scale_sections(run) if run.readings else []),
        *(policy_sections(run) if run.policy else []),
        *comparison_sections(run),
        *declared_sections(run),
    ]
    plots = [part for section in sections for part in section.content if isinstance(part, Plot)]
    drawing, divs = _drawn([figure for plot in plots for figure in plot.figures])
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn", minified=True).js_raw)
    folder = files("sonde.runs.report")
    page, style, keys = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    scripts = [bokeh, drawing, keys]
    subjects = ["batch size and gradient noise"] if run.readings else []
    subjects += ["entropy of the policy"] if run.policy or run.comparisons else []
    places = iter(divs)
    panels = verdict_panels(run)
    said = tuple(panel.headline.removesuffix(".").lower() for panel in panels)
    # What a later reading found right again needs nothing done, and what a verdict says is not said twice.
    alerts = [f for f in failed_checks(run) if not (f.is_over or f.message.lower().startswith(said))]

    return _rendered(
        page,
        version=__version__,
        hashes=Markup(" ".join(map(_hash, scripts))),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        name=cut(run.name, 200),
        subject=", ".join(subjects or [section.title for section in sections]),
        facts=_facts(run),
        torn=run.torn,
        alerts=alerts,
        more_alerts=plural(max(len(alerts) - 5, 0), "more alert"),
        panels=panels,
        sections=sections,
        next_div=lambda: Markup(next(places)),
        rows=how_measured(run),
    )


def _rendered(page: str, **values: Any) -> str:
    """The page with these values. All texts are escaped."""
    from jinja2 import Environment
    from markupsafe import Markup

    def formula(text: str) -> Markup:
        """B_crit, S_min and similar names get subscripts, and no line ends within a number."""
        whole = str(Markup.escape(text)).replace(" × 10", "\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}10")
        return Markup(re.sub(r"\b([BSEV])_(simple|crit|min|[EUXY])\b", r"\1<sub>\2</sub>", whole))

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


def _facts(run: Run) -> list[str]:
    began, last = run.headers[0].time, run.last
    facts = [f"Started {moment(began)}", f"last reading {duration(max(last.time - began, 0))} later"]
    facts.append(position_text(last, run.probe("reading").unit))
    if len(run.headers) > 1:
        facts.append(f"restarted {plural(len(run.headers) - 1, 'time')}")
    if run.earlier_runs:
        facts.append(f"{plural(run.earlier_runs, 'earlier run')} in the same folder left out")
    facts.append("ended" if run.ended is not None else "no end recorded: the run is still going on, or it was cut off")
    return facts


def _check_target(target: Path) -> None:
    """Refuse to replace anything but an older report."""
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


def _write_in_one_step(target: Path, text: str) -> None:
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

"""The report as HTML: every text of the user is escaped, and only the page's own two scripts may run."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import chain
from string import Template

from bokeh.document import Document
from bokeh.embed import components
from bokeh.plotting import figure
from bokeh.resources import Resources

from sonde.runs.policy_reading import PolicyReading
from sonde.runs.reader import Alert, Reading, Run
from sonde.runs.report.figures import LegendEntry, Mark, Plot, Table
from sonde.runs.report.how_measured import Row, cut, how_measured
from sonde.runs.report.policy_sections import policy_sections
from sonde.runs.report.sections import Section, declared_sections, noise_scale_sections
from sonde.runs.report.timeline import place_in_words, position_text
from sonde.runs.report.verdicts import VerdictPanel, verdict_panels
from sonde.version import __version__
from sonde.wording import duration, moment, plural

_MAX_ALERTS = 5


def render_page(run: Run) -> str:
    """The whole page of a run in which something was measured."""
    sections = [
        *(noise_scale_sections(run) if run.readings else []),
        *(policy_sections(run) if run.policy else []),
        *declared_sections(run),
    ]
    figures = [f for section in sections for plot in section.content if isinstance(plot, Plot) for f in plot.figures]
    script, divs = _scripts(figures)
    remaining_divs = iter(divs)
    body = [
        _head(run),
        *map(_verdict, verdict_panels(run)),
        _alerts(run),
        *(_section(section, remaining_divs) for section in sections),
        _how_measured(how_measured(run)),
    ]
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn", minified=True).js_raw)
    folder = files("sonde.runs.report")
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        version=escape(__version__),
        title=escape(f"{cut(run.name, 200)}: {_subject(run)}"),
        script_hashes=" ".join(map(_hash, (bokeh, script))),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        body="\n".join(filter(None, body)),
        bokeh=bokeh,
        figures=script,
    )


def _scripts(figures: Sequence[figure]) -> tuple[str, Sequence[str]]:
    """The script that draws all figures, and the HTML of each one's place."""
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


def _subject(run: Run) -> str:
    subjects = ["batch size and gradient noise"] if run.readings else []
    subjects += ["entropy of the policy"] if run.policy else []
    return ", ".join(subjects or [section.title for section in declared_sections(run)])


def _head(run: Run) -> str:
    began, last = run.headers[0].time, run.last
    facts = [f"Started {moment(began)}", f"last reading {duration(max(last.time - began, 0))} later"]
    facts.append(position_text(last, run.probe("reading").unit))
    if len(run.headers) > 1:
        facts.append(f"restarted {plural(len(run.headers) - 1, 'time')}")
    if run.earlier_runs:
        facts.append(f"{plural(run.earlier_runs, 'earlier run')} in the same folder left out")
    facts.append("ended" if run.ended is not None else "no end recorded: the run is still going on, or it was cut off")
    subject = _subject(run)
    brand = escape(subject[:1].upper() + subject[1:])
    torn = f'<p class="facts">{escape(run.torn[:1].upper() + run.torn[1:])}.</p>' if run.torn else ""
    return (
        f'<header>\n<p class="brand">{brand}</p>\n<h1>{escape(cut(run.name, 200))}</h1>\n'
        f'<p class="facts">{escape(" · ".join(facts))}</p>{torn}\n</header>'
    )


def _verdict(panel: VerdictPanel) -> str:
    tiles = "\n".join(
        f'<li><span class="name">{escape(tile.name)}</span><span class="value">{escape(tile.value)}</span>'
        f'<span class="note">{escape(tile.note)}</span></li>'
        for tile in panel.tiles
    )
    return (
        f'<section class="verdict {panel.kind}">\n<p class="badge">{panel.badge}</p>\n'
        f"<h2>{_formula(panel.headline)}</h2>\n<p>{_formula(panel.detail)}</p>\n"
        f'<p class="basis">{escape(panel.basis)}</p>\n<ul class="tiles">\n{tiles}\n</ul>\n</section>'
    )


def _alerts(run: Run) -> str:
    """What looks wrong now, then what looked wrong earlier. A check that keeps failing is listed once."""
    last_alerted: dict[str, int] = {}
    readings: list[Reading | PolicyReading] = [*run.readings, *run.policy]
    for reading in readings:
        last_alerted |= dict.fromkeys(reading.alerts, reading.window)
    failing = run.alerts_now
    now: list[tuple[str, str]] = []
    earlier: list[tuple[str, str]] = []
    for alerts in sorted(_alerts_by_name(run), key=lambda alerts: alerts[0].window):
        first, last = alerts[0], alerts[-1]
        if first.name in failing:
            now.append((failing[first.name], f"since {place_in_words(run, first.window)}"))
        elif _is_newer_than_readings(last, run):
            now.append((last.message, f"since {place_in_words(run, last.window)}"))
        else:
            earlier.append((first.message, place_in_words(run, first.window, last_alerted.get(first.name))))
    blocks = (
        _alert_list("Something looks wrong", now, css_class="alerts"),
        _alert_list("Something looked wrong earlier", earlier, css_class="alerts over"),
    )
    return "\n".join(filter(None, blocks))


def _alerts_by_name(run: Run) -> list[list[Alert]]:
    """The alerts of each check without those that a restart undid; all of them if it undid them all."""
    by_name: dict[str, list[Alert]] = {}
    for alert in run.alerts:
        by_name.setdefault(alert.name, []).append(alert)
    return [[a for a in each if not run.was_undone(a.segment, a.window)] or each for each in by_name.values()]


def _is_newer_than_readings(alert: Alert, run: Run) -> bool:
    """Whether no reading followed that could show that all is well again."""
    if alert.segment < len(run.headers) - 1:
        return False
    return run.last.segment < alert.segment or alert.window > run.last.window


def _alert_list(title: str, alerts: list[tuple[str, str]], *, css_class: str) -> str:
    if not alerts:
        return ""
    items = "\n".join(
        f'<li>{escape(cut(message, 500))} <span class="when">({escape(when)})</span></li>'
        for message, when in alerts[:_MAX_ALERTS]
    )
    hidden = len(alerts) - _MAX_ALERTS
    more = f"\n<li>The end of the page has {plural(hidden, 'more alert')}.</li>" if hidden > 0 else ""
    return f'<section class="{css_class}">\n<h2>{title}</h2>\n<ul>\n{items}{more}\n</ul>\n</section>'


def _section(section: Section, divs: Iterator[str]) -> str:
    text = f"<p>{_formula(section.text)}</p>\n" if section.text else ""
    content = "\n".join(_content(part, section.title, divs) for part in section.content)
    return f'<section class="report-section">\n<h2>{escape(section.title)}</h2>\n{text}{content}\n</section>'


def _formula(text: str) -> str:
    """Escaped text in which B_crit, S_min and similar names get subscripts."""
    return re.sub(r"\b([BSE])_(simple|crit|min)\b", r"\1<sub>\2</sub>", escape(text))


def _content(part: Plot | Table | str, title: str, divs: Iterator[str]) -> str:
    match part:
        case str():
            return f'<p class="absent">{escape(part)}</p>'
        case Table():
            return _table(part)
        case Plot():
            return _plot(part, title, divs)


def _table(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(text)}</td>" for text in others)}</tr>'
        for first, *others in table.rows
    )
    return (
        f'<div class="table"><table>\n<caption>{escape(table.caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _plot(plot: Plot, title: str, divs: Iterator[str]) -> str:
    entries = "".join(f"<li>{_swatch(entry)}<span>{_formula(entry.text)}</span></li>" for entry in plot.legend)
    legend = f'<ul class="legend">{entries}</ul>\n' if entries else ""
    tall = ' class="tall" tabindex="0"' if plot.height > 1000 else ""
    figures = "\n".join(next(divs) for _ in plot.figures)
    return f'{legend}<figure{tall} aria-label="{escape(title)}">\n{figures}\n</figure>'


_SWATCHES: dict[Mark, str] = {
    "line": '<path d="M0 7h24" stroke-width="2.5"/>',
    "dashed": '<path d="M0 7h24" stroke-width="2" stroke-dasharray="6 3"/>',
    "dotted": '<path d="M0 7h24" stroke-width="2" stroke-dasharray="2 3"/>',
    "bar": '<path d="M12 0v14" stroke-width="2"/>',
    "band": '<path d="M0 1h24v12H0z" fill-opacity=".18" stroke="none"/>',
    "hatched": '<path d="M0 1h24v12H0z" fill-opacity=".1" stroke-opacity=".2"/><path d="M2 13L12 1M10 13L20 1"/>',
    "dot": '<circle cx="12" cy="7" r="4.5" fill="#fff" stroke-width="2.5"/>',
    "whisker": '<path d="M0 7h24" stroke-width="4" stroke-opacity=".3"/><circle cx="12" cy="7" r="4.5" stroke="none"/>',
    "up": '<path d="M12 2l5 9H7z" stroke="none"/>',
    "down": '<path d="M12 12l5-9H7z" stroke="none"/>',
    "left": '<path d="M7 7l9 5V2z" stroke="none"/>',
    "right": '<path d="M17 7l-9 5V2z" stroke="none"/>',
    "cross": '<path d="M8 3l8 8M16 3l-8 8" stroke-width="1.5"/>',
}


def _swatch(entry: LegendEntry) -> str:
    shape = _SWATCHES[entry.mark]
    return f'<svg width="24" height="14" fill="{entry.color}" stroke="{entry.color}" aria-hidden="true">{shape}</svg>'


def _how_measured(rows: Iterable[Row]) -> str:
    items = "\n".join(f"<div><dt>{escape(row.term)}</dt><dd>{_paragraphs(row)}</dd></div>" for row in rows)
    return (
        '<section class="report-section">\n<h2>How this was measured</h2>\n'
        f'<dl class="how-measured">\n{items}\n</dl>\n</section>'
    )


def _paragraphs(row: Row) -> str:
    tag = "pre" if row.is_code else "p"
    return "".join(chain.from_iterable((f"<{tag}>", escape(text), f"</{tag}>") for text in row.paragraphs))

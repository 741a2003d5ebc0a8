"""The report as HTML: every word of a user's is escaped, and no script but the page's own two may run."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from itertools import chain
from string import Template

from bokeh.embed import components
from bokeh.resources import Resources

from sonde.runs.figures import Key, Mark, Plot
from sonde.runs.method import Row, cut, method_rows
from sonde.runs.reader import Reading, Run
from sonde.runs.timeline import position_text
from sonde.runs.topics import Topic, topics
from sonde.stats.critical_batch import Verdict, judge_batch, steps_and_examples
from sonde.version import __version__
from sonde.wording import count, duration, moment, number, plural

_BADGES = {
    "too_small": "Batch too small",
    "about_right": "Batch about right",
    "too_large": "Batch too large",
    "unknown": "No verdict yet",
}
_MAX_ALERTS = 5


def render_page(run: Run) -> str:
    """The whole page of a run that has at least one reading."""
    shown = topics(run)
    figures = [f for topic in shown for plot in topic.plots if isinstance(plot, Plot) for f in plot.figures]
    script, divs = components(figures, wrap_script=False) if figures else ("", ())
    placed = iter(divs)
    body = [
        _head(run),
        _verdict(run),
        _alerts(run),
        *(_topic(topic, placed) for topic in shown),
        _method(method_rows(run)),
    ]
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn", minified=True).js_raw)
    here = files("sonde.runs")
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        version=escape(__version__),
        title=escape(f"{cut(run.name, 200)}: batch size and gradient noise"),
        script_hashes=" ".join(map(_hash, (bokeh, script))),
        style=(here / "page.css").read_text(encoding="utf-8"),
        body="\n".join(filter(None, body)),
        bokeh=bokeh,
        figures=script,
    )


def _hash(script: str) -> str:
    """The source expression by which a Content-Security-Policy admits one inline script and no other."""
    digest = hashlib.sha256(script.encode("utf-8", "replace")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _head(run: Run) -> str:
    header, last = run.header, run.readings[-1]
    began = run.headers[0].time
    facts = [f"Started {moment(began)}", f"{duration(max(last.time - began, 0))} up to the last reading"]
    facts.append(position_text(last, header.unit))
    if len(run.headers) > 1:
        facts.append(f"restarted {plural(len(run.headers) - 1, 'time')}")
    facts.append("ended" if run.ended is not None else "no end recorded: still running, or cut off")
    torn = f'<p class="facts">{escape(run.torn[:1].upper() + run.torn[1:])}.</p>' if run.torn else ""
    return (
        f'<header>\n<p class="brand">Batch size and gradient noise</p>\n<h1>{escape(cut(run.name, 200))}</h1>\n'
        f'<p class="facts">{escape(" · ".join(facts))}</p>{torn}\n</header>'
    )


def _verdict(run: Run) -> str:
    unit, last = run.header.unit, run.readings[-1]
    verdict = _judge(last, unit)
    basis = f"Judged from the last reading: {position_text(last, unit)}."
    needed = last.metrics.get("gns/windows_needed")
    if needed:
        basis += f" The interval narrows to about ± 20 % after {plural(round(needed), 'more window')}."
    tiles = "\n".join(
        f'<li><span class="name">{escape(name)}</span><span class="value">{escape(value)}</span>'
        f'<span class="note">{escape(note)}</span></li>'
        for name, value, note in _tiles(last, unit)
    )
    return (
        f'<section class="verdict {verdict.kind}">\n<p class="badge">{_BADGES[verdict.kind]}</p>\n'
        f"<h2>{_formula(verdict.headline)}</h2>\n<p>{_formula(verdict.detail)}</p>\n"
        f'<p class="basis">{escape(basis)}</p>\n<ul class="tiles">\n{tiles}\n</ul>\n</section>'
    )


def _judge(last: Reading, unit: str) -> Verdict:
    batch, estimate = last.metrics.get("gns/units_per_window"), last.metrics.get("gns/b_simple")
    if not batch:
        return Verdict(
            "unknown", "No verdict yet: the batch size is not known.", f"{last.reason or 'No window was measured'}."
        )
    if last.status == "resolved" and not estimate:
        why = "All pieces of a window gave the same gradient: check that each gets data of its own."
        return Verdict("unknown", f"No verdict on the batch of {number(batch, 4)} {unit}: no noise was seen.", why)
    return judge_batch(
        batch,
        unit=unit,
        status=last.status,
        b_simple=estimate,
        low=last.metrics.get("gns/b_simple_low"),
        high=last.high,
        reason=last.reason,
    )


def _tiles(last: Reading, unit: str) -> Iterator[tuple[str, str, str]]:
    """Name, value and note of the four numbers behind the verdict."""
    batch, low = last.metrics.get("gns/units_per_window"), last.metrics.get("gns/b_simple_low")
    resolved = last.status == "resolved"
    critical = last.metrics.get("gns/b_simple") if resolved else low
    used = f"{unit[:1].upper()}{unit[1:]} used"
    if not batch or not critical:
        yield "Noise scale", "–", "not known yet"
        yield "Batch size", number(batch, 4), f"{unit} per step"
        yield "Steps", "–", "relative to the fewest possible"
        yield used, "–", "relative to the fewest possible"
        return
    cost = steps_and_examples(batch, critical)
    if resolved:
        yield "Noise scale", number(critical), f"{unit}; between {number(low)} and {number(last.high)}"
    else:
        yield "Noise scale", f"> {number(low)}", f"{unit}; no upper limit known"
    at_least, at_most = ("", "") if resolved else ("≥ ", "≤ ")
    yield "Batch size", number(batch, 4), f"{unit} per step"
    yield "Steps", f"{at_least}{number(cost.steps, 2)}×", "the fewest possible"
    yield used, f"{at_most}{number(cost.examples, 2)}×", "the fewest possible"


def _alerts(run: Run) -> str:
    """What looks wrong now, then what did earlier; a check that keeps failing says so once."""
    last = run.readings[-1]
    now: list[tuple[str, str]] = []
    earlier: list[tuple[str, str]] = []
    first = {alert.name: alert for alert in reversed(run.alerts)}
    for name, alert in sorted(first.items(), key=lambda item: item[1].window):
        if name in last.alerts or alert.window > last.window:
            now.append((last.alerts.get(name, alert.message), f"since window {count(alert.window)}"))
        else:
            until = max((r.window for r in run.readings if name in r.alerts), default=alert.window)
            when = f"windows {count(alert.window)} to {count(until)}" if until > alert.window else ""
            earlier.append((alert.message, when or f"window {count(alert.window)}"))
    blocks = [_alert_list(*block) for block in (("Something looks wrong", now), ("Looked wrong earlier", earlier))]
    return "\n".join(filter(None, blocks))


def _alert_list(title: str, alerts: list[tuple[str, str]]) -> str:
    if not alerts:
        return ""
    items = "\n".join(
        f'<li>{escape(cut(message, 500))} <span class="when">({when})</span></li>'
        for message, when in alerts[:_MAX_ALERTS]
    )
    more = f"\n<li>And {len(alerts) - _MAX_ALERTS} more, listed at the end.</li>" if len(alerts) > _MAX_ALERTS else ""
    kind = "alerts" if title == "Something looks wrong" else "alerts over"
    return f'<section class="{kind}">\n<h2>{title}</h2>\n<ul>\n{items}{more}\n</ul>\n</section>'


def _topic(topic: Topic, divs: Iterator[str]) -> str:
    text = f"<p>{_formula(topic.text)}</p>\n" if topic.text else ""
    plots = "\n".join(_plot(plot, topic.title, divs) for plot in topic.plots)
    return f'<section class="topic">\n<h2>{escape(topic.title)}</h2>\n{text}{plots}\n</section>'


def _formula(text: str) -> str:
    """Escaped text in which B_crit and its like get their subscripts."""
    return re.sub(r"\b([BSE])_(simple|crit|min)\b", r"\1<sub>\2</sub>", escape(text))


def _plot(plot: Plot | str, title: str, divs: Iterator[str]) -> str:
    if isinstance(plot, str):
        return f'<p class="absent">{escape(plot)}</p>'
    keys = "".join(f"<li>{_swatch(key)}<span>{_formula(key.text)}</span></li>" for key in plot.keys)
    legend = f'<ul class="keys">{keys}</ul>\n' if keys else ""
    tall = ' class="tall" tabindex="0"' if plot.height > 1000 else ""
    drawn = "\n".join(next(divs) for _ in plot.figures)
    return f'{legend}<figure{tall} aria-label="{escape(title)}">\n{drawn}\n</figure>'


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
    "right": '<path d="M17 7l-9 5V2z" stroke="none"/>',
    "cross": '<path d="M8 3l8 8M16 3l-8 8" stroke-width="1.5"/>',
}


def _swatch(key: Key) -> str:
    drawn = _SWATCHES[key.mark]
    return f'<svg width="24" height="14" fill="{key.color}" stroke="{key.color}" aria-hidden="true">{drawn}</svg>'


def _method(rows: Iterable[Row]) -> str:
    items = "\n".join(f"<div><dt>{escape(row.term)}</dt><dd>{_says(row)}</dd></div>" for row in rows)
    return f'<section class="topic">\n<h2>How this was measured</h2>\n<dl class="method">\n{items}\n</dl>\n</section>'


def _says(row: Row) -> str:
    tag = "pre" if row.code else "p"
    return "".join(chain.from_iterable((f"<{tag}>", escape(text), f"</{tag}>") for text in row.says))

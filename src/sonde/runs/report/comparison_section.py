"""The section of a run in which losses were compared by what they would do to the entropy."""

from __future__ import annotations

from collections.abc import Callable

from bokeh.models import FixedTicker, PlainText
from bokeh.models.glyphs import Scatter, Segment

from sonde.policy.stats.forecast_point import ComparedLoss
from sonde.runs.report.figures import (
    LegendEntry,
    Plot,
    Section,
    Table,
    add_hover,
    add_line_at,
    draw,
    new_figure,
    scale_for,
)
from sonde.runs.report.how_measured import cut
from sonde.runs.run import ComparisonReading, Run
from sonde.stats.columns import BLUE, GREY
from sonde.wording import interval, number, plural, shorten

_TEXT = (
    "Each loss was computed on the same update batch, and its step was forecast on the same evaluation responses. What "
    "the responses have in common cancels in the difference from the baseline, so a difference is usually known better "
    "than either change. If its interval does not contain 0, the loss leaves more entropy, or less, than the baseline."
)


def comparison_sections(run: Run) -> list[Section]:
    """The section with the last comparison; none if there was none."""
    if not run.comparisons:
        return []
    last, n = run.comparisons[-1], len(run.comparisons)
    which = "" if n == 1 else f" This is the last of {plural(n, 'comparison')}."
    text = f"At step {last.window:,}, beside {last.baseline}, {_answer(last)}. {_TEXT}{which}"
    return [Section("What would other losses do?", text, (_figure(last), _table(last)))]


def _answer(comparison: ComparisonReading) -> str:
    """What is said of which losses."""
    named: dict[str, list[str]] = {}
    for of in comparison.options:
        if of.name != comparison.baseline:
            named.setdefault(cut(of.words, 100), []).append(shorten(of.name))
    return "; ".join(f"{words}: {', '.join(names)}" for words, names in named.items())


def _table(comparison: ComparisonReading) -> Table:
    rows = []
    for of in comparison.options:
        difference = "–" if of.name == comparison.baseline else _difference(of)
        change = f"{number(of.change)} ± {number(of.change_se, 2)}" if of.change_se else number(of.change)
        rows.append((of.name, cut(of.words, 300), change, difference))
    caption = f"Change of entropy (nats a {comparison.per}), and its difference from that of {comparison.baseline}"
    heads = ("Loss", "Entropy", "Change", "Difference (95 % interval)")
    return Table(caption, heads, tuple(rows), n_texts=2)


def _figure(comparison: ComparisonReading) -> Plot | str:
    """A point with its interval for each loss, one below the other."""
    others = [of for of in comparison.options if of.name != comparison.baseline][::-1]
    if all(of.difference is None for of in others):
        return "No difference is known."
    places = [float(i) for i in range(len(others))]
    x = scale_for([0.0, *(v for of in others for v in (of.difference, of.low, of.high))], "linear")
    y = scale_for([-0.5, len(others) - 0.5], "linear")
    label = f"Difference (nats a {comparison.per})"
    fig = new_figure(x, y, x_label=label, y_label="", height=40 * len(others) + 90)
    fig.yaxis[0].ticker = FixedTicker(ticks=list(range(len(others))))
    fig.yaxis[0].major_label_overrides = {i: PlainText(text=shorten(of.name, 25)) for i, of in enumerate(others)}
    fig.yaxis.axis_label = None
    add_line_at(fig, 0.0, "height", GREY, "dotted")
    for is_valid, color in ((True, BLUE), (False, GREY)):
        rows = [i for i, of in enumerate(others) if of.is_valid is is_valid]
        at = [places[i] for i in rows]
        low, high, middle = ([getattr(others[i], of) for i in rows] for of in ("low", "high", "difference"))
        draw(fig, Segment(line_color=color, line_width=5, line_alpha=0.3), x0=low, y0=at, x1=high, y1=at)
        draw(fig, Scatter(size=8, fill_color=color if is_valid else None, line_color=color), x=middle, y=at)
    known = [_difference(of) for of in others]
    texts: dict[str, Callable[[int], str]] = {"loss": lambda i: others[i].name, "difference": lambda i: known[i]}
    add_hover(fig, [of.difference for of in others], places, texts, mode="hline")
    legend = [LegendEntry("whisker", BLUE, f"difference from {comparison.baseline}, with its 95 % interval")]
    if not all(of.is_valid for of in others):
        legend.append(LegendEntry("dot", GREY, "difference that is not to be trusted"))
    words = "; ".join(f"{of.name}: {text}, {of.words}" for of, text in zip(others[::-1], known[::-1], strict=True))
    return Plot((fig,), tuple(legend), f"{label} from {comparison.baseline}. {words}.")


def _difference(loss: ComparedLoss) -> str:
    return number(None) if loss.difference is None else f"{number(loss.difference)} ({interval(loss.low, loss.high)})"

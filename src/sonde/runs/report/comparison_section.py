"""The section of a run in which losses were compared by what they would do to the entropy."""

from __future__ import annotations

from sonde.policy.stats.forecast_point import ComparedLoss
from sonde.runs.report.figures import Plot, Section, Table, add_line_at, scale_for
from sonde.runs.report.how_measured import cut
from sonde.runs.report.intervals import rows_figure
from sonde.runs.run import ComparisonReading, Run
from sonde.stats.columns import GREY
from sonde.stats.intervals import RatioInterval, unresolved
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
    """A point with its interval for each loss, one below the other; a cross for one that is not to be trusted."""
    others = [of for of in comparison.options if of.name != comparison.baseline]
    if all(of.difference is None for of in others):
        return "No difference is known."
    intervals = [
        RatioInterval("resolved", of.low, of.high, ratio=of.difference) if of.is_valid else unresolved(of.words)
        for of in others
    ]
    x = scale_for([0.0, *(v for of in intervals for v in (of.ratio, of.low, of.high))], "linear")
    label, known = f"Difference (nats a {comparison.per})", [_difference(of) for of in others]
    texts = {"loss": lambda i: others[i].name, "difference": lambda i: known[i], "entropy": lambda i: others[i].words}
    what = f"difference from {comparison.baseline}"
    fig, legend = rows_figure([of.name for of in others], intervals, x, label, texts, what=what)
    add_line_at(fig, 0.0, "height", GREY, "dotted")
    words = "; ".join(f"{of.name}: {text}, {of.words}" for of, text in zip(others, known, strict=True))
    return Plot((fig,), tuple(legend), f"{label} from {comparison.baseline}. {words}.")


def _difference(loss: ComparedLoss) -> str:
    return number(None) if loss.difference is None else f"{number(loss.difference)} ({interval(loss.low, loss.high)})"

"""What sonde itself says of the study: the tables in the source of its verdict, and the table in its docs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

from evidence.analysis import factors, quantile, resolved, which_law
from evidence.tasks import OPTIMIZERS, make_optimizers, perceptron
from evidence.work import Store
from sonde.batch_size.taps.metric import MetricName
from sonde.decision import proxy
from sonde.decision.proxy import Factor
from sonde.parallel.unwrap import kind_of

MODULE = Path(proxy.__file__)
PAGE = Path(__file__).parent.parent / "docs" / "batch-size.md"
MARK = "# From here on written by `python -m evidence.figures`.\n"
WIDEST = 20.0
"""Widest range, high over low, that the verdict quotes: a wider one says no more than the published runs do."""
HEAD = "| optimizer | median | 90 % of the trainings | trainings | tasks |\n"


def said(store: Store) -> dict[Path, str]:
    """The files that say what was found, as they must be with these results."""
    of_runs = of_whole_runs(store)
    module, page = MODULE.read_text(), PAGE.read_text()
    begin, end = page.index(HEAD), page.index("\n\n", page.index(HEAD)) + 1
    return {
        MODULE: module[: module.index(MARK)] + MARK + _source(of_runs, store),
        PAGE: page[:begin] + _table(of_runs) + page[end:],
    }


def of_whole_runs(store: Store) -> dict[tuple[str, str], Factor]:
    """How far the average of a run was from the swept critical batch, by optimizer in words and metric."""
    every, found = factors(store), {}
    for kind, metric in itertools.product(OPTIMIZERS, get_args(MetricName)):
        ratios = every.get((kind, f"B_simple, run, {metric}", "swept"), [])
        known, tasks = resolved(ratios), {ratio.task for ratio in ratios if ratio.value is not None}
        if len(known) >= 3:
            median, low, high = (float(f"{quantile(known, part):.2g}") for part in (0.5, 0.05, 0.95))
            name = kind_of(make_optimizers(kind, perceptron(), 1.0))
            found[name, metric] = Factor(median, low, high, len(known), len(tasks))
    return found


def _source(of_runs: dict[tuple[str, str], Factor], store: Store) -> str:
    cases = [(int(n), int(n_better)) for _, n, n_better, *_ in which_law(store)[1:]]
    n, n_better = map(sum, zip(*cases, strict=True))
    narrow = {key: factor for key, factor in of_runs.items() if factor.high <= WIDEST * factor.low}
    rows = (f'    ("{kind}", "{metric}"): {factor},\n' for (kind, metric), factor in narrow.items())
    return (
        "\nFACTORS: Mapping[tuple[str, str], Factor] = {\n" + "".join(rows) + "}\n"
        f'"""By the optimizer in words, and the metric; without ranges of more than {WIDEST:g} times."""\n'
        f"LAW_FITS_BETTER = ({n_better}, {n})\n"
        '"""Cases (optimizer, task, target) that 1 + B/B_crit fits better than the law of signs, and all cases."""\n'
    )


def _table(of_runs: dict[tuple[str, str], Factor]) -> str:
    rows = (
        f"| {kind} | {f.median:g} | {f.low:g} to {f.high:g} | {f.n_trainings} | {f.n_tasks} |\n"
        for (kind, metric), f in of_runs.items()
        if metric == "euclidean"
    )
    return HEAD + "|---|---|---|---|---|\n" + "".join(rows)

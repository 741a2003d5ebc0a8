"""From the results of the study to its tables: each a list of rows, whose first one is the head."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evidence import cost, rl_answers, schedule_answers
from evidence.laws import LAWS, LawFit, fit_law
from evidence.sweep import mean_log
from evidence.tasks import OPTIMIZERS, TASKS
from evidence.work import Done, Store
from sonde.evidence.branches import Branches
from sonde.evidence.stats.branched_batch import from_base

Rows = list[list[str]]
GRID_ERROR = 0.03
"""Of the log of units, since the best rate may lie between two that were tried, √2 apart."""
POINTS = (0.2, 0.5, 0.9)
"""Parts of a watched training at which its noise scale now is compared."""


@dataclass(frozen=True)
class Swept:
    """Whole trainings of one task, optimizer and target at several batch sizes, each at its best rate.

    Attributes:
        task: its name.
        kind: of optimizer.
        target: its number, from 0.
        batches: that were trained.
        powers: the best rates, powers of 2.
        logs: log of the units that each seed needed, [batches][seeds].
    """

    task: str
    kind: str
    target: int
    batches: tuple[int, ...]
    powers: tuple[float, ...]
    logs: tuple[tuple[float, ...], ...]

    @property
    def means(self) -> list[float]:
        """Mean over seeds."""
        return [*map(statistics.fmean, self.logs)]

    @property
    def errors(self) -> list[float]:
        """Standard error of each mean, by the scatter of all batches together."""
        scatter = statistics.fmean(map(statistics.variance, self.logs))
        return [math.sqrt(scatter / len(seeds) + GRID_ERROR**2) for seeds in self.logs]

    def fit(self, law: str) -> LawFit:
        """A law of the trade-off."""
        return fit_law(law, self.batches, self.means, self.errors, len(self.logs[0]))


def swept(store: Store) -> list[Swept]:
    """All that come to their target at three batch sizes or more."""
    found = []
    key = lambda done: (done.arguments["task_name"], done.arguments["kind"])  # noqa: E731
    for (task, kind), pieces in itertools.groupby(sorted(store.read("sweep"), key=key), key):
        ordered = sorted(pieces, key=_batch)
        for target in range(len(ordered[0].result["units"][0])):
            best = [(done.arguments["batch"], *_best(done, target)) for done in ordered]
            batches, powers, logs = zip(*best, strict=True)
            kept = [k for k, seeds in enumerate(logs) if all(map(math.isfinite, seeds))]
            if len(kept) >= 3:
                of_kept = (tuple(each[k] for k in kept) for each in (batches, powers, logs))
                found.append(Swept(task, kind, target, *of_kept))
    return found + _exact(store)


def _exact(store: Store) -> list[Swept]:
    """The same of the regression's exact expectations, in which nothing scatters."""
    found = []
    for beta, kind in ((0.0, "sgd"), (0.9, "sgd-0.9")):
        ordered = sorted((d for d in store.read("regression") if d.arguments["beta"] == beta), key=_batch)
        for target in range(len(ordered[0].result["units"]) if len(ordered) >= 3 else 0):
            logs = tuple((math.log(done.result["units"][target]),) * 2 for done in ordered)
            powers = tuple(done.result["powers"][target] for done in ordered)
            found.append(Swept("regression, exact", kind, target, tuple(map(_batch, ordered)), powers, logs))
    return found


def _batch(done: Done) -> int:
    return int(done.arguments["batch"])


def _best(done: Done, target: int) -> tuple[float, tuple[float, ...]]:
    """The best rate of a piece, and the logs of its seeds."""
    by_power = dict(zip(done.result["powers"], (of[target] for of in done.result["units"]), strict=True))
    power = min(by_power, key=lambda p: mean_log(by_power[p]))
    return power, tuple(math.log(units) if units else math.inf for units in by_power[power])


def laws(store: Store) -> Rows:
    """Both laws of each optimizer, task and target."""
    rows = [["optimizer", "task", "target", "B_crit", "misfit of 1 + B/B_crit", "misfit of the sign's law", "dof"]]
    for each in swept(store):
        noise, sign = (each.fit(law) for law in LAWS)
        interval = f"{noise.critical:.0f} [{noise.low:.0f}, {noise.high:.0f}]"
        misfits = (f"{noise.misfit:.1f}", f"{sign.misfit:.1f}", str(noise.dof))
        rows.append([each.kind, each.task, str(each.target + 1), interval, *misfits])
    return rows


def which_law(store: Store) -> Rows:
    """In how many cases each law fits better, with the p-value of a sign test."""
    rows = [["optimizer", "cases", "1 + B/B_crit fits better", "p", "median misfit/dof", "the sign's law"]]
    for kind in OPTIMIZERS:
        pairs = [[each.fit(law) for law in LAWS] for each in swept(store) if each.kind == kind and each.task in TASKS]
        if pairs:
            n_noise = sum(noise.misfit < sign.misfit for noise, sign in pairs)
            medians = [f"{statistics.median(f.misfit / f.dof for f in of):.1f}" for of in zip(*pairs, strict=True)]
            rows.append([kind, str(len(pairs)), str(n_noise), f"{sign_test(n_noise, len(pairs)):.2g}", *medians])
    return rows


def sign_test(n: int, of: int) -> float:
    """Two-sided p-value of n successes of so many, where each is as likely as not.

    Example:
        >>> sign_test(0, 5)
        0.0625
    """
    n_tail = sum(math.comb(of, k) for k in range(max(n, of - n), of + 1))
    return float(min(1.0, 2 * n_tail / 2**of))


def rates_of_rules(store: Store) -> Rows:
    """The rate that a rule makes of a tuned one at larger batches, of up to 4 B_crit, beside the best rate there.

    The rules are f = (1 + B_crit/B)/(1 + B_crit/B′) and √f. Units at a rate between two that were tried are
    interpolated.
    """
    fits = {(e.task, e.kind): e.fit("noise") for e in swept(store) if e.task in TASKS}  # the last target counts
    curves = {(d.arguments["task_name"], d.arguments["kind"], _batch(d)): _by_rate(d) for d in store.read("sweep")}
    head = ["optimizer", "rule", "batch over the tuned", "rate over the best, as a power of 2", "units over the best"]
    rows = [[*head, "whose rate was tried"]]
    for kind, part, times in itertools.product(OPTIMIZERS, (1.0, 0.5), (4, 16, 64)):
        off, units = [], []
        for (task, of, batch), tuned in curves.items():
            larger, fit = curves.get((task, of, batch * times), {}), fits.get((task, kind))
            if of != kind or not larger or fit is None or batch * times > 4 * fit.critical:
                continue
            rise = (1 + fit.critical / batch) / (1 + fit.critical / (batch * times))
            power = min(tuned, key=tuned.__getitem__) + part * math.log2(rise)
            best = min(larger, key=larger.__getitem__)
            off.append(power - best)
            units.append(_between(larger, power) - larger[best])
        if off:
            tried = [math.exp(each) for each in units if not math.isnan(each)]
            costs = f"{statistics.geometric_mean(tried):.2f}, at most {max(tried):.2f}" if tried else "–"
            rule, rate = "f" if part == 1 else "√f", f"{statistics.fmean(off):+.2f}"
            rows.append([kind, rule, str(times), rate, costs, f"{len(tried)} of {len(off)}"])
    return rows


def _by_rate(done: Done) -> dict[float, float]:
    """Log of the units to the last target, by the rate's power of 2; without rates at which a seed failed."""
    last = zip(done.result["powers"], (of[-1] for of in done.result["units"]), strict=True)
    return {power: log for power, units in last if math.isfinite(log := mean_log(units))}


def _between(by_power: Mapping[float, float], power: float) -> float:
    """On the line between neighbours; NaN beyond all."""
    for (low, at_low), (high, at_high) in itertools.pairwise(sorted(by_power.items())):
        if low <= power <= high:
            return at_low + (at_high - at_low) * (power - low) / (high - low)
    return math.nan


def momentum(store: Store) -> Rows:
    """How much larger the critical batch is at β = 0.9 than without; mean-field theory says 19 times."""
    rows = [["task", "target", "B_crit at β = 0", "at β = 0.9", "ratio"]]
    fits = {(e.task, e.target, e.kind): e.fit("noise") for e in swept(store)}
    for (task, target, kind), plain in fits.items():
        other = fits.get((task, target, "sgd-0.9"))
        if kind == "sgd" and other is not None:
            ratio = other.critical / plain.critical
            apart = math.hypot(*(math.log(f.high / f.low) / 2 if f.low else math.inf for f in (plain, other)))
            interval = f"{ratio:.1f} [{ratio * math.exp(-apart):.1f}, {ratio * math.exp(apart):.1f}]"
            rows.append([task, str(target + 1), f"{plain.critical:.0f}", f"{other.critical:.0f}", interval])
    return rows


@dataclass(frozen=True)
class Ratio:
    """A direct measurement over a proxy, in one run.

    Attributes:
        task: of the run.
        value: None where one of the two is not resolved.
    """

    task: str
    value: float | None


def factors(store: Store) -> dict[tuple[str, str, str], list[Ratio]]:
    """Direct measurement over proxy, of each run.

    Returns:
        By optimizer, proxy and direct measurement.
    """
    found: dict[tuple[str, str, str], list[Ratio]] = {}
    whole = {(e.task, e.kind): e.fit("noise").critical for e in swept(store)}  # of the last target
    for done in store.read("watched"):
        task, kind, offset = (done.arguments[name] for name in ("task_name", "kind", "offset"))
        looks, direct = done.result["looks"], whole.get((task, kind))
        if offset or direct is None or not looks or done.arguments["metrics"] != "all":
            continue
        for metric in (name for name, value in looks[-1].items() if isinstance(value, list)):
            ratio = Ratio(task, _over(direct, looks[-1][metric][3]))
            found.setdefault((kind, f"B_simple, run, {metric}", "swept"), []).append(ratio)
            for part in POINTS:
                look = min(looks, key=lambda k: abs(k["units"] - part * looks[-1]["units"]))
                name = f"B_simple at {part:.0%}, {metric}"
                found.setdefault((kind, name, "swept"), []).append(Ratio(task, _over(direct, look[metric][0])))
    for done in store.read("branched"):
        task, kind, rule = (done.arguments[name] for name in ("task_name", "kind", "rule"))
        for point in done.result["points"] if len(done.result["points"]) == len(POINTS) else ():
            branched = branched_critical(point)
            by = f"branched, {rule} rates"
            found.setdefault((kind, by, "swept"), []).append(Ratio(task, _over(whole.get((task, kind)), branched)))
            for name in (name for name in point if name.startswith("B_")):
                found.setdefault((kind, name, by), []).append(Ratio(task, _over(branched, point[name][0])))
    return found


def branched_critical(point: Mapping[str, Any]) -> float | None:
    """B_crit of the law 1 + B/B_crit from the branches of a point; None where it is not resolved."""
    found = Branches.from_json(point["branches"])
    ratio = found.critical.ratio
    return None if ratio is None else from_base(ratio, found.reference, found.tolerance)


def _over(direct: float | None, proxy: float | None) -> float | None:
    return direct / proxy if direct and proxy and direct > 0 and proxy > 0 else None


def proxies(store: Store) -> Rows:
    """Which proxy predicts which measurement, by what factor."""
    rows = [["optimizer", "proxy", "measured", "runs", "factor, median", "90 % range", "within 2 × of the median"]]
    for (kind, proxy, direct), ratios in factors(store).items():
        known = resolved(ratios)
        if len(known) >= 3:
            middle = statistics.median(known)
            near = sum(0.5 <= ratio / middle <= 2 for ratio in known) / len(ratios)
            ends = f"{quantile(known, 0.05):.2g} – {quantile(known, 0.95):.2g}"
            rows.append([kind, proxy, direct, f"{len(known)} of {len(ratios)}", f"{middle:.2g}", ends, f"{near:.0%}"])
    return rows


def resolved(ratios: Iterable[Ratio]) -> list[float]:
    """The values that are known, in order."""
    return sorted(ratio.value for ratio in ratios if ratio.value is not None)


def quantile(ordered: Sequence[float], part: float) -> float:
    """By straight lines between the values.

    Example:
        >>> quantile([1.0, 2.0, 3.0], 0.75)
        2.5
    """
    place = part * (len(ordered) - 1)
    low = min(int(place), len(ordered) - 2)
    return ordered[low] + (place - low) * (ordered[low + 1] - ordered[low])


FEATURES = ("B_simple, average / batch", "B_simple, now / average", "|G|²", "scatter of the loss / loss")


def learning_rate(store: Store) -> Rows:
    """What a log shows of a rate that is wrong: each feature at its end, over that of the tuned rate, by the offset.

    The last column has the rank correlation of the feature with the offset over all trainings: what somebody sees who
    does not know the tuned rate.
    """
    runs = [
        (tuple(a[name] for name in ("task_name", "kind", "batch")), a["offset"], _features(done))
        for done in store.read("watched")
        if (a := done.arguments)["metrics"] == "euclidean" and done.result["looks"]
    ]
    offsets = sorted({offset for _, offset, _ in runs})
    rows = [["feature", *(f"rate × 2^{offset}" for offset in offsets), "rank correlation"]]
    for name in FEATURES:
        known = [(case, offset, features[name]) for case, offset, features in runs if name in features]
        tuned = {case: [v for c, o, v in known if c == case and not o] for case, _, _ in known}
        cells = [
            _spread(v - statistics.fmean(tuned[case]) for case, o, v in known if o == offset and tuned[case])
            for offset in offsets
        ]
        rows.append([name, *cells, _rank_correlation([(o, v) for _, o, v in known])])
    return rows


def _features(done: Done) -> dict[str, float]:
    """Logs of what stands at the end of a log."""
    last = done.result["looks"][-1]
    now, _, _, average, _, _, grad_sq, _ = last["euclidean"]
    loss, scatter = last["loss"], last["scatter"]
    values = (
        average / done.arguments["batch"] if average else None,
        now / average if now and average else None,
        grad_sq,
        scatter / loss if scatter and loss else None,
    )
    return {name: math.log(value) for name, value in zip(FEATURES, values, strict=True) if value and value > 0}


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Spearman's, with its 95 % interval by Fisher's z."""
    ranks = [_ranks(values) for values in zip(*pairs, strict=True)]
    if len(pairs) < 10 or any(len({*each}) == 1 for each in ranks):
        return "–"
    found = statistics.correlation(*ranks)
    reach = 1.96 / math.sqrt(len(pairs) - 3)
    low, high = (math.tanh(math.atanh(found) + side * reach) for side in (-1, 1))
    return f"{found:.2f} [{low:.2f}, {high:.2f}]"


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def _spread(logs: Iterable[float]) -> str:
    known = sorted(map(math.exp, logs))
    if len(known) < 3:
        return "–"
    return f"{statistics.median(known):.2g} ({quantile(known, 0.05):.2g} – {quantile(known, 0.95):.2g}, {len(known)})"


def merrill(store: Store) -> Rows:
    """The branched critical batch along a training of a language model, of each seed."""
    rows = [["optimizer", "part of the units to the last target", "B_crit of each seed", "B_simple there"]]
    cells: dict[tuple[str, float], list[tuple[str, str]]] = {}
    for done in store.read("branched"):
        points = done.arguments["points"]
        for part, point in zip(points, done.result["points"], strict=True) if len(points) > len(POINTS) else ():
            crit, simple = branched_critical(point), point["B_simple"][0]
            known = f"{crit:.0f}" if crit is not None else "–"
            cells.setdefault((done.arguments["kind"], part), []).append((known, f"{simple:.0f}" if simple else "–"))
    for (kind, part), seeds in cells.items():
        rows.append([kind, f"{part:g}", *(", ".join(each) for each in zip(*seeds, strict=True))])
    return rows


TABLES = {
    "Critical batch sizes of whole trainings": laws,
    "Which law": which_law,
    "Rates of the rules": rates_of_rules,
    "Momentum": momentum,
    "Which proxy predicts which measurement": proxies,
    "A learning rate that is wrong": learning_rate,
    "Along a language model's training": merrill,
    "Reinforcement learning: critical batches": rl_answers.critical_batches,
    "Reinforcement learning: rollouts needed": rl_answers.rollouts_needed,
    "Reinforcement learning: the noise of prompts": rl_answers.prompt_noises,
    "Schedules of the batch: beside the best constant batch": schedule_answers.beside_constant,
    "Schedules of the batch: all of equal steps, beside the best constant batch": schedule_answers.equal_steps,
    "Schedules of the batch: fixed ramps of equal steps, beside the adaptive one": schedule_answers.beside_ramps,
    "Schedules of the batch: all cases": schedule_answers.overall,
    "Time added to a window": cost.added_time,
}


def tables(store: Store) -> str:
    """All tables that have rows."""
    parts = ["# Tables of the study", f"Command: `python -m evidence.figures`. Tasks: {', '.join(TASKS)}."]
    for title, make in TABLES.items():
        head, *rows = make(store)
        lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
        if rows:
            parts += [f"## {title}", "\n".join("| " + " | ".join(line) + " |" for line in lines)]
    return "\n\n".join(parts) + "\n"

"""How often the interval of the noise scale holds the present level while weights move, on recorded trainings.

    python -m benchmarks.present_noise_scale [--seeds 2] [--only TRAINING…] [--jobs 1] [--runs FOLDER]
        [--trend 73d8a48] [--out benchmarks/results]

Trains what `recorded_runs` trains, with both optimizers and five schedules of the rate, unless it was recorded before.
Each training is read as sonde would read it: with every window measured, at the default pace, and after the allowance
of seconds is used up. Readings at rising steps are held against the *level*: the ratio of the means of the exact tr Σ
and |G|² over neighbouring steps, each over the size of the gradient there. The exact value itself jumps from step to
step. An interval holds the level if it overlaps the level's own 95 % interval. Beside the filter stand Fieller's
interval of the plain mean of the last half of the run, and the local trend that the filter has replaced, from the
commit named by `--trend`, if this is a checkout of git.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.machine import page
from benchmarks.recorded_runs import FOLDER, Recorded, load
from sonde.batch_size.pace import Pace, WindowCosts
from sonde.batch_size.stats.averages import WindowsOfRun
from sonde.batch_size.stats.noise_scale import RatioAverage
from sonde.batch_size.stats.window_row import SolvedWindow
from sonde.stats.intervals import RatioInterval

LENGTHS = {"lm": (600, 1200), "digits": (300, 1500), "mlp": (300, 1500), "grpo": (300, 1000), "demo": (300,)}
LONG = ("mlp", 10_000)
SCHEDULES = ("constant", "warmup", "decay", "jump", "still")
PACES = {"every window": None, "default": 10.0, "allowance used up": 0.0}
"""Seconds of allowance; None without a budget."""
STEP, COST = 0.008, 0.006
"""Seconds of a step, and of measuring a window: the budget of 1 % allows one window in 80."""
BEGINNING = 30.0
"""Steps that are added to the time, as in sonde's blocks: log time begins slowly."""
WIDE = 30.0
"""A two-sided interval whose ends differ by more than this factor says no more than a bound."""


@dataclass(frozen=True)
class Judged:
    """One reading by one estimator.

    Attributes:
        run: name of the training.
        pace: which windows were measured.
        by: the estimator.
        step: of the reading.
        is_last: whether it is the last of its training.
        batches: the level over the batch.
        status: of the interval.
        holds: whether it overlaps the level's own 95 % interval.
        contains: whether it contains the level itself.
        width: its upper over its lower end; infinite unless two-sided.
        error: log of the estimate over the level; NaN unless two-sided.
    """

    run: str
    pace: str
    by: str
    step: int
    is_last: bool
    batches: float
    status: str
    holds: bool
    contains: bool
    width: float
    error: float

    @property
    def is_two_sided(self) -> bool:
        """Whether the interval says more than a bound."""
        return self.width < WIDE


def plan(n_seeds: int) -> Iterator[tuple[str, str, str, int, int]]:
    """Task, optimizer, schedule, steps and seed of all trainings."""
    for task, lengths in LENGTHS.items():
        if task == "demo":
            yield from (("demo", "adamw", "decay", 300, seed) for seed in range(10))
            continue
        for optimizer in ("adamw", "sgd"):
            for schedule in SCHEDULES:
                # Still weights begin after step 200.
                n_steps = [n for n in lengths if schedule != "still" or n > 500]
                yield from ((task, optimizer, schedule, n, seed) for n in n_steps for seed in range(n_seeds))
            if task == LONG[0]:
                yield from ((task, optimizer, schedule, LONG[1], 0) for schedule in ("constant", "decay"))


def recorded(n_seeds: int, folder: Path, only: Sequence[str] | None, *, jobs: int) -> Iterator[Recorded]:
    """All trainings. Those that were not recorded before are, each in a process of its own, some at a time."""

    def record(words: Sequence[str]) -> None:
        subprocess.run([sys.executable, "-m", "benchmarks.recorded_runs", *words, "--out", str(folder)], check=True)

    planned = [[str(word) for word in arguments] for arguments in plan(n_seeds)]
    planned = [words for words in planned if only is None or "-".join(words[:-1]) in only]
    files = [folder / f"{'-'.join(words)}.json" for words in planned]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(record, [words for words, file in zip(planned, files, strict=True) if not file.exists()]))
    yield from map(load, files)


def level_at(run: Recorded, step: int) -> tuple[float, float] | None:
    """Log of the level at a step, and its standard error; None where |G|² cannot be distinguished from 0."""
    reach = min(60, max(5, step // 4))
    low, high = step - reach, step + reach
    for jump in run.jumps:
        low, high = (low, min(high, jump)) if step <= jump else (max(low, jump + 1), high)
    rows = [row for row in near(run, low, high) if row.size > 0]
    if len(rows) < 4:
        return None
    x, y = [row.trace_cov / row.size for row in rows], [row.grad_sq / row.size for row in rows]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    error = statistics.stdev(y) / math.sqrt(len(y))
    if mean_x <= 0 or mean_y <= 3 * error:
        return None
    residuals = [a / mean_x - b / mean_y for a, b in zip(x, y, strict=True)]
    return math.log(mean_x / mean_y), statistics.stdev(residuals) / math.sqrt(len(x))


@dataclass(frozen=True)
class Exact:
    """The exact values of a step.

    Attributes:
        step: of training.
        trace_cov: tr Σ.
        grad_sq: |G|².
        size: of the gradient: the median |F|² of five neighbours. It is 0 where the gradient has gone.
    """

    step: float
    trace_cov: float
    grad_sq: float
    size: float


def near(run: Recorded, low: float, high: float) -> list[Exact]:
    """The exact values between two steps."""
    rows = [row for row in run.exact if low <= row[0] <= high]
    sizes = [grad_sq + trace_cov / run.batch for _, trace_cov, grad_sq in rows]
    sizes = [statistics.median(sizes[max(i - 2, 0) : i + 3]) for i in range(len(rows))]
    return [Exact(row[0], row[1], row[2], size) for row, size in zip(rows, sizes, strict=True)]


def measured(run: Recorded, allowance: float | None) -> list[int]:
    """The steps whose windows are measured at a pace."""
    if allowance is None:
        return list(range(1, len(run.windows) + 1))
    pace, chosen = Pace(budget=0.01, allowance=allowance), []
    for step in range(1, len(run.windows) + 1):
        is_measured, n_idle = pace.is_measured, pace.every - 1
        pace.window_ends()
        if is_measured:
            chosen.append(step)
            costs = WindowCosts(
                seconds=0.006, idle_time=0.008 * n_idle, n_idle=n_idle, measured_time=0.014, n_measured=1
            )
            pace.take(step, costs)
    return chosen


def steps_to_read(n_steps: int) -> list[int]:
    """Steps of readings, each a fifth later than the one before."""
    steps = [40]
    while steps[-1] * 1.2 < n_steps:
        steps.append(int(steps[-1] * 1.2))
    return [*steps, n_steps]


def solved(run: Recorded, step: int) -> SolvedWindow:
    """A window as a probe solves it."""
    trace_cov, grad_sq = run.windows[step - 1]
    norm = math.sqrt(max(grad_sq + trace_cov / run.batch, 0.0))
    total = torch.tensor([[trace_cov], [grad_sq]], dtype=torch.float64)
    return SolvedWindow(total, norm, run.batch, 4 / run.batch)


Reader = Callable[[int], RatioInterval]


def by_filter(run: Recorded, chosen: Sequence[int]) -> Reader:
    """The noise scale now, as a probe gives it."""
    windows, waiting = WindowsOfRun(()), list(chosen)

    def read(step: int) -> RatioInterval:
        while waiting and waiting[0] <= step:
            windows.add(solved(run, waiting[0]), waiting[0], run.rate_at(waiting.pop(0)))
        return windows.levels()[0]

    return read


def by_last_half(run: Recorded, chosen: Sequence[int]) -> Reader:
    """Fieller's interval of the plain mean of the last half of the run."""

    def read(step: int) -> RatioInterval:
        average = RatioAverage(math.inf)
        for i in chosen:
            if step / 2 < i <= step:
                average.update(*run.windows[i - 1])
        return average.interval()

    return read


def by_trend(answers: Sequence[Sequence[object]]) -> Reader:
    """What the local trend of an older commit has answered, in the order of the readings."""
    waiting = iter(answers)

    def read(step: int) -> RatioInterval:
        ratio, status, low, high = next(waiting)
        high = math.inf if high is None and low is not None else high
        return RatioInterval(status, low, high, ratio=ratio)  # type: ignore[arg-type]

    return read


ASK_TREND = """
import json, math, sys
from sonde.batch_size.stats.history import WindowHistory
from sonde.batch_size.stats.noise_scale import WindowEstimate
from sonde.batch_size.stats.solved_window import SolvedWindow
from sonde.batch_size.stats.trend import fit_trends

def answers_of(batch, windows, chosen, steps):
    history, waiting = WindowHistory(("all",), 50.0), list(chosen)
    for step in steps:
        while waiting and waiting[0] <= step:
            number = waiting.pop(0)
            total = WindowEstimate(*windows[number - 1])
            norm = math.sqrt(max(total.grad_sq + total.trace_cov / batch, 0.0))
            every = (waiting[0] - number) if waiting else 1
            history.spacing.measured(number, max(every, 1))
            history.add(SolvedWindow(total, (total,), None, norm, batch, 4 / batch, 1.0, 1.0), number)
        series = history.series(step, with_groups=False)[0][1]
        spacing = history.spacing.per_measured(50.0)
        fit = fit_trends(series.trace_cov, series.grad_sq, series.ages, 50.0, spacing=spacing)[0]
        high = fit.interval.high
        high = None if high is None or math.isinf(high) else high
        yield [fit.ratio, fit.interval.status, fit.interval.low, high]

for line in sys.stdin:
    batch, windows, chosen, steps = json.loads(line)
    answers = []
    try:
        answers.extend(answers_of(batch, windows, chosen, steps))
    except ZeroDivisionError:  # of its own, where a gradient has gone: from there on it says nothing
        answers += [[None, "unresolved", None, None]] * (len(steps) - len(answers))
    print(json.dumps(answers), flush=True)
"""


class Trend:
    """Asks the local trend of an older commit, in a process that imports sonde from there.

    Args:
        commit: which; it must be in this checkout's history.
    """

    def __init__(self, commit: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        archive = subprocess.run(["git", "archive", commit, "src"], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
            sources.extractall(self._folder.name, filter="data")
        code = f"import sys; sys.path.insert(0, {str(Path(self._folder.name) / 'src')!r})\n{ASK_TREND}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def reader(self, run: Recorded, chosen: Sequence[int]) -> Reader:
        """Its readings of a training."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = [run.batch, run.windows, list(chosen), steps_to_read(len(run.windows))]
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return by_trend(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def judge(run: Recorded, trend: Trend | None) -> Iterator[Judged]:
    """All readings of a training, by all estimators at all paces."""
    steps = steps_to_read(len(run.windows))
    levels = [level_at(run, step) for step in steps]
    for pace, allowance in PACES.items():
        chosen = measured(run, allowance)
        readers = {"filter": by_filter(run, chosen), "last half": by_last_half(run, chosen)}
        if trend is not None:
            readers["trend"] = trend.reader(run, chosen)
        for step, level in zip(steps, levels, strict=True):
            for by, read in readers.items():
                interval = read(step)
                if level is not None:
                    yield judged(run, pace, by, step, level, interval)


def judged(
    run: Recorded,
    pace: str,
    by: str,
    step: int,
    level: tuple[float, float],
    interval: RatioInterval,
) -> Judged:
    """Hold one reading against the level."""
    log_level, slack = level[0], 1.96 * level[1]
    low = -math.inf if not interval.low else math.log(interval.low)
    high = math.inf if interval.high is None else math.log(interval.high)
    b_simple = interval.ratio
    is_two_sided = interval.status == "resolved" and b_simple is not None and b_simple > 0
    return Judged(
        run.name,
        pace,
        by,
        step,
        step == len(run.windows),
        math.exp(log_level) / run.batch,
        interval.status,
        low - slack <= log_level <= high + slack,
        low <= log_level <= high,
        math.exp(high - low) if is_two_sided and high - low < 100 else math.inf,
        math.log(b_simple) - log_level if is_two_sided and b_simple is not None else math.nan,
    )


@dataclass(frozen=True)
class Average:
    """The run's average at its end, and the exact one.

    Attributes:
        run: name of the training.
        pace: which windows were measured.
        low: of its interval.
        high: of its interval.
        holds: whether it overlaps the exact one's own 95 % interval, since only some steps are known exactly.
    """

    run: str
    pace: str
    low: float
    high: float
    holds: bool


def exact_average(run: Recorded) -> tuple[float, float] | None:
    """Σ (tr Σ/E|F|²) / Σ (|G|²/E|F|²) over all steps, where E|F|² is the mean over a fifth of the steps so far.

    Returns:
        Its log, and the standard error that comes from the steps between; None where |G|² cannot be distinguished from
        0.
    """
    rows, n_steps = near(run, 1, len(run.windows)), len(run.windows)
    ends = [0.0, *((a.step + b.step) / 2 for a, b in itertools.pairwise(rows)), float(n_steps)]
    over_size: list[tuple[float, float]] = []
    parts: list[float] = []
    for row, (start, end) in zip(rows, itertools.pairwise(ends), strict=True):
        reach = 0.1 * (row.step + BEGINNING)
        sizes = [r.grad_sq + r.trace_cov / run.batch for r in rows if abs(r.step - row.step) <= reach]
        if (size := statistics.fmean(sizes)) > 0:
            over_size.append((row.trace_cov / size, row.grad_sq / size))
            parts.append((end - start) / n_steps)
    x, y = (math.fsum(part * each[i] for part, each in zip(parts, over_size, strict=True)) for i in (0, 1))

    def error(values: Sequence[float]) -> float:
        """Of a sum over some steps for all: by the differences of neighbours, since training moves."""
        squares = (
            (part * (b - a)) ** 2 / 2 for part, (a, b) in zip(parts[1:], itertools.pairwise(values), strict=True)
        )
        return math.sqrt((1 - len(rows) / n_steps) * math.fsum(squares))

    if x <= 0 or y <= 3 * error([b for _, b in over_size]):
        return None
    return math.log(x / y), error([a / x - b / y for a, b in over_size])


def averages(run: Recorded) -> Iterator[Average]:
    """The run's average at each pace."""
    exact = exact_average(run)
    for pace, allowance in PACES.items() if exact is not None else ():
        assert exact is not None
        windows = WindowsOfRun(())
        for step in measured(run, allowance):
            windows.add(solved(run, step), step, run.rate_at(step))
        interval = windows.average()
        low, high = interval.low or 0.0, math.inf if interval.high is None else interval.high
        slack = math.exp(1.96 * exact[1])
        yield Average(run.name, pace, low, high, low / slack <= math.exp(exact[0]) <= high * slack)


def table(found: Sequence[Judged], key: Callable[[Judged], str], title: str) -> str:
    """One row for each value of a key, pace and estimator."""
    lines = [
        f"| {title} | pace | by | readings | held | contained | two-sided | estimate over level | width | "
        "times the last half's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    half = {(r.run, r.pace, r.step): r for r in found if r.by == "last half"}
    for value in dict.fromkeys(map(key, found)):
        for pace in PACES:
            for by in dict.fromkeys(r.by for r in found):
                rows = [r for r in found if (key(r), r.pace, r.by) == (value, pace, by)]
                if not rows:
                    continue
                two = [r for r in rows if r.is_two_sided]
                ratios = [
                    r.width / half[r.run, pace, r.step].width
                    for r in two
                    if half[r.run, pace, r.step].is_two_sided and half[r.run, pace, r.step].holds
                ]
                lines.append(
                    f"| {value} | {pace} | {by} | {len(rows)} | {share(r.holds for r in rows)} | "
                    f"{share(r.contains for r in rows)} | {share(r.is_two_sided for r in rows)} | "
                    f"{middle([math.exp(r.error) for r in two])} | "
                    f"{middle([r.width for r in two])} | {middle(ratios)} |"
                )
    return "\n".join(lines)


def cells(found: Sequence[Judged], pace: str) -> str:
    """How often the filter's interval held the level, in each cell: task, optimizer and steps by schedule."""
    of_cell: dict[tuple[str, str, str, str], list[bool]] = {}
    for r in found:
        if r.by == "filter" and r.pace == pace:
            task, optimizer, schedule, steps, _seed = r.run.split("-")
            of_cell.setdefault((task, optimizer, steps, schedule), []).append(r.holds)
    lines = [f"| {pace} | {' | '.join(SCHEDULES)} |", "|---" * (1 + len(SCHEDULES)) + "|"]
    for row in dict.fromkeys(cell[:3] for cell in of_cell):
        held = [of_cell.get((*row, schedule), []) for schedule in SCHEDULES]
        counts = [f"{sum(each)} of {len(each)}" if each else "–" for each in held]
        lines.append(f"| {' '.join(row)} | {' | '.join(counts)} |")
    missed = [" ".join(cell) for cell, held in of_cell.items() if sum(held) < 0.9 * len(held)]
    names = f": {', '.join(missed)}" if missed else ""
    return "\n".join([*lines, "", f"{len(missed)} of {len(of_cell)} cells below 90 %{names}."])


def share(values: Iterator[bool] | Sequence[bool]) -> str:
    """A part in per cent."""
    known = list(values)
    return f"{100 * sum(known) / len(known):.0f} %" if known else "–"


def middle(values: Sequence[float]) -> str:
    """The median."""
    return f"{statistics.median(values):.2f}" if values else "–"


def range_of(batches: float) -> str:
    """A range of the level over the batch."""
    for limit in (1, 4, 16):
        if batches < limit:
            return f"below {limit} batches"
    return "16 batches and more"


def last_readings(found: Sequence[Judged]) -> str:
    """Whether long runs end with a two-sided reading."""
    lines = []
    for pace in PACES:
        ends = [
            r for r in found if r.by == "filter" and r.pace == pace and r.is_last and r.step >= 1000 and r.batches <= 16
        ]
        lines.append(
            f"- {pace}: {sum(r.status == 'resolved' for r in ends)} of {len(ends)} runs of 1,000 steps or more with a "
            f"level of at most 16 batches end with a two-sided interval, {sum(r.is_two_sided for r in ends)} with one "
            f"narrower than a factor of {WIDE:g}."
        )
    return "\n".join(lines)


def average_lines(found: Sequence[Average]) -> str:
    """How often the run's average holds the exact one."""
    lines = []
    for pace in PACES:
        rows = [r for r in found if r.pace == pace]
        held = share(r.holds for r in rows)
        two = [r.high / r.low for r in rows if r.low > 0 and r.high < math.inf]
        lines.append(f"- {pace}: {held} of {len(rows)}; {len(two)} two-sided, width {middle(two)}.")
    return "\n".join(lines)


def main() -> None:
    """Record what is missing, judge everything, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--only", nargs="*", help="trainings to judge, such as mlp-adamw-constant-300; all by default")
    parser.add_argument("--runs", type=Path, default=FOLDER)
    parser.add_argument("--trend", default="73d8a48")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    trend = Trend(options.trend) if options.trend else None
    found, of_runs, n_runs = [], [], 0
    for run in recorded(options.seeds, options.runs, options.only, jobs=options.jobs):
        found += list(judge(run, trend))
        of_runs += list(averages(run))
        n_runs += 1
    if trend is not None:
        trend.close()
    parts = (
        ("By task and optimizer", lambda r: " ".join(r.run.split("-")[:2]), "task"),
        ("By schedule", lambda r: r.run.split("-")[2], "schedule"),
        ("By length", lambda r: r.run.split("-")[3], "steps"),
        ("By level", lambda r: range_of(r.batches), "level"),
        ("All", lambda r: "all", ""),
    )
    tables = "\n\n".join(f"## {title}\n\n{table(found, key, head)}" for title, key, head in parts)
    of_cells = "\n\n".join(cells(found, pace) for pace in PACES)
    text = (
        f"{n_runs} trainings. A reading holds the level if its interval overlaps the level's own, "
        "which is as wide as the exact values of few steps make it; it contains the level if that itself is inside. "
        "Estimate over level, and width (the upper over the lower end): medians over two-sided intervals. Last, this "
        "width over that of the plain mean of the last half, where the latter is two-sided and holds the level.\n\n"
        f"{tables}\n\n## By cell\n\nReadings whose interval held the level.\n\n{of_cells}\n\n"
        f"## The last reading\n\n{last_readings(found)}\n\n"
        f"## The run's average\n\nIts interval overlaps the exact one's:\n\n{average_lines(of_runs)}"
    )
    made = page("Does the interval hold the noise scale now?", "python -m benchmarks.present_noise_scale", text)
    print(made)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "present_noise_scale.md").write_text(made)


if __name__ == "__main__":
    main()

"""The sections of a run with a policy, in order: figures and tables, with the text that a newcomer needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import TypeVar

from sonde.policy.stats.attribution import unexplained
from sonde.policy.stats.columns import BY_RESPONSE, COEFFICIENT, DELTA, IN_PROMPTS, METRICS, TRUST
from sonde.runs.report.curves import TimeAxis, draw_panels
from sonde.runs.report.figures import Plot, Section, Table
from sonde.runs.report.policy_curves import (
    entropy_by_position,
    entropy_panel,
    forecast_against_truth,
    forecast_curve,
    prompt_noise_plot,
)
from sonde.runs.report.sections import other_sections, section_over_run, values_section
from sonde.runs.run import PolicyReading, Run
from sonde.wording import capital, number, percent

T = TypeVar("T")

_ROWS_AT_EACH_END = 6
"""A table lists this many prompts that lower the entropy most, and as many that raise it most."""
_MAX_PROMPT_LENGTH = 120
"""Characters."""


def policy_sections(run: Run) -> list[Section]:
    """All sections of a run in which a policy was measured at least once."""
    policy = run.policy
    axis = TimeAxis.of(policy, run.probe("policy").unit, noun="step")
    no_forecast = "No change of entropy was forecast in this run."
    over_run = partial(section_over_run, METRICS, policy, axis, "prompts")
    entropy = draw_panels((entropy_panel(),), policy, axis, "No entropy was measured in this run.")
    noise = (prompt_noise_plot(policy, axis),)
    sections = [
        Section("Entropy of the policy", _ENTROPY, (entropy,)),
        over_run(BY_RESPONSE, _BY_RESPONSE),
        Section("Entropy by position in the response", _BY_POSITION, (entropy_by_position(policy),)),
        Section("Forecast and effect of each step", _forecast_text(policy), (forecast_curve(policy, axis),)),
        Section("Forecast against truth", _AGAINST_TRUTH, (forecast_against_truth(policy),)),
        over_run(TRUST, _TRUST, "No true change was measured on the evaluation responses."),
        Section("Prompts that change the entropy most", _causes_text(policy), _tables(run)),
        over_run(COEFFICIENT, _COEFFICIENT),
        Section(IN_PROMPTS, _NOISE + _allocation_text(policy), noise),
        Section("What each forecast is made of, and what it costs", _PARTS_TEXT, (_parts(policy) or no_forecast,)),
    ]
    return [*sections, *other_sections(METRICS, sections, over_run), values_section(run, policy, axis, "Reward")]


_ENTROPY = (
    "The entropy says how undecided the policy is about each token. It is computed exactly, from all logits. "
    "If the entropy falls to almost 0 early, the policy has stopped exploring: it cannot learn from responses "
    "that it never tries."
)
_BY_RESPONSE = (
    "The mean entropy of each response that the step learns from. If the lower end falls to 0 while the "
    "median stands, the policy has become certain of some answers, and goes on exploring others."
)
_BY_POSITION = (
    "Where in its responses the policy is undecided. Half of the tokens at a position have more entropy than the line, "
    "and 80 % lie in the band. A band that has fallen to 0 from some position on means that the policy no longer "
    "explores there, whatever its mean entropy."
)
_AGAINST_TRUTH = (
    "Each point is one optimizer step. The truth is the change that was measured. On the dashed diagonal, "
    "forecast and truth are equal. If a point's blue bar does not touch the diagonal, the interval of the "
    "forecast missed the truth: of all 95 % intervals, 95 % should contain it."
)
_TRUST = (
    "After a step, the responses sampled before it no longer represent the policy as well: each counts as "
    "often as its beginning has become more likely. Late positions of long responses lose support first. A "
    "forecast is marked as not to be trusted if too much of the entropy lies at positions without support."
)
_COEFFICIENT = (
    "A trainer with an entropy bonus minimises its loss minus this coefficient times the mean entropy of a "
    "token. With the coefficient of the blue curve, the step would not have changed the entropy. It "
    "scatters with the batches."
)
_NOISE = (
    "The noise scale in prompts is the number of prompts per step at which the gradient of a step contains as "
    "much noise as signal. The curve is the noise scale now, filtered from the measured steps so far. Part of the "
    "noise comes from the completions: more completions per prompt would reduce this part. Only more prompts reduce "
    "the rest."
)
_PARTS_TEXT = (
    "The standard error has two sources: which prompts were evaluated, and, if the change is along the mean "
    "gradient of update prompts, which prompts those were. Along the optimizer's own step, only the first "
    "counts. Memory is counted on the device, or for the whole process on a CPU."
)


def _forecast_text(policy: Sequence[PolicyReading]) -> str:
    text = (
        "The change of the policy's entropy by each of these steps, from scores of evaluation responses before and "
        "after it. The interval shows the error that comes from a sample of prompts. Beside it is the change that was "
        "measured on fresh responses, if there were any."
    )
    if any(r.metrics.get("entropy/is_of_own_prompts") == 1.0 for r in policy):
        text += (
            " A forecast that is evaluated on the same prompts that the step learns from is biased by the effect of "
            "an update on its own prompts."
        )
    return text


def _causes_text(policy: Sequence[PolicyReading]) -> str:
    text = (
        "Each prompt has a part in the change of entropy, in nats. A negative part lowers the entropy. A long table "
        f"shows only the {_ROWS_AT_EACH_END} prompts at each end."
    )
    last = next((r for r in reversed(policy) if r.causes is not None), None)
    if last is None or last.causes is None:
        unknown = "This run did not measure which prompts of a step cause its change: attach with causes=True to know."
        return f"{text} {unknown}"
    causes = last.causes
    sources = {"this batch": causes.batch, "earlier batches (by momentum)": causes.momentum}
    if causes.decay:
        sources["weight decay"] = causes.decay
    parts = ", ".join(f"{number(value)} from {source}" for source, value in sources.items())
    text += f" The change by step {last.window:,} has these parts: {parts}."
    if causes.terms:
        terms = ", ".join(f"{number(value)} from the term {name}" for name, value in causes.terms.items())
        text += f" Of this batch's part, {terms}."
    if causes.doubt:
        text += f" The parts of its prompts are not to be trusted: {causes.doubt}."
    elif causes.explained is not None and not 0.9 < causes.explained < 1.1:
        text += (
            f" Of the batch's part, {number(unexplained(causes.batch, causes.explained))} is no prompt's and no named "
            "term's: it is from other terms of the loss, such as a KL penalty, an entropy bonus or clipped ratios, or "
            "from dropout."
        )
    return text


_SHARE = tuple(
    f"gns_prompts/{name}" for name in ("completions_share", "completions_share_low", "completions_share_high")
)


def _allocation_text(readings: Sequence[PolicyReading]) -> str:
    """What twice the completions and twice the prompts would do to the noise, by the last reading; "" if unknown."""
    for reading in reversed(readings):
        share, low, high = (reading.metrics.get(name) for name in _SHARE)
        if share is not None and low is not None and high is not None:
            return (
                f" At step {reading.window:,}, twice the completions to each prompt would have cut the noise of a step "
                f"by {percent(share / 2)} (95 % interval: {percent(low / 2)} to {percent(high / 2)}), and twice the "
                f"prompts by {percent(0.5)}, both with twice the tokens."
            )
    return ""


def _tables(run: Run) -> tuple[Plot | Table | str, ...]:
    """What learning from each prompt did to the entropy, and each evaluation prompt's part of the last forecast."""
    last = next((r for r in reversed(run.policy) if r.shares), None)
    tables: list[Plot | Table | str] = []
    if learned := sorted(_effects(run.policy).items(), key=lambda item: item[1][0]):
        rows = [
            (_on_one_line(text), *map(number, parts), f"{n_steps:,.0f}")
            for text, (*parts, n_steps) in _both_ends(learned)
        ]
        caption = "Effect of learning from each prompt, summed over the measured steps whose parts add up"
        heads = ("Prompt", "Change (nats)", "from rewarded tokens", "from penalised tokens", "Steps")
        tables.append(Table(caption, heads, tuple(rows), is_code=True))
    if last is not None:
        shares = _both_ends(sorted(last.shares, key=lambda part: part.change))
        rows = [(_on_one_line(str(of.prompt)), *map(number, (of.change, of.sharpening, of.drift))) for of in shares]
        caption = (
            f"Forecast change by step {last.window:,} on each evaluation prompt. Sharpening: token probabilities "
            "change at the same prefixes. Drift: other prefixes, and lengths, become likelier."
        )
        columns = ("Prompt", "Change (nats)", "by sharpening", "by drift")
        tables.append(Table(caption, columns, tuple(rows), is_code=True))
    if tables:
        return tuple(tables)
    if any(r.point.delta is not None for r in run.policy):
        return ("The forecasts of this run were logged without the parts of single prompts.",)
    return ("No forecast was made, so there are no parts by prompt.",)


def _effects(readings: Sequence[PolicyReading]) -> dict[str, list[float]]:
    """By prompt the change, its parts from rewarded and from penalised tokens, and the steps: sums over the run.

    Steps whose parts are not to be trusted are left out.
    """
    effects: dict[str, list[float]] = {}
    for causes in (r.causes for r in readings if r.causes is not None and not r.causes.doubt):
        for of in causes.prompts:
            before = effects.get(str(of.prompt), [0.0] * 4)
            step = (of.change, of.from_rewarded, of.from_penalised, 1)
            effects[str(of.prompt)] = [a + b for a, b in zip(before, step, strict=True)]
    return effects


def _both_ends(rows: list[T]) -> list[T]:
    """The first few rows and the last few, or all rows of a short table."""
    return rows if len(rows) <= 2 * _ROWS_AT_EACH_END else [*rows[:_ROWS_AT_EACH_END], *rows[-_ROWS_AT_EACH_END:]]


def _on_one_line(text: str) -> str:
    """The text of a prompt on one line, cut if it is too long for a table."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_PROMPT_LENGTH else f"{line[:_MAX_PROMPT_LENGTH]}…"


def _parts(readings: Sequence[PolicyReading]) -> Table | None:
    """The numbers behind the last forecast, and their medians over the run; None without a forecast."""
    forecasts = [r for r in readings if r.metrics.get(DELTA) is not None]
    if not forecasts:
        return None
    rows = []
    for name, column in METRICS.items():
        values = [v for r in forecasts if (v := r.metrics.get(name)) is not None]
        if column.is_listed and values:
            label = f"{column.short} ({column.unit})" if column.as_text is number else column.short
            last = forecasts[-1].metrics.get(name)
            rows.append((capital(label), column.text(last), column.text(median(values))))
    caption = "The numbers behind the forecast of the last measured step, and their medians over all measured steps"
    return Table(caption, ("", f"Step {forecasts[-1].window:,}", "Median"), tuple(rows))

"""The sections of a run with a policy, in order: figures and tables, with the text that a newcomer needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from sonde.policy.stats.attribution import other_terms
from sonde.runs.policy_reading import PolicyReading, PromptEffect, PromptPart
from sonde.runs.reader import Run
from sonde.runs.report.curve_style import TimeAxis, time_axis
from sonde.runs.report.curves import value_curve
from sonde.runs.report.figures import Plot, Table
from sonde.runs.report.policy_actions import allocation_text, coefficient_curve
from sonde.runs.report.policy_curves import (
    coverage_curve,
    entropy_curve,
    forecast_against_truth,
    forecast_curve,
    prompt_noise_curve,
)
from sonde.runs.report.policy_parts import forecast_parts, response_curve
from sonde.runs.report.policy_trust import own_policy_curve, trust_curves
from sonde.runs.report.sections import MAX_VALUES, Section, own_value_names
from sonde.runs.report.timeline import STEPS, timeline
from sonde.wording import number, plural, shorten

T = TypeVar("T")

_ROWS_AT_EACH_END = 6
"""A table lists this many prompts that lower the entropy most, and as many that raise it most."""
_MAX_PROMPT_LENGTH = 120
"""Characters."""


def policy_sections(run: Run) -> list[Section]:
    """All sections of a run in which a policy was measured at least once."""
    policy = run.policy
    axis = time_axis(timeline(policy, run.probe("policy").unit, windows=STEPS))
    sections = [
        Section(
            "Entropy of the policy",
            "The entropy says how undecided the policy is about each token. It is computed exactly, from all logits. "
            "If the entropy falls to almost 0 early, the policy has stopped exploring: it cannot learn from responses "
            "that it never tries.",
            (entropy_curve(policy, axis),),
        ),
        Section("Forecast and effect of each step", _forecast_text(policy), (forecast_curve(policy, axis),)),
        Section(
            "Forecast against truth",
            "Each point is one optimizer step. The truth is the change that was measured. On the dashed diagonal, "
            "forecast and truth are equal. If a point's blue bar does not touch the diagonal, the interval of the "
            "forecast missed the truth.",
            (forecast_against_truth(policy),),
        ),
        Section(
            "Coverage so far",
            "Of all 95 % intervals, 95 % should contain the truth. Only forecasts that can be trusted and were checked "
            "with fresh rollouts count here. The standard error of the rollouts is taken into account.",
            (coverage_curve(policy, axis),),
        ),
        Section(
            "Can the forecasts be trusted?",
            "After a step, the responses sampled before it no longer represent the policy as well: each counts as "
            "often as its beginning has become more likely. Late positions of long responses lose support first. A "
            "forecast is marked as not to be trusted if too much of the entropy lies at positions without support.",
            (trust_curves(policy, axis),),
        ),
        Section(
            "Are the evaluation responses the policy's own?",
            "If the policy has sampled a token, its −log π is the entropy, on average. Responses sampled at another "
            "temperature, cut off by top-p or top-k, or sampled by older weights depart from this.",
            (own_policy_curve(policy, axis),),
        ),
        Section("Prompts that change the entropy most", _causes_text(policy), _tables(policy, run.effects)),
        Section(
            "Noise scale in prompts",
            "The noise scale in prompts is the number of prompts per step at which the gradient of a step contains as "
            "much noise as signal. The curve is a running average over the measured steps, so it lags while the noise "
            "scale changes. Part of the noise comes from the completions: more completions per prompt would "
            f"reduce this part. Only more prompts reduce the rest.{allocation_text(policy)}",
            (prompt_noise_curve(policy, axis),),
        ),
    ]
    if (coefficient := coefficient_curve(policy, axis)) is not None:
        sections.insert(
            -1,
            Section(
                "Which entropy coefficient would hold the entropy?",
                "A trainer with an entropy bonus minimises its loss minus this coefficient times the mean entropy of a "
                "token. With the coefficient of the blue curve, the step would not have changed the entropy. It "
                "scatters with the batches.",
                (coefficient,),
            ),
        )
    if (by_response := response_curve(policy, axis)) is not None:
        sections.insert(
            1,
            Section(
                "Entropy by response",
                "The mean entropy of each response that the step learns from. If the lower end falls to 0 while the "
                "median stands, the policy has become certain of some answers, and goes on exploring others.",
                (by_response,),
            ),
        )
    sections.append(
        Section(
            "What each forecast is made of, and what it costs",
            "The standard error has two sources: which prompts were evaluated, and, if the change is along the mean "
            "gradient of update prompts, which prompts those were. Along the optimizer's own step, only the first "
            "counts. Memory is counted on the device, or for the whole process on a CPU.",
            (forecast_parts(policy),),
        )
    )
    if names := own_value_names(run, policy):
        sections.append(_values_section(policy, names, axis))
    return sections


def _values_section(policy: Sequence[PolicyReading], names: Sequence[str], axis: TimeAxis) -> Section:
    plots = []
    for name in names[:MAX_VALUES]:
        line = timeline([r for r in policy if r.metrics.get(name) is not None], "prompts", windows=STEPS)
        plots.append(value_curve(line, axis, name))
    hidden = [shorten(name) for name in names[MAX_VALUES:]]
    more = f" {plural(len(hidden), 'more value')} in the log: {', '.join(hidden[:10])}." if hidden else ""
    title = "Reward" if list(names) == ["reward"] else "Reward and other logged values"
    return Section(title, f"Values as the trainer logged them at the measured steps.{more}", tuple(plots))


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
    with_causes = [r for r in policy if r.causes is not None]
    if not with_causes:
        return (
            text
            + " This run did not measure which prompts of a step cause its change: attach with causes=True to know."
        )
    last = with_causes[-1]
    assert last.causes is not None
    sources = {"this batch": last.causes.batch, "earlier batches (by momentum)": last.causes.momentum}
    if last.causes.decay:
        sources["weight decay"] = last.causes.decay
    parts = ", ".join(f"{number(value)} from {source}" for source, value in sources.items())
    text += f" The change by step {last.window:,} has these parts: {parts}."
    if last.causes.doubt:
        text += f" The parts of its prompts are not to be trusted: {last.causes.doubt}."
    elif last.causes.explained is not None and not 0.9 < last.causes.explained < 1.1:
        text += (
            f" Of the batch's part, {number(other_terms(last.causes.batch, last.causes.explained))} is no prompt's: "
            "it is from other terms of the loss, such as a KL penalty, an entropy bonus or clipped ratios, or from "
            "dropout."
        )
    return text


def _tables(policy: Sequence[PolicyReading], effects: Mapping[str, PromptEffect]) -> tuple[Plot | Table | str, ...]:
    learned = sorted(effects.items(), key=lambda item: item[1].change)
    last = next((r for r in reversed(policy) if r.shares), None)
    tables: list[Plot | Table | str] = []
    if learned:
        tables.append(
            Table(
                "Effect of learning from each prompt, summed over the measured steps whose parts add up",
                ("Prompt", "Change (nats)", "from rewarded tokens", "from penalised tokens", "Steps"),
                tuple(
                    (
                        _on_one_line(text),
                        *map(number, (of.change, of.from_rewarded, of.from_penalised)),
                        f"{of.n_steps:,}",
                    )
                    for text, of in _both_ends(learned)
                ),
            )
        )
    if last is not None:
        shares = sorted(last.shares, key=lambda p: _or_zero(p.change))
        tables.append(
            Table(
                f"Forecast change by step {last.window:,} on each evaluation prompt. Sharpening: token probabilities "
                "change at the same prefixes. Drift: other prefixes, and lengths, become likelier.",
                ("Prompt", "Change (nats)", "by sharpening", "by drift"),
                tuple(_row(p, ("sharpening", "drift")) for p in _both_ends(shares)),
            )
        )
    if tables:
        return tuple(tables)
    if any(r.point.delta is not None for r in policy):
        return ("The forecasts of this run were logged without the parts of single prompts.",)
    return ("No forecast was made, so there are no parts by prompt.",)


def _row(part: PromptPart, names: Sequence[str]) -> tuple[str, ...]:
    return (_on_one_line(part.prompt), number(part.change), *(number(part.parts.get(name)) for name in names))


def _both_ends(rows: list[T]) -> list[T]:
    """The first few rows and the last few, or all rows of a short table."""
    return rows if len(rows) <= 2 * _ROWS_AT_EACH_END else [*rows[:_ROWS_AT_EACH_END], *rows[-_ROWS_AT_EACH_END:]]


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None else value


def _on_one_line(text: str) -> str:
    """The text of a prompt on one line, cut if it is too long for a table."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_PROMPT_LENGTH else f"{line[:_MAX_PROMPT_LENGTH]}…"

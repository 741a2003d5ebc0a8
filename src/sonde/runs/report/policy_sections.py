"""What the report shows of a policy, in order: each figure and table with the words a stranger needs to read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from sonde.runs.policy_reading import PolicyReading, PromptPart
from sonde.runs.reader import Run
from sonde.runs.report.curve_style import TimeAxis, time_axis
from sonde.runs.report.curves import value_curve
from sonde.runs.report.figures import Plot, Table
from sonde.runs.report.policy_curves import (
    coverage_curve,
    entropy_curve,
    forecast_against_truth,
    forecast_curve,
    prompt_noise_curve,
    trust_curves,
)
from sonde.runs.report.sections import MAX_VALUES, Section, own_value_names
from sonde.runs.report.timeline import timeline
from sonde.wording import number, percent, plural, shorten

T = TypeVar("T")

_LISTED = 6
"""Prompts at either end of a table."""
_LONGEST = 120


def policy_sections(run: Run) -> list[Section]:
    """All sections of a run in which a policy was measured at least once."""
    policy = run.policy
    axis = time_axis(timeline(policy, run.header.unit))
    found = [
        Section(
            "Entropy of the policy",
            "How undecided the policy is about each token, exactly, from all of its logits. One that falls to nothing "
            "early has stopped exploring: what it does not try, it cannot learn.",
            (entropy_curve(policy, axis),),
        ),
        Section("What each step was to do, and did", _forecast_text(policy), (forecast_curve(policy, axis),)),
        Section(
            "Forecast against truth",
            "Each point is one optimizer step. Where bar and diagonal do not meet, the forecast was wrong.",
            (forecast_against_truth(policy),),
        ),
        Section(
            "Coverage so far",
            "Of 95 % intervals, 95 % should hold what the step then did. Counted are forecasts that say they are to be "
            "trusted, beside fresh rollouts, whose own standard error is allowed for.",
            (coverage_curve(policy, axis),),
        ),
        Section(
            "Is the step small enough?",
            "A forecast is of first order. It says of itself that it is not to be trusted where first order and truth "
            "part on the same prefixes, or where few of the responses still stand for what the policy samples after "
            "the step.",
            (trust_curves(policy, axis),),
        ),
        Section("Prompts that cost most entropy", _causes_text(policy), _tables(policy)),
        Section(
            "Noise scale in prompts",
            "The number of prompts in a step at which its gradient is as much noise as signal. The part of it that is "
            "from completions would fall with more of them to each prompt, the rest only with more prompts.",
            (prompt_noise_curve(policy, axis),),
        ),
    ]
    if names := own_value_names(run, policy):
        found.append(_values_section(policy, names, axis))
    return found


def _values_section(policy: Sequence[PolicyReading], names: Sequence[str], axis: TimeAxis) -> Section:
    plots = []
    for name in names[:MAX_VALUES]:
        line = timeline([r for r in policy if r.metrics.get(name) is not None], "prompts")
        plots.append(value_curve(line, axis, name))
    hidden = [shorten(name) for name in names[MAX_VALUES:]]
    more = f" {plural(len(hidden), 'more value')} in the log: {', '.join(hidden[:10])}." if hidden else ""
    title = "Reward" if list(names) == ["reward"] else "Reward and other logged values"
    return Section(title, f"As the trainer logged it at the steps that were measured.{more}", tuple(plots))


def _forecast_text(policy: Sequence[PolicyReading]) -> str:
    text = (
        "Before each of these steps was taken, its effect on the entropy was forecast to first order, with the error "
        "that comes of evaluating it on a sample of prompts. Then it was measured."
    )
    is_own = [r for r in policy if r.metrics.get("entropy/is_of_own_prompts") == 1.0]
    if is_own:
        text += (
            " Evaluated on the very prompts that the step learns from, a forecast is biased by what an update does to "
            "its own prompts."
        )
    return text


def _causes_text(policy: Sequence[PolicyReading]) -> str:
    text = "Parts of the change by prompt, in nats; below zero they lower the entropy."
    with_causes = [r for r in policy if r.causes is not None]
    if not with_causes:
        return text + " Which prompts of a step cause what was not asked: attach with causes=True to know."
    last = with_causes[-1]
    assert last.causes is not None
    parts = {"this batch": last.causes.batch, "earlier batches, by momentum": last.causes.momentum}
    if last.causes.decay:
        parts["weight decay"] = last.causes.decay
    said = ", ".join(f"{number(value)} from {name}" for name, value in parts.items())
    text += f" Of step {last.window}: {said}."
    if last.causes.explained is not None and not 0.9 < last.causes.explained < 1.1:
        text += (
            f" Its prompts' parts add up to {percent(last.causes.explained)} of the batch's: clipped ratios, a KL "
            "term, or a step that is all sign have the rest."
        )
    return text


def _tables(policy: Sequence[PolicyReading]) -> tuple[Plot | Table | str, ...]:
    learned = _by_prompt(p for r in policy if r.causes for p in r.causes.prompts)
    last = next((r for r in reversed(policy) if r.shares), None)
    found: list[Plot | Table | str] = []
    if learned:
        found.append(
            Table(
                "What learning from a prompt did to the entropy, over all measured steps",
                ("Prompt", "Change", "from rewarded tokens", "from penalised tokens", "Steps"),
                tuple(
                    (_on_one_line(text), *map(number, _sums(parts)), str(len(parts))) for text, parts in _ends(learned)
                ),
            )
        )
    if last is not None:
        found.append(
            Table(
                f"Where step {last.window} was to change the entropy, on evaluation prompts",
                ("Prompt", "Change", "by sharpening", "by drift to other prefixes"),
                tuple(
                    _row(p, ("sharpening", "drift")) for p in _ends(sorted(last.shares, key=lambda p: _known(p.change)))
                ),
            )
        )
    return tuple(found) or ("No forecast was made, so no prompt has a part in one.",)


def _by_prompt(parts: Iterable[PromptPart]) -> list[tuple[str, list[PromptPart]]]:
    """By text, the one that lowers entropy most first."""
    of: dict[str, list[PromptPart]] = {}
    for part in parts:
        of.setdefault(part.prompt, []).append(part)
    return sorted(of.items(), key=lambda item: sum(_known(p.change) for p in item[1]))


def _sums(parts: Sequence[PromptPart]) -> list[float]:
    change = sum(_known(p.change) for p in parts)
    return [change, *(sum(_known(p.parts.get(name)) for p in parts) for name in ("from_rewarded", "from_penalised"))]


def _row(part: PromptPart, names: Sequence[str]) -> tuple[str, ...]:
    return (_on_one_line(part.prompt), number(part.change), *(number(part.parts.get(name)) for name in names))


def _ends(rows: list[T]) -> list[T]:
    """The first and the last few."""
    return rows if len(rows) <= 2 * _LISTED else [*rows[:_LISTED], *rows[-_LISTED:]]


def _known(value: float | None) -> float:
    return 0.0 if value is None else value


def _on_one_line(text: str) -> str:
    """A prompt, cut where it is too long for a table."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"

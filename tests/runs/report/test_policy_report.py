"""The report on a policy: its verdict, its figures or the reason why one is missing, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bokeh.models import Scatter

from sonde.runs.reader import read_run
from sonde.runs.report.curves import OverRun, TimeAxis, draw_panels
from sonde.runs.report.figures import Plot
from sonde.runs.report.policy_curves import entropy_panel, prompt_noise_plot
from sonde.runs.report.policy_sections import policy_sections
from sonde.runs.report.write import write_report
from sonde.runs.run import PolicyReading, own_value_names
from tests.runs.report.plausible_policy import policy_header, policy_record, write_policy_run
from tests.runs.report.plausible_run import header_record, reading_record, written
from tests.runs.report.visible_text import visible_text


def _entropy_plot(policy: Sequence[PolicyReading]) -> Plot:
    plot = draw_panels([entropy_panel()], policy, TimeAxis.of(policy, "prompts", noun="step"), "")
    assert isinstance(plot, Plot)
    return plot


def test_verdict_first_then_every_section(tmp_path: Path) -> None:
    text = visible_text(write_report(write_policy_run(tmp_path)))
    sections = [
        "Entropy of the policy adding by GRPO",
        "Entropy is falling Watch the reward, and act if it no longer rises.",
        "The policy's entropy is falling: 0.4",
        "It changed by −2.",
        "Entropy by response",
        "Forecast and effect of each step",
        "Forecast against truth",
        "Can the forecasts be trusted?",
        "Prompts that change the entropy most",
        "Which entropy coefficient would hold the entropy?",
        "Noise scale in prompts",
        "twice the completions to each prompt would have cut the noise of a step by 35 % (95 % interval: 30 % to 40 %)",
        "What each forecast is made of, and what it costs",
        "Step 116 Median Evaluation prompts, B E (prompts) 16 16 Update prompts, B U (prompts) 8 8",
        "Variance of the change from the evaluation prompts, V X (nats²)",
        "Variance of the change over its square 0.25 % 0.25 % Change to first order, or X̄·Ȳ (nats)",
        "Test that the responses are the policy's own (standard errors)",
        "Time of the forecast 400 ms 400 ms Of these, drawing evaluation responses 150 ms 150 ms",
        "Reward",
        "How this was measured",
    ]
    at = 0
    for section in sections:  # each after the one before; a list of contents names them first
        at = text.index(section, at)
    assert "Entropy by position" not in text  # the run has none
    for fact in (
        "Coverage 100 % 22 of 22 intervals contain the truth; between 85 % and 100 % of all would",
        "Average noise scale 35 prompts; between 6 and 40",
        "22 of 24 forecasts can be trusted.",
        "Step 1: not to be trusted: the step is too large for these responses",
        "Responses to evaluation prompts are scored before and after the step.",
        "400 ms per forecast, with the measured changes, on average",
        "evaluation: fresh responses to other prompts",
        "loss: dr_grpo",
    ):
        assert fact in text, fact


def test_the_log_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_policy_run(tmp_path, 3))
    assert [reading.window for reading in run.policy] == [1, 6, 11]
    assert run.readings == ()
    assert own_value_names(run, run.policy) == ["reward"]
    assert run.last is run.policy[-1]
    written, reading = policy_record(2), run.policy[2]
    assert reading.metrics == written["metrics"]
    assert reading.point.delta == written["metrics"]["entropy/delta_forecast"]
    assert [s.prompt for s in reading.shares] == [s["prompt"] for s in written["shares"]]
    assert [(s.change, s.drift) for s in reading.shares] == [(s["change"], s["drift"]) for s in written["shares"]]
    assert reading.causes.momentum == written["causes"]["momentum"]
    assert vars(reading.causes.prompts[0]) == written["causes"]["prompts"][0]
    assert run.ended == "training ended"


def test_tables_have_both_ends_and_add_up_over_steps(tmp_path: Path) -> None:
    run = read_run(write_policy_run(tmp_path, 4))
    [section] = [s for s in policy_sections(run) if s.title == "Prompts that change the entropy most"]
    learned, evaluated = section.content
    assert not isinstance(learned, str)
    rows = {row[0]: row for row in learned.rows}  # type: ignore[union-attr]
    assert len(rows) == 8
    assert all(row[-1] == "4" for row in rows.values())
    total = sum(part["change"] for i in range(4) for part in policy_record(i)["causes"]["prompts"][:1])
    assert float(rows["0+3="][1].replace("−", "-")) == pytest.approx(total, rel=5e-3)
    assert len(evaluated.rows) == 12  # type: ignore[union-attr]
    assert [row[0] for row in evaluated.rows[:2]] == ["0+3=", "1+3="]  # type: ignore[union-attr]
    assert evaluated.rows[-1][0] == "19+3="  # type: ignore[union-attr]


def test_parts_that_do_not_add_up_are_left_out_of_the_sum(tmp_path: Path) -> None:
    """As at Adam's first step under dropout: the parts say nothing of what the batch did."""
    records = [policy_record(i) for i in range(3)]
    for i, record in enumerate(records):
        record["causes"]["explained"] = 500.0 if i == 2 else 0.99
    run = read_run(written(tmp_path, [policy_header(), *records]))
    [section] = [s for s in policy_sections(run) if s.title == "Prompts that change the entropy most"]
    learned = section.content[0]
    assert {row[-1] for row in learned.rows} == {"2"}  # type: ignore[union-attr]
    assert "The parts of its prompts are not to be trusted: the parts of prompts and terms add up to" in section.text


NOTHING = {"shares": [], "causes": None}


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        (
            {"has_truth": False, "has_noise": False, "causes": None},
            [
                "Coverage – not known without fresh rollouts",
                "sonde.PromptNoiseProbe does",
                "attach with causes=True to know",
            ],
        ),
        (NOTHING, ["The forecasts of this run were logged without the parts of single prompts."]),
        (
            {"metrics": {"entropy/evaluation_per_token": 1.0}, **NOTHING},
            ["No forecast was made, so there are no parts by prompt."],
        ),
        (
            {"metrics": {"entropy/update_token_weighted": 1.0}, **NOTHING},
            [
                "No change of entropy was forecast in this run.",
                "No forecast can be compared with fresh responses",
                "Not known yet Measure on: nothing can be advised yet.",
                "It is not known yet whether the policy's entropy holds: 1.000 nats a token at step 36",
            ],
        ),
        (
            {"metrics": {"entropy/update_token_weighted": 1.0, "entropy/update_token_weighted_se": 0.02}, **NOTHING},
            ["Entropy holds Go on: the policy explores as it did.", "The policy's entropy holds: 1.000 ± 0.0"],
        ),
        (
            {"metrics": {"gns_prompts/prompts_per_window": 8.0}, **NOTHING},
            [
                "No verdict yet: no entropy was measured.",
                "No entropy was measured in this run.",
                "No measurement has an estimate or a bound of the noise scale in prompts yet",
            ],
        ),
    ],
)
def test_the_report_says_what_was_not_measured(tmp_path: Path, options: dict[str, Any], sentences: list[str]) -> None:
    text = visible_text(write_report(write_policy_run(tmp_path, 8, **options)))
    assert [sentence for sentence in sentences if sentence not in text] == []


@pytest.mark.parametrize(
    ("low", "high", "sentences", "legend"),
    [
        (6.0, None, "> 6 prompts; no upper limit known", "lower bound: the value lies above this"),
        (0.0, 12.0, "< 12 prompts; no lower limit known", "upper bound: the value lies below this"),
        (0.0, 0.0, "– no noise was seen", "upper bound: the value lies below this"),
        (None, None, "– prompts; not known yet", "No measurement has an estimate or a bound"),
    ],
)
def test_a_noise_scale_in_prompts_of_which_one_limit_is_known(
    tmp_path: Path, low: float | None, high: float | None, sentences: str, legend: str
) -> None:
    record = policy_record(2)
    ends = {"gns_prompts/b_simple": None, "gns_prompts/b_simple_low": low, "gns_prompts/b_simple_high": high}
    text = visible_text(write_report(write_policy_run(tmp_path, 4, metrics=record["metrics"] | ends)))
    assert f"Average noise scale {sentences}" in text
    assert legend in text
    section = text.split("The noise scale in prompts is the number")[1].split("What each forecast is made of")[0]
    for other in ("lower bound: the value", "upper bound: the value", "its confidence interval"):
        assert (other in section) == (other in legend)


def test_the_upper_bound_of_each_step_is_drawn_and_named(tmp_path: Path) -> None:
    ends = {"gns_prompts/b_simple": None, "gns_prompts/b_simple_low": 0.0, "gns_prompts/b_simple_high": 12.0}
    run = read_run(write_policy_run(tmp_path, 4, metrics=policy_record(2)["metrics"] | ends))
    plot = prompt_noise_plot(run.policy, TimeAxis.of(run.policy, "prompts", noun="step"))
    assert isinstance(plot, Plot)
    renderers = plot.figures[0].renderers
    marks = {r.glyph.marker: list(r.data_source.data["y"]) for r in renderers if isinstance(r.glyph, Scatter)}
    assert (marks["inverted_triangle"], "triangle" in marks) == ([12.0] * 4, False)
    hover = [list(r.data_source.data["text0"]) for r in renderers if "text0" in r.data_source.data]
    assert hover[0] == ["less than 12"] * 4


def test_a_negative_entropy_is_within_its_axis(tmp_path: Path) -> None:
    """As that of a policy over continuous actions may be."""
    path = write_policy_run(
        tmp_path, 4, metrics={"entropy/evaluation_per_token": -1.5, "entropy/evaluation_per_token_se": 0.1}
    )
    policy = read_run(path).policy
    axis = _entropy_plot(policy).figures[0].y_range
    assert axis.start < -1.5 - 2 * 0.1
    assert axis.end >= 0
    of_tokens = read_run(write_policy_run(tmp_path / "tokens", 4)).policy
    assert _entropy_plot(of_tokens).figures[0].y_range.start == 0


def test_a_run_with_noise_scale_and_policy_shows_both(tmp_path: Path) -> None:
    both = [make for i in range(5) for make in (reading_record(i, 5, status="resolved"), policy_record(i))]
    text = visible_text(write_report(written(tmp_path, [header_record(), *both])))
    assert "Batch size and gradient noise, entropy of the policy" in text
    places = [
        "No verdict yet",
        "Entropy is falling",
        "What the batch size costs",
        "Noise and signal",
        "Forecast against",
    ]
    assert [*map(text.index, places)] == sorted(map(text.index, places))


@pytest.mark.parametrize(
    ("starts", "n_left_out"),
    [
        ((range(10), range(4, 12)), 6),
        ((range(10), range(8)), 10),
        (((*range(10), *range(4, 12)),), 6),  # a loop may go back to a checkpoint without a new log
    ],
)
def test_steps_that_were_taken_again_break_the_curves_and_are_left_out_of_the_verdict(
    tmp_path: Path, starts: tuple[Sequence[int], ...], n_left_out: int
) -> None:
    for steps in starts:
        written(tmp_path, [policy_header(), *map(policy_record, steps)])
    policy = read_run(tmp_path).policy
    line = OverRun.of(policy, TimeAxis.of(policy, "prompts", noun="step"))
    assert [row and row.window for row in line.rows].index(None) == 10
    assert line.rows.count(None) == 1
    text = visible_text(write_report(tmp_path))
    said = f"A restart took steps again: {n_left_out} measurements of these steps before the restart are left out."
    assert said in text
    assert "the run was restarted here" in text


def test_a_collapse_is_a_current_alert(tmp_path: Path) -> None:
    message = "the policy's entropy has collapsed to 0.1 nats a token"
    last = policy_record(2, alerts={"entropy_collapse": message})
    alert = {"kind": "alert", "time": 1.0, "window": 11, "name": "entropy_collapse", "message": message}
    records = [policy_header(), policy_record(0), policy_record(1), last, alert]
    text = visible_text(write_report(written(tmp_path, records)))
    assert f"Something looks wrong T{message[1:]} (since step 11)" in text
    assert "window" not in text.lower()

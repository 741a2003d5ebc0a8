"""What the report says of a policy: a verdict, figures or why there are none, tables."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from sonde.runs.reader import read_run
from sonde.runs.report.policy_sections import policy_sections
from sonde.runs.report.write import write_report
from sonde.runs.sinks import JsonlSink
from tests.runs.report.plausible_policy import policy_header, policy_record, write_policy_run
from tests.runs.report.plausible_run import header_record, reading_record


def text_of(report: Path) -> str:
    """What a reader sees, without tags and scripts; spaces are single."""
    body = re.sub(r"<(script|style)>.*?</\1>", "", report.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_verdict_first_then_every_section(tmp_path: Path) -> None:
    text = text_of(write_report(write_policy_run(tmp_path)))
    sections = [
        "Entropy of the policy adding by GRPO",
        "Entropy holds",
        "The policy's entropy is 0.429 nats a token at step 116, and was 2.70 at step 1.",
        "What each step was to do, and did",
        "Forecast against truth",
        "Coverage so far",
        "Is the step small enough?",
        "Prompts that cost most entropy",
        "Noise scale in prompts",
        "Reward",
        "How this was measured",
    ]
    places = [text.index(section) for section in sections]
    assert places == sorted(places)
    for fact in (
        "Coverage 100 % 22 of 22 intervals held the truth",
        "Noise scale 35 prompts; between 6 and 40",
        "22 forecasts of 24 to be trusted",
        "Step 1: not to be trusted: the step is too large to be linear",
        "400 ms a forecast with its truths, on average",
        "fresh responses to other prompts.",
        "loss: dr_grpo",
    ):
        assert fact in text, fact


def test_the_log_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(write_policy_run(tmp_path, 3))
    assert [reading.window for reading in run.policy] == [1, 6, 11]
    assert run.readings == ()
    assert run.last is run.policy[-1]
    written, found = policy_record(2), run.policy[2]
    assert found.metrics == written["metrics"]
    assert found.point.delta == written["metrics"]["entropy/delta_forecast"]
    assert [(s.prompt, s.change, s.parts["drift"]) for s in found.shares] == [
        (s["prompt"], s["change"], s["drift"]) for s in written["shares"]
    ]
    assert found.causes is not None
    assert found.causes.momentum == written["causes"]["momentum"]
    assert found.causes.prompts[0].parts == {
        name: written["causes"]["prompts"][0][name] for name in ("from_rewarded", "from_penalised")
    }
    assert run.ended == "training ended"


def test_tables_have_both_ends_and_add_up_over_steps(tmp_path: Path) -> None:
    run = read_run(write_policy_run(tmp_path, 4))
    [section] = [s for s in policy_sections(run) if s.title == "Prompts that cost most entropy"]
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


NOTHING = {"shares": [], "causes": None}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"has_truth": False}, "importance sampling reuses the responses of the forecast"),
        ({"has_noise": False}, "turn gns_probe on"),
        ({"causes": None}, "attach with causes=True to know"),
        (NOTHING, "No forecast was made, so no prompt has a part in one."),
        ({"metrics": {"entropy/token_weighted": 1.0}, **NOTHING}, "No change of entropy was forecast in this run."),
        ({"metrics": {"entropy/token_weighted": 1.0}, **NOTHING}, "No forecast has a truth to stand beside"),
        ({"metrics": {"entropy/token_weighted": 1.0}, **NOTHING}, "No verdict yet: no entropy was measured."),
        ({"metrics": {"gns_prompts/prompts_per_window": 8.0}, **NOTHING}, "No entropy was measured in this run."),
        ({"metrics": {"gns_prompts/prompts_per_window": 8.0}, **NOTHING}, "No measurement has resolved or bounded"),
    ],
)
def test_what_was_not_measured_is_said(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    assert said in text_of(write_report(write_policy_run(tmp_path, 8, **options)))


def test_a_run_with_both_has_both(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(header_record())
    for i in range(5):
        sink.write(reading_record(i, 5, status="resolved"))
        sink.write(policy_record(i))
    sink.close()
    text = text_of(write_report(tmp_path))
    assert "Batch size and gradient noise, entropy of the policy" in text
    assert text.index("Batch too small") < text.index("Entropy holds") < text.index("Noise and signal")
    assert text.index("What the batch size costs") < text.index("Forecast against truth")


def test_a_collapse_is_an_alert_of_now(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(policy_header())
    said = "the policy's entropy has collapsed to 0.1 nats a token"
    for i in range(3):
        sink.write(policy_record(i, alerts={"entropy_collapse": said} if i == 2 else {}))
    sink.write({"kind": "alert", "time": 1.0, "window": 11, "name": "entropy_collapse", "message": said})
    sink.close()
    text = text_of(write_report(tmp_path))
    assert f"Something looks wrong {said} (since window 11)" in text


@pytest.mark.parametrize(
    "change",
    [{"metrics": []}, {"shares": {}}, {"causes": 1}, {"window": -1}, {"alerts": None}, {"metrics": {"a": "x"}}],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(policy_header())
    sink.write(policy_record(0) | change)
    sink.close()
    with pytest.raises(ValueError, match=r"line 2 of .* is not a record of schema 1"):
        read_run(tmp_path)

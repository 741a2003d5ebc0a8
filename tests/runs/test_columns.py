"""One row of a table of columns is all that a new number needs: it is in the log, in a tracker, readable and drawn."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sonde.batch_size.stats.columns import METRICS as NOISE_SCALE
from sonde.policy.stats.columns import METRICS as POLICY
from sonde.runs.report.curves import panels_of
from sonde.stats.columns import BLUE, Curve, Metric, Panel, interval, taken
from sonde.stats.intervals import RatioInterval, logged_interval

NEW_ROWS = """
import importlib.util, sys

ROWS = {
    "sonde.batch_size.stats.columns": (
        '    "gns/u": Metric',
        '    "gns/halves": Metric(UNIT, "half of it", lambda of: of.effective_units / 2, _SCALE, term="Half"),',
    ),
    "sonde.policy.stats.columns": (
        '    "entropy/v_x": ',
        '    "entropy/doubled": Metric("nats", "twice it", lambda of: 2 * of.delta, Panel("Twice", "A section")),',
    ),
}
for name, (before, row) in ROWS.items():  # as if the row stood in the file
    spec = importlib.util.find_spec(name)
    source = open(spec.origin).read()
    assert source.count(before) == 1
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(before, row + "\\n" + before), spec.origin, "exec"), module.__dict__)

import json, torch, sonde
from sonde.policy.stats.entropy_forecast import EntropyForecast

folder, seen = sys.argv[1], {}
log = sonde.RunLog([sonde.JsonlSink(folder), sonde.FunctionSink(lambda metrics, step: seen.update(metrics))], every=1)
model = torch.nn.Linear(4, 1)
probe, policy = sonde.attach(model, unit="rows", log=log, every=1, verbose=False), sonde.PolicyLog(log)
for step in range(1, 5):
    for _ in range(3):
        with probe.piece(units=4):
            (model(torch.randn(4, 4)) - 2).square().mean().backward()
    probe.step()
    model.zero_grad()
    forecast = EntropyForecast(delta=-0.25 * step, entropy=2.0, reason="", objective="per_token", update="step")
    policy.measured(step, forecast.metrics(), forecast)
policy.end("done")
probe.close()

run = sonde.read_run(folder)
from sonde.runs.report.how_measured import how_measured
from sonde.runs.report.write import report_sections
drawn = {s.title: [part.in_words for part in s.content if hasattr(part, "in_words")] for s in report_sections(run)}
names = ("gns/halves", "entropy/doubled")
print(json.dumps({
    "tracker": {name: seen[name] for name in names},
    "read": {name: run.series(name) for name in names},
    "described": {name: [run.metrics[name].unit, run.metrics[name].meaning] for name in names},
    "drawn": drawn,
    "measured": {row.term: row.paragraphs for row in how_measured(run)},
}))
"""


def test_a_row_is_all_that_a_new_number_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", NEW_ROWS, str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert found["tracker"] == {"gns/halves": 6.0, "entropy/doubled": -2.0}
    assert found["read"]["gns/halves"] == [[1, 2, 3, 4], [6.0] * 4]
    assert found["read"]["entropy/doubled"] == [[1, 2, 3, 4], [-0.5, -1.0, -1.5, -2.0]]
    assert found["described"]["gns/halves"] == ["rows", "half of it"]
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [r["metrics"]["gns/halves"] for r in lines if r["kind"] == "reading"] == [6.0] * 4
    [scale] = found["drawn"]["Noise scale and batch size"]
    assert "half of it: 6 at first, 6 at last" in scale
    assert found["measured"]["Half"] == ["6: half of it."]
    [own] = found["drawn"]["A section"]
    assert "twice it: −0.500 at first, −2 at last" in own


@dataclass(frozen=True)
class Measured:
    """What has an interval."""

    ratio: RatioInterval | None


@pytest.mark.parametrize(
    ("known", "mark"),
    [
        (RatioInterval("resolved", 2.0, 5.0, ratio=3.0), "line"),
        (RatioInterval("lower_bound", 2.0, math.inf), "up"),
        (RatioInterval("upper_bound", 0.0, 5.0), "down"),
        (RatioInterval("unresolved", None, None), None),
        (None, None),
    ],
)
def test_an_interval_is_read_back_as_it_was_written_and_drawn_as_far_as_it_is_known(
    known: RatioInterval | None, mark: str | None
) -> None:
    columns = interval(
        "gns/x", "rows", "x", of="ratio", value="ratio", panel=Panel("x", "X"), curve=Curve("interval", BLUE)
    )
    metrics = taken(columns, Measured(known))
    assert list(metrics) == ["gns/x", "gns/x_low", "gns/x_high"]
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    read = logged_interval(metrics, "gns/x")
    assert read == (known or RatioInterval("unresolved", None, None))
    [panel] = panels_of(columns, "X")
    reading = type("Reading", (), {"metrics": metrics})

    def value(curve: Curve) -> float | None:
        return metrics[curve.value] if isinstance(curve.value, str) else curve.value(reading)

    drawn = [curve.mark for curve in panel.curves if value(curve) is not None]
    assert drawn == ({"line": ["line", "band"]}.get(mark or "", [mark] if mark else []))
    assert panel.hover["x"](reading) == read.in_words


def test_a_column_that_takes_what_is_not_there_is_a_mistake_and_not_an_unknown_number() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ration'"):
        taken({"x": Metric("", "", "ratio.ration")}, Measured(RatioInterval("unresolved", None, None)))
    assert taken({"x": Metric("", "", "ratio.low")}, Measured(None)) == {"x": None}


def test_names_and_units_of_columns_are_such_as_every_tracker_takes() -> None:
    for name, column in {**NOISE_SCALE, **POLICY}.items():
        assert name.replace("/", "").replace("_", "").isalnum(), name
        assert column.unit, name
        assert column.meaning, name

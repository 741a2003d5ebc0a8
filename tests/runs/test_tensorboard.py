from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sonde.log.trackers import TensorBoardSink
from tests.runs.report.plausible_run import GROUPS, STARTED, alert_record, end_record, header_record, reading_record

SCRIPT = "<script>alert(1)</script>"


HEADER = header_record(run=SCRIPT, metadata={"note": SCRIPT})
READINGS = [reading_record(i, 12) for i in range(12)]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the sink has written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path_factory.mktemp("events")
    sink = TensorBoardSink(folder)
    for record in (HEADER, *READINGS, alert_record(SCRIPT), end_record(120)):
        sink.write(record)
    sink.close()
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return events


def test_values_come_back_at_their_windows(events: Any) -> None:
    for name in ("gns/b_simple", "gns/b_simple_low", "gns/grad_sq", "grad/norm", "loss", "cost/fraction"):
        known = [(r["window"], r["metrics"][name]) for r in READINGS if r["metrics"][name] is not None]
        scalars = events.Scalars("sonde/loss" if name == "loss" else name)  # the user may have a "loss" of his own
        assert [s.step for s in scalars] == [window for window, _ in known]
        assert [s.value for s in scalars] == pytest.approx([v for _, v in known], rel=1e-6)  # stored as float32
    assert len(events.Scalars("gns/b_simple")) < 12  # a null is a gap, not a point
    assert events.Scalars("sonde/loss")[0].wall_time == pytest.approx(STARTED + 53)
    for group in GROUPS:
        known = [r["groups"][group]["b_simple"] for r in READINGS if r["groups"][group]["b_simple"] is not None]
        tag = f"gns_by_group/{group.replace('.', '_')}"  # names that all trackers take
        values = [s.value for s in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []
        assert values == pytest.approx(known, rel=1e-6)


# TensorBoard's copy of bleach warns of itself when it is imported.
@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")
def test_texts_are_shown_as_written_and_run_nothing(events: Any) -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    for tag in ("sonde/run/text_summary", "sonde/alert/same_data/text_summary"):
        (event,) = events.Tensors(tag)
        shown = markdown_to_safe_html(event.tensor_proto.string_val[0])
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
        assert "<script" not in shown
    text = events.Tensors("sonde/run/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(html.unescape(text).removeprefix("<pre>").removesuffix("</pre>")) == HEADER


def test_without_tensorboard_the_error_names_an_install_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"TensorBoardSink needs tensorboard: pip install 'gradsonde\[tensorboard\]'"):
        TensorBoardSink(tmp_path)

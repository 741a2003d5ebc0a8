"""Two logs, a successor or a lock: what waits while SIGTERM's records and reports are written, and what must not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import bokeh.plotting  # noqa: F401  (here, so that the children need not import it)
import pytest

import sonde.runs.report.page  # noqa: F401
from sonde.runs.reader import read_run
from tests.terminated import CATCHES, RAISES, SEND, TOLD, ends_of, records_of, run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def test_two_logs_both_end(tmp_path: Path) -> None:
    after = "other = sonde.RunLog(sonde.JsonlSink(sys.argv[1] + '/other'))\nsonde.PolicyLog(other)"
    status, _, err = run_script(tmp_path, after=after)
    assert status == -signal.SIGTERM
    assert (ends_of(tmp_path), ends_of(tmp_path / "other")) == ([TOLD], [TOLD])
    assert (tmp_path / "report.html").exists()
    assert "could not write a report" in err  # the other log holds nothing to report


OTHER = """
other = sonde.PolicyLog(sonde.RunLog(sonde.JsonlSink(sys.argv[1] + "/other")))
other.measured(1, {"entropy/evaluation_per_token": 2.0})
folders = [sys.argv[1], sys.argv[1] + "/other"]
def have(text):
    print([text in open(f"{folder}/records.jsonl").read() for folder in folders], flush=True)
def reported():
    print([os.path.exists(f"{folder}/report.html") for folder in folders], flush=True)
"""


def test_two_logs_write_no_report_before_a_handler_that_goes_on(tmp_path: Path) -> None:
    """It is called at once, and may need the seconds that reports take."""
    before = "signal.signal(signal.SIGTERM, lambda *_: reported())"
    end = "probe.close(); other.end('done'); reported()"
    status, out, _ = run_script(tmp_path, before=before, after=OTHER, end=end)
    assert (status, out) == (0, "[False, False]\nwent on\n[True, True]\n")


@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"])
def test_two_logs_have_their_end_records_before_the_first_report(tmp_path: Path, handler: str) -> None:
    say = """
from sonde.runs.report import write as writing
write_report = writing.write_report
writing.write_report = lambda folder: (have('"kind":"end"'), write_report(folder))
"""
    status, out, _ = run_script(tmp_path, before=handler, after=OTHER + say)
    assert (status, out) == (7 if handler else -signal.SIGTERM, "[True, True]\n" * 2)
    assert all((folder / "report.html").exists() for folder in (tmp_path, tmp_path / "other"))


SUCCESSOR = """
from sonde.runs import locked_file
from sonde.runs.report import write as writing
from tests.runs.report.plausible_run import header_record
locked_file.SECONDS_TO_WAIT = 0
write_report = writing.write_report
def reported(folder):
    successor = sonde.JsonlSink(folder)
    try:
        successor.write(header_record(unit="rows"))
        print("the successor began", flush=True)
    except ValueError as error:
        print(error, flush=True)
    successor.close()
    return write_report(folder)
writing.write_report = reported
"""


@pytest.mark.parametrize(
    ("before", "status"),
    [
        ("", -signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7),
        ("signal.signal(signal.SIGTERM, lambda *_: (probe.close(), os._exit(7)))", 7),
    ],
)
def test_a_successor_can_begin_while_the_report_is_written(tmp_path: Path, before: str, status: int) -> None:
    """A report takes seconds, longer than a successor waits for the lock."""
    assert run_script(tmp_path, before=before, after=SUCCESSOR)[:2] == (status, "the successor began\n")
    assert (ends_of(tmp_path), len(read_run(tmp_path).headers)) == ([TOLD], 2)


def test_a_run_that_goes_on_after_its_successor_began_writes_no_more(tmp_path: Path) -> None:
    send = CATCHES.format(SEND, "[window() for _ in range(8)]\n    print(*probe.alerts)")
    status, out, _ = run_script(tmp_path, before=RAISES, after=SUCCESSOR, send=send, end="probe.close()")
    alerts = "log_refused_JsonlSink log_stopped_JsonlSink"
    assert (status, out) == (0, f"the successor began\n{alerts}\nwent on\n")
    kinds = [record["kind"] for record in records_of(tmp_path)]
    assert kinds[-2:] == ["end", "header"]


def test_a_signal_within_tensorboards_lock_ends_the_process(tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard")
    after = """
from tensorboard.summary.writer.event_file_writer import _AsyncWriter
class Own:
    def metrics(self): return {"mine": 1.0}
own, folder = Own(), sys.argv[1] + "/both"
probe.close()
log = sonde.RunLog([sonde.TensorBoardSink(folder), sonde.JsonlSink(folder)], every=100)
probe = sonde.attach(model, unit="rows", log=log, verbose=False)
log.measure(own, 1)
check = _AsyncWriter._check_worker_status  # called with the lock held
def interrupted(writer):
    _AsyncWriter._check_worker_status = check
    signal.raise_signal(signal.SIGTERM)
    check(writer)
"""
    send = "_AsyncWriter._check_worker_status = interrupted\nsignal.alarm(60)  # ends a deadlock\nlog.measure(own, 2)"
    status, _, _ = run_script(tmp_path, after=after, send=send)
    assert (status, ends_of(tmp_path / "both")) == (-signal.SIGTERM, [TOLD])
    assert [reading.window for reading in read_run(tmp_path / "both").readings] == [5]

"""SIGTERM leaves an `end` record and a report, and does to the process what it would have done without sonde."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from pathlib import Path

import bokeh.plotting  # noqa: F401  (here, so that the children need not import it)
import pytest
from torch import nn

import sonde
import sonde.runs.report.page
from sonde.runs.reader import read_run
from sonde.termination import OnTermination
from tests.terminated import CATCHES, RAISES, SEND, TOLD, ends_of, records_of, run_script

MINE = "signal.signal(signal.SIGTERM, lambda *_: print('mine', flush=True))"
EXITS = "def stop(*_):\n    {}\nsignal.signal(signal.SIGTERM, stop)"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def test_without_a_handler_the_process_ends_by_the_signal_with_an_end_record_and_a_report(tmp_path: Path) -> None:
    status, out, _ = run_script(tmp_path)
    assert (status, out) == (-signal.SIGTERM, "")
    run = read_run(tmp_path)
    assert (run.ended, [reading.window for reading in run.readings]) == (TOLD, [2, 4, 5])
    assert "Ended: the process was told to end (SIGTERM)." in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("every", "windows", "read"), [(10, 9, [9]), (10, 19, [10, 19]), (1, 12, [*range(1, 13)])])
def test_no_measured_window_is_lost(tmp_path: Path, every: int, windows: int, read: list[int]) -> None:
    """Windows since the last reading are read before the `end` record, with their groups."""
    status, _, _ = run_script(tmp_path, every=every, windows=windows)
    assert status == -signal.SIGTERM
    run = read_run(tmp_path)
    assert [reading.window for reading in run.readings] == read
    assert (records_of(tmp_path)[-1]["window"], run.totals.last_groups) == (read[-1], read[-1])
    assert run.readings[-1].groups.keys() == {"weight", "bias"}
    assert (tmp_path / "report.html").exists()


def test_the_end_record_is_the_last_while_another_thread_trains(tmp_path: Path) -> None:
    train = "import threading, time\ntraining = threading.Thread(target=lambda: [window() for _ in range(10**7)])"
    wait = "training.daemon = True\ntraining.start()\ntime.sleep(0.3)"
    slow_report = """
write_report = sonde.JsonlSink.write_report
sonde.JsonlSink.write_report = lambda sink: (time.sleep(0.3), write_report(sink), time.sleep(0.3))
"""
    status, _, _ = run_script(tmp_path, after=slow_report, send=f"{train}\n{wait}\n{SEND}")
    assert status == -signal.SIGTERM
    assert (records_of(tmp_path)[-1]["kind"], read_run(tmp_path).ended) == ("end", TOLD)
    assert len(read_run(tmp_path).readings) > 2
    assert "Ended: the process was told to end (SIGTERM)." in (tmp_path / "report.html").read_text()


def test_a_signal_that_interrupts_the_probe_leaves_its_numbers_alone(tmp_path: Path) -> None:
    """The probe must not be entered a second time while it takes a window in."""
    before = "signal.signal(signal.SIGTERM, lambda *_: None)"
    after = f"""
update, n = probe._tracker.update, []
def interrupted(row, **known):
    drop = update(row, **known)
    n.append(1)
    if len(n) == 2:
        {SEND}
    return drop
probe._tracker.update = interrupted
"""
    status, _, _ = run_script(tmp_path, before=before, after=after, send="pass", end="probe.close()")
    assert status == 0
    run = read_run(tmp_path)
    assert [reading.window for reading in run.readings] == [2, 4, 6]
    assert (run.readings[-1].metrics["run/units_seen"], ends_of(tmp_path)[0]) == (48, TOLD)


@pytest.mark.parametrize("handler", ["global stop; stop = True", "probe.close(); sys.exit(3)"])
def test_a_graceful_shutdown_leaves_a_report(tmp_path: Path, handler: str) -> None:
    """A handler that sets a flag, after which the loop breaks; and one that closes the probe and exits."""
    before = f"stop = False\ndef shut_down(*_):\n    {handler}\nsignal.signal(signal.SIGTERM, shut_down)"
    send = f"{SEND}\nwhile not stop:\n    window()"
    status, _, _ = run_script(tmp_path, before=before, send=send, end="probe.close()")
    run = read_run(tmp_path)
    assert "the process was told to end (SIGTERM)" in str(run.ended)
    text = (tmp_path / "report.html").read_text()
    assert f"Ended: {run.ended}." in text
    assert [reading.window for reading in run.readings][-1] == (6 if status == 0 else 5)


def test_a_handler_of_the_users_that_goes_on_is_called_and_the_log_goes_on(tmp_path: Path) -> None:
    """As one that asks the loop to save a checkpoint and stop."""
    status, out, _ = run_script(tmp_path, before=MINE, end="probe.close()")
    assert (status, out) == (0, "mine\nwent on\n")
    assert ends_of(tmp_path) == [TOLD, f"closed, after {TOLD}"]
    run = read_run(tmp_path)
    assert (run.ended, [reading.window for reading in run.readings]) == (f"closed, after {TOLD}", [2, 4, 5, 6])


def test_until_a_run_that_goes_on_has_ended_it_has_not(tmp_path: Path) -> None:
    """Cut off after it went on: the `end` record of the signal does not count."""
    before = "signal.signal(signal.SIGTERM, lambda *_: None)"
    status, _, _ = run_script(tmp_path, before=before, end="probe.reading(); os._exit(0)")
    assert status == 0
    assert (read_run(tmp_path).ended, ends_of(tmp_path)) == (None, [TOLD])


def test_a_handler_of_the_users_that_exits_has_its_status_and_a_report(tmp_path: Path) -> None:
    status, out, _ = run_script(tmp_path, before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))")
    assert (status, out) == (7, "")
    assert ends_of(tmp_path) == [TOLD]
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "last", ["sys.exit(7)", "os._exit(7)", "probe.close(); sys.exit(7)", "probe.close(); os._exit(7)"]
)
def test_a_process_that_a_handler_ends_leaves_one_end_record_the_first(tmp_path: Path, last: str) -> None:
    """Also if the handler, or what runs at exit, closes the probe: the log says why the run ended, not how."""
    handler = EXITS.format(last)
    send = f"try:\n    {SEND}\nfinally:\n    probe.close()"
    status, _, _ = run_script(tmp_path, before=handler, send=send)
    assert (status, ends_of(tmp_path)) == (7, [TOLD])
    run = read_run(tmp_path)
    assert (run.ended, [reading.window for reading in run.readings]) == (TOLD, [2, 4, 5])


def test_a_handler_that_raises_into_a_loop_that_goes_on_loses_no_reading(tmp_path: Path) -> None:
    """The loop may catch it, and train on."""
    send = CATCHES.format(SEND, "[window() for _ in range(8)]")
    status, out, _ = run_script(tmp_path, before=RAISES, send=send, end="probe.close()")
    assert (status, out) == (0, "went on\n")
    run = read_run(tmp_path)
    assert run.ended == f"closed, after {TOLD}"
    assert [reading.window for reading in run.readings] == [2, 4, 5, 6, 8, 10, 12, 14]
    assert ends_of(tmp_path) == [TOLD, f"closed, after {TOLD}"]


def test_a_handler_that_closes_the_probe_and_returns_leaves_one_end_record(tmp_path: Path) -> None:
    handler = EXITS.format("probe.close()")
    send = f"{SEND}\nprint('closed', flush=True)\nos._exit(0)"
    status, out, _ = run_script(tmp_path, before=handler, send=send)
    assert (status, out, ends_of(tmp_path)) == (0, "closed\n", [TOLD])
    assert read_run(tmp_path).ended == TOLD


def test_a_handler_installed_later_replaces_this_one(tmp_path: Path) -> None:
    status, out, _ = run_script(tmp_path, after=MINE, end="probe.close()")
    assert (status, out, ends_of(tmp_path)) == (0, "mine\nwent on\n", ["closed"])


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    status, out, _ = run_script(tmp_path, before="signal.signal(signal.SIGTERM, signal.SIG_IGN)", end="probe.close()")
    assert (status, out, ends_of(tmp_path)) == (0, "went on\n", ["closed"])


def test_a_child_that_is_told_to_end_ends_alone(tmp_path: Path) -> None:
    # The child says that it runs: Python forgets a signal that arrives while it forks.
    fork = """
import time
reads, writes = os.pipe()
if (child := os.fork()) == 0:
    os.write(writes, b"x")
    time.sleep(60)
    os._exit(9)
os.read(reads, 1)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], flush=True)
"""
    status, out, _ = run_script(tmp_path, send=fork, end="probe.close()")
    assert (status, out) == (0, f"{int(signal.SIGTERM)}\nwent on\n")
    assert ends_of(tmp_path) == ["closed"]
    assert not (tmp_path / "report.html").exists()


def test_what_was_there_before_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    first = sonde.attach(nn.Linear(3, 1), unit="rows", log=sonde.RunLog(sonde.JsonlSink(tmp_path / "a")), verbose=False)
    second = sonde.attach(
        nn.Linear(3, 1), unit="rows", log=sonde.RunLog(sonde.JsonlSink(tmp_path / "b")), verbose=False
    )
    assert isinstance(signal.getsignal(signal.SIGTERM), OnTermination)
    first.close()  # out of order
    second.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_log_without_sinks_and_a_thread_install_nothing(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with sonde.attach(nn.Linear(3, 1), unit="rows", verbose=False):
        assert signal.getsignal(signal.SIGTERM) is before
    failures: list[BaseException] = []

    def in_a_thread() -> None:
        try:
            log = sonde.RunLog(sonde.JsonlSink(tmp_path))
            with sonde.attach(nn.Linear(3, 1), unit="rows", log=log, verbose=False):
                assert signal.getsignal(signal.SIGTERM) is before
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join(60)
    assert failures == []


def test_a_report_that_fails_does_not_keep_the_process(tmp_path: Path) -> None:
    after = "sys.modules['bokeh'] = None"  # as if it were not installed
    status, _, err = run_script(tmp_path, after=after)
    assert status == -signal.SIGTERM
    assert "JsonlSink could not write a report: the report needs bokeh" in err
    assert ends_of(tmp_path) == [TOLD]


def test_nothing_is_held_alive(tmp_path: Path) -> None:
    sink = sonde.JsonlSink(tmp_path)
    log = sonde.RunLog(sink)
    sonde.PolicyLog(log)
    gone = weakref.ref(log)
    del log
    gc.collect()
    assert gone() is None
    installed = signal.getsignal(signal.SIGTERM)
    assert isinstance(installed, OnTermination)
    installed.remove()
    sink.close()

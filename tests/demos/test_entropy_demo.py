"""`sonde demo entropy` as users start it: TRL's own trainer, real signals, a report at the end."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from sonde.cli import main
from sonde.runs.reader import read_run

pytest.importorskip("trl", reason="needs trl: pip install '.[trl]'")
pytestmark = pytest.mark.slow

SMALL = ["--steps", "4", "--every", "2"]


@pytest.mark.filterwarnings("ignore")
def test_the_demo_trains_forecasts_and_leaves_log_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["demo", "entropy", *SMALL, "--out", str(folder)]) == 0
    message = capsys.readouterr().out
    run = read_run(folder)
    assert [reading.window for reading in run.policy] == [1, 3]
    assert run.ended == "training ended"
    for reading in run.policy:
        point = reading.point
        assert point.is_independent
        assert point.has_truth
        assert reading.causes is not None
        assert len(reading.causes.prompts) == 8
        assert len(reading.shares) == 32
        assert all(share.prompt.endswith("=") for share in reading.shares)
        assert reading.metrics["gns_prompts/prompts_per_window"] == 8
        assert reading.metrics["reward"] is not None
        assert f"step {reading.window}/4, reward " in message
    assert "verdict" in message
    assert (folder / "report.html").stat().st_size > 100_000
    assert "Forecast against truth" in (folder / "report.html").read_text()


@pytest.mark.filterwarnings("ignore")
def test_a_failing_training_is_reported_and_keeps_its_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["demo", "entropy", *SMALL, "--learning-rate", "1e30", "--out", str(folder)]) == 1
    err = capsys.readouterr().err
    assert "training failed at step" in err
    assert "was the learning rate of 1e+30 too large?" in err
    run = read_run(folder)
    assert str(run.ended).startswith("training failed")
    assert run.policy[0].reason == "the policy's scores are not finite after the step"


@pytest.mark.filterwarnings("ignore")
def test_ctrl_c_keeps_the_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real signal to this process, which may have imported TRL already: a new one would import it for seconds."""
    folder, is_over = tmp_path / "run", threading.Event()

    def press_ctrl_c() -> None:
        log = folder / "records.jsonl"
        while not is_over.wait(0.05):
            if log.exists() and '{"kind":"policy"' in log.read_text():
                return os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press_ctrl_c)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    presses.start()
    try:
        status = main(["demo", "entropy", *SMALL[2:], "--steps", "1000", "--out", str(folder)])
    finally:
        is_over.set()
        presses.join()
        signal.signal(signal.SIGINT, before)
    assert status == 130
    said = capsys.readouterr()
    assert "Stopped after step" in said.out
    assert read_run(folder).ended == "interrupted"
    assert (folder / "report.html").exists()
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--every", "0"], "every must be at least 1, got 0"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--learning-rate", "0"], "learning_rate must be positive and finite"),
        (["--learning-rate", "nan"], "learning_rate must be positive and finite"),
        ([], "a folder that is not empty"),
    ],
)
def test_bad_options(tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything is written."""
    (tmp_path / "mine").write_text("mine")
    assert main(["demo", "entropy", *options, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

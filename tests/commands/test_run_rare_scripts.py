"""Scripts in rarer styles are untouched too: threads, a call on one rank alone, pickles, own signals, children."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import rare_scripts
from tests.commands.scripts import PLAIN, whole
from tests.commands.unmodified import check_untouched, explicit, with_run


def said_by(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("sonde: ")]


def test_training_in_threads_is_untouched_and_one_of_them_is_measured(tmp_path: Path) -> None:
    measured = check_untouched(rare_scripts.THREADS, tmp_path)
    assert measured.status == 0
    why = "not measured: another thread of the script trains or has trained, and one is measured"
    assert measured.err.count(why) == 2, measured.err
    assert "Traceback" not in measured.err


@pytest.mark.parametrize(
    "script",
    [rare_scripts.SHOWS_BEFORE_IT_WRAPS, rare_scripts.SHOWS_WHAT_DDP_HOLDS],
    ids=["before it wraps", "what DDP holds"],
)
def test_a_forward_on_one_rank_alone_starts_no_collective(script: str, tmp_path: Path) -> None:
    measured = check_untouched(script, tmp_path, ranks=2)
    assert measured.status == 0, measured.err
    assert ", 12 windows" in measured.err
    assert "not measured" not in measured.err


def test_a_whole_model_is_pickled_copied_traced_and_scripted_without_sonde(tmp_path: Path) -> None:
    measured = check_untouched(rare_scripts.PICKLES, tmp_path)
    assert measured.status == 0, measured.err
    assert measured.out.splitlines()[1:-1] == ["True", "False True True", *["True"] * 3, "2.0"]


def test_a_model_that_learns_from_its_own_evaluation_is_untouched(tmp_path: Path) -> None:
    """nn.TransformerEncoderLayer returns other bits in evaluation while a hook is in it."""
    measured = check_untouched(rare_scripts.LEARNS_FROM_ITS_ANSWERS, tmp_path)
    assert ", 20 windows" in measured.err


def test_loggers_and_streams_of_the_script_get_nothing_of_sondes(tmp_path: Path) -> None:
    """The gradient of each second step of it is clipped by value, of which sonde warns."""
    measured = check_untouched(rare_scripts.LOGS_TO_STDOUT, tmp_path)
    assert "sonde" not in measured.out
    assert any("clipped by value before the step" in line for line in said_by(measured.err)), measured.err
    assert "sonde: log" in measured.err


@pytest.mark.parametrize("writes_report", [False, True])
def test_a_script_that_stops_itself_on_sigterm_gets_its_verdict(writes_report: bool, tmp_path: Path) -> None:
    measured = check_untouched(rare_scripts.STOPS_ITSELF, tmp_path, report=writes_report)
    assert (measured.status, measured.out.splitlines()[1]) == (0, "saved")
    reading, *where = said_by(measured.err)[-2 - writes_report :]
    assert reading.startswith("sonde: B_simple")
    assert ", 7 windows" in reading
    assert where[0] == f"sonde: log     {measured.folder}"
    assert (measured.folder / "report.html").exists() == writes_report


def test_a_script_whose_children_train_says_nothing_of_itself(tmp_path: Path) -> None:
    script = rare_scripts.STARTS_CHILDREN.replace("def train", f"SCRIPT = {whole(PLAIN)!r}\n\ndef train", 1)
    measured = check_untouched(script, tmp_path)
    assert measured.out.splitlines()[-1] == "0", measured.err
    assert "nothing was measured" not in measured.err
    assert measured.err.count("sonde: B_simple") == 1


def test_workers_that_call_modules_are_told_nothing(tmp_path: Path) -> None:
    measured = check_untouched(rare_scripts.READS_IN_WORKERS, tmp_path)
    assert measured.status == 0, measured.err
    assert ", 6 windows" in measured.err


def test_micro_batches_weigh_by_their_rows_where_the_loss_adds_rows_up(tmp_path: Path) -> None:
    weighed = with_run(rare_scripts.RAGGED_SUMS, tmp_path / "weighed", weights_from="units")
    script = rare_scripts.RAGGED_SUMS.replace(
        "        (nn", "        with probe.piece(units=rows, weight=rows):\n            (nn"
    )
    own = explicit(script, tmp_path / "own")
    equal = with_run(rare_scripts.RAGGED_SUMS, tmp_path / "equal")
    assert weighed.numbers == pytest.approx(own.numbers, rel=1e-5)
    assert equal.numbers[1] != pytest.approx(own.numbers[1], rel=0.02)


def test_rows_that_are_not_clear_are_asked_about(tmp_path: Path) -> None:
    measured = with_run(rare_scripts.POINTS_OF_ALL_ROWS, tmp_path)
    assert "which dim is the batch is not clear: the batch has points float32 [64, 2]; functions" in measured.err
    assert "Pass --units-from: a number, NAME:DIM" in measured.err
    assert "no step of Field could be measured" in measured.err
    told = with_run(rare_scripts.POINTS_OF_ALL_ROWS, tmp_path / "told", units_from="functions:0")
    assert "16 rows in all" in told.err


def test_steps_whose_gradients_no_hook_sees_are_not_said_to_be_ended_twice(tmp_path: Path) -> None:
    measured = check_untouched(rare_scripts.GRADIENTS_BY_HAND, tmp_path)
    assert measured.status == 0, measured.err
    assert "gradients are set by hand" in measured.err
    assert "twice" not in measured.err
    assert "probe" not in measured.err

"""Scripts in rarer styles are untouched too: threads, a call on one rank alone, pickles, own signals, children."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import rare_scripts
from tests.commands.scripts import PLAIN, whole
from tests.commands.unmodified import check_untouched, explicit, with_run

RARE = {
    "a forward on one rank alone before it wraps": (rare_scripts.SHOWS_BEFORE_IT_WRAPS, 2, ", 12 windows"),
    "a forward on one rank alone of what DDP holds": (rare_scripts.SHOWS_WHAT_DDP_HOLDS, 2, ", 12 windows"),
    # nn.TransformerEncoderLayer returns other bits in evaluation while a hook is in it.
    "a model that learns from its own evaluation": (rare_scripts.LEARNS_FROM_ITS_ANSWERS, 1, ", 20 windows"),
    "workers of a loader that call modules": (rare_scripts.READS_IN_WORKERS, 1, ", 6 windows"),
    "gradients that no hook sees": (rare_scripts.GRADIENTS_BY_HAND, 1, "gradients are set by hand"),
    "threads, of which one is measured": (
        rare_scripts.THREADS,
        1,
        "not measured: another thread of the script trains or has trained, and one is measured",
    ),
}


@pytest.mark.parametrize("name", RARE)
def test_a_rare_style_is_untouched(name: str, tmp_path: Path) -> None:
    script, ranks, said = RARE[name]
    measured = check_untouched(script, tmp_path, ranks=ranks)
    assert measured.status == 0, measured.err
    assert measured.err.count(said) == (2 if "threads" in name else 1), measured.err
    assert ("not measured" in measured.err) == ("not measured" in said)
    assert not any(word in measured.err for word in ("Traceback", "twice", "probe"))


def test_a_whole_model_is_pickled_copied_traced_and_scripted_without_sonde(tmp_path: Path) -> None:
    measured = check_untouched(rare_scripts.PICKLES, tmp_path)
    assert measured.status == 0, measured.err
    assert measured.out.splitlines()[1:-1] == ["True", "False True True", *["True"] * 3, "2.0"]


def test_loggers_and_streams_of_the_script_get_nothing_of_sondes(tmp_path: Path) -> None:
    """The gradient of each second step of it is clipped by value, of which sonde warns."""
    measured = check_untouched(rare_scripts.LOGS_TO_STDOUT, tmp_path)
    assert "sonde" not in measured.out
    assert "clipped by value before the step" in measured.err
    assert "sonde: log" in measured.err


@pytest.mark.parametrize("writes_report", [False, True])
def test_a_script_that_stops_itself_on_sigterm_gets_its_verdict(writes_report: bool, tmp_path: Path) -> None:
    measured = check_untouched(rare_scripts.STOPS_ITSELF, tmp_path, report=writes_report)
    assert (measured.status, measured.out.splitlines()[1]) == (0, "saved")
    said = [line for line in measured.err.splitlines() if line.startswith("sonde: ")]
    reading, *where = said[-2 - writes_report :]
    assert reading.startswith("sonde: B_simple")
    assert ", 7 windows" in reading
    assert where[0] == f"sonde: log     {measured.folder}"
    assert (measured.folder / "report.html").exists() == writes_report


def test_a_script_whose_children_train_says_nothing_of_itself(tmp_path: Path) -> None:
    script = rare_scripts.STARTS_CHILDREN.replace("def train", f"SCRIPT = {whole(PLAIN)!r}\n\ndef train", 1)
    measured = check_untouched(script, tmp_path)
    assert measured.out.splitlines()[-1] == "0", measured.err
    assert "not measured" not in measured.err
    assert measured.err.count("sonde: B_simple") == 1


BY_ROWS = """
from sonde.batch_size.forward_units import CountsOfForward

def by_rows(x):
    return CountsOfForward(len(x), weight=None)
"""


def test_micro_batches_weigh_by_their_rows_where_the_loss_adds_rows_up(tmp_path: Path) -> None:
    weighed = with_run(BY_ROWS + rare_scripts.RAGGED_SUMS, tmp_path / "weighed", units_from="__main__:by_rows")
    script = rare_scripts.RAGGED_SUMS.replace(
        "        (nn", "        with probe.piece(units=rows, weight=rows):\n            (nn"
    )
    assert weighed.numbers == pytest.approx(explicit(script, tmp_path / "own").numbers, rel=1e-5)


def test_rows_that_are_not_clear_are_asked_about(tmp_path: Path) -> None:
    measured = with_run(rare_scripts.POINTS_OF_ALL_ROWS, tmp_path)
    assert "which dim is the batch is not clear: the batch has points float32 [64, 2]; functions" in measured.err
    assert "Pass --units-from: a number or package.module:function" in measured.err
    assert "no step of Field could be measured" in measured.err
    rows = "\ndef rows(points, functions):\n    return len(functions)\n"
    told = with_run(rows + rare_scripts.POINTS_OF_ALL_ROWS, tmp_path / "told", units_from="__main__:rows")
    assert "16 rows in all" in told.err

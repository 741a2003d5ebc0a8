"""A tiny piece of each kind of every study runs, and the tables are made of what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence.__main__ import main
from evidence.analysis import tables
from evidence.studies import STUDIES
from evidence.work import Store, to_do


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of trainings too short to say anything
def test_every_study_runs_and_is_then_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--smoke", "--jobs", "1", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    store = Store(tmp_path)
    assert to_do([*STUDIES.values()], store, smoke=True) == []
    assert all(store.read(name) for name in STUDIES)
    assert tables(store).startswith("# Tables of the study")


def test_an_unknown_study_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweeep"])
    assert "there is no study sweeep: choose of regression" in capsys.readouterr().err

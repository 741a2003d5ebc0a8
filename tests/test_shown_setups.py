"""The table of set-ups is made from the tests, so a cell cannot name a test that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import shown_setups
from tests.shown_setups import NOT_TRIED, PAGE, QUANTITIES, REFUSED, SETUPS, SHOWN, shown, table, with_table


def test_the_page_has_the_table_that_the_tests_make() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "python -m tests.shown_setups writes the table"
    assert f"{SHOWN} leads to the test that compares" in page
    assert f"{REFUSED} leads to the\ntest that shows" in page
    assert f"{NOT_TRIED} means that no test" in page


def test_every_set_up_and_every_quantity_is_shown_by_a_test() -> None:
    found = list(shown())
    assert {setup for _, _, setup in found} == set(SETUPS)
    assert {quantity for _, quantity, _ in found} == set(QUANTITIES)


MAY_NOT_RUN = [
    "@pytest.mark.skipif(True)\n{}\ndef test_it(): pass",
    "{}\n@pytest.mark.xfail\ndef test_it(): pass",
    "{}\ndef test_it():\n    if True:\n        pytest.skip('not now')",
    "pytestmark = [pytest.mark.slow, pytest.mark.skip]\n{}\ndef test_it(): pass",
    "trl = pytest.importorskip('trl')\n{}\ndef test_it(): pass",
    "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.skip)])\n{}\ndef test_it(x): pass",
]
REFUSED_MARKS = [
    (source.format("@pytest.mark.shows('prompts', 'EP')"), "may be skipped or may fail") for source in MAY_NOT_RUN
]
REFUSED_MARKS += [
    ("@pytest.mark.shows('noise scale', 'FSDP3')\ndef test_it(): pass", "is marked with"),
    ("@pytest.mark.shows('noise', 'FSDP2')\ndef test_it(): pass", "is marked with"),
    ("@pytest.mark.shows('noise scale')\ndef test_it(): pass", "is marked with"),
    ("@pytest.mark.shows('noise scale', 'FSDP2')\ndef helper(): pass", "helper is no test"),
    # One of its cases could be deleted, and the page would not show it.
    ("@pytest.mark.shows('noise scale', 'PP', 'TP')\ndef test_it(): pass", "is marked with several set-ups"),
    (
        "@pytest.mark.shows('prompts', 'EP')\ndef test_a(): pass\n"
        "@pytest.mark.refuses('prompts', 'EP', 'PP')\ndef test_b(): pass",
        "is shown by .*test_a.* and refused by .*test_b",
    ),
]


@pytest.mark.parametrize(("source", "message"), REFUSED_MARKS)
def test_a_marker_that_shows_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.setattr(shown_setups, "TESTS", tmp_path)
    (tmp_path / "test_it.py").write_text(source)
    with pytest.raises(ValueError, match=message):
        table()


def test_a_case_of_several_may_have_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the cell goes with the case."""
    monkeypatch.setattr(shown_setups, "TESTS", tmp_path)
    case = "pytest.param('b', marks=pytest.mark.shows('noise scale', 'PP', 'TP'))"
    for cases, expected in ((case, ["PP", "TP"]), ("", [])):
        (tmp_path / "test_it.py").write_text(f"@pytest.mark.parametrize('x', ['a', {cases}])\ndef test_it(x): pass")
        assert [setup for _, _, setup in shown()] == expected
    (tmp_path / "test_it.py").write_text("@pytest.mark.refuses('prompts', 'EP', 'PP')\ndef test_b(): pass\n")
    assert f"| EP | · | · | · | · | · | [✗](../{tmp_path.name}/test_it.py) |" in table()


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table of set-ups"):
        with_table("nothing")
    assert with_table("before\n\n| set-up | old |\n|---|\n| a |\n\nafter\n") == f"before\n\n{table()}\nafter\n"

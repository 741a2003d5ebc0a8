"""The table of set-ups is made from the tests, so a cell cannot name a test that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import shown_setups
from tests.shown_setups import NOT_TRIED, PAGE, QUANTITIES, REFUSED, SETUPS, SHOWN, shown, table, with_table


def test_the_page_has_the_table_that_the_tests_make() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "python -m tests.shown_setups writes the table"


def test_every_set_up_and_every_quantity_is_shown_by_a_test() -> None:
    found = list(shown())
    assert {setup for _, _, setup in found} == set(SETUPS)
    assert {quantity for _, quantity, _ in found} == set(QUANTITIES)


@pytest.mark.parametrize("kind", ["shows", "refuses"])
@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.skipif(True)\n{}\ndef test_it(): pass",
        "{}\n@pytest.mark.xfail\ndef test_it(): pass",
        "{}\ndef test_it():\n    if True:\n        pytest.skip('not now')",
        "pytestmark = [pytest.mark.slow, pytest.mark.skip]\n{}\ndef test_it(): pass",
        "trl = pytest.importorskip('trl')\n{}\ndef test_it(): pass",
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.skip)])\n{}\ndef test_it(x): pass",
    ],
)
def test_a_test_that_may_not_run_shows_nothing(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, kind: str, source: str
) -> None:
    monkeypatch.setattr(shown_setups, "TESTS", tmp_path)
    (tmp_path / "test_it.py").write_text(source.format(f"@pytest.mark.{kind}('prompts', 'EP')"))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"test_it.py::test_it may be skipped or may fail"):
        list(shown(kind))


def test_a_marker_with_an_unknown_name_is_refused(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_setups, "TESTS", tmp_path)
    file = tmp_path / "test_it.py"  # type: ignore[operator]
    for source in (
        "@pytest.mark.shows('noise scale', 'FSDP3')\ndef test_it(): pass",
        "@pytest.mark.shows('noise', 'FSDP2')\ndef test_it(): pass",
        "@pytest.mark.shows('noise scale')\ndef test_it(): pass",
        "@pytest.mark.shows('noise scale', 'FSDP2')\ndef helper(): pass",
    ):
        file.write_text(source)
        with pytest.raises(ValueError, match=r"test_it.py::(test_it is marked with|helper is no test)"):
            list(shown())


def test_a_case_of_several_may_have_the_marker(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the cell goes with the case."""
    monkeypatch.setattr(shown_setups, "TESTS", tmp_path)
    file = tmp_path / "test_it.py"  # type: ignore[operator]
    case = "pytest.param('b', marks=pytest.mark.shows('noise scale', 'PP', 'TP'))"
    for cases, expected in ((case, ["PP", "TP"]), ("", [])):
        file.write_text(f"@pytest.mark.parametrize('x', ['a', {cases}])\ndef test_it(x): pass")
        assert [setup for _, _, setup in shown()] == expected


def test_a_whole_test_is_not_marked_with_several_set_ups(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its cases could be deleted, and the page would not show it."""
    monkeypatch.setattr(shown_setups, "TESTS", tmp_path)
    file = tmp_path / "test_it.py"  # type: ignore[operator]
    file.write_text("@pytest.mark.shows('noise scale', 'PP', 'TP')\ndef test_it(): pass")
    with pytest.raises(ValueError, match=r"test_it.py::test_it is marked with several set-ups"):
        list(shown())


def test_what_is_shown_and_refused_is_a_contradiction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_setups, "TESTS", tmp_path)
    file = tmp_path / "test_it.py"
    test = "def test_{}(): pass\n"
    says = "@pytest.mark.shows('prompts', 'EP')\n" + test.format("a")
    refuses = "@pytest.mark.refuses('prompts', 'EP', 'PP')\n" + test.format("b")
    file.write_text(says)
    assert f"| EP | · | · | · | · | · | [✓](../{tmp_path.name}/test_it.py) |" in table()
    file.write_text(refuses)
    assert f"| EP | · | · | · | · | · | [✗](../{tmp_path.name}/test_it.py) |" in table()
    file.write_text(says + refuses)
    with pytest.raises(ValueError, match=r"is shown by .*test_a.* and refused by .*test_b"):
        table()


def test_the_page_explains_the_signs() -> None:
    page = PAGE.read_text()
    assert f"{SHOWN} leads to the test that compares" in page
    assert f"{REFUSED} leads to the\ntest that shows" in page
    assert f"{NOT_TRIED} means that no test" in page


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table of set-ups"):
        with_table("nothing")
    assert with_table("before\n\n| set-up | old |\n|---|\n| a |\n\nafter\n") == f"before\n\n{table()}\nafter\n"

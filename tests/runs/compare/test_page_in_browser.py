"""The page of several runs in a browser: drawn at each width, loads nothing, and runs no text of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sonde.runs.compare.page import comparison_page
from sonde.runs.compare.side_by_side import read_runs
from sonde.runs.report.page import write_page
from tests.chromium import DRAWN, OVERFLOW, in_browser, open_page, page_text
from tests.runs.compare.plausible_runs import write_plausible
from tests.runs.report.plausible_policy import write_policy_run

pytestmark = in_browser

SCROLLS = "return [...document.querySelectorAll('.table')].some(box => box.scrollWidth > box.clientWidth)"
ATTACK = "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"


def show(browser: Any, page: Path, *, width: int = 1200) -> str:
    open_page(browser, page, width=width)
    return page_text(browser)


@pytest.mark.parametrize("width", [1200, 390])
def test_three_batches_fit_wide_and_narrow_windows(browser: Any, tmp_path: Path, width: int) -> None:
    runs = [write_plausible(tmp_path / f"batch-{b}", batch=b, n=round(1280 / b)) for b in (4.0, 16.0, 64.0)]
    text = show(browser, write_page(tmp_path / "page.html", lambda: comparison_page(read_runs(runs))), width=width)
    assert len(browser.execute_script(DRAWN)) == 4  # noise scale, loss, norm, speed
    assert browser.execute_script(OVERFLOW) <= 0
    assert browser.execute_script(SCROLLS) is (width < 1200)  # a table in its own box, and not the page
    for said in ("3 runs side by side", "sonde advise ", "Settings that differ", "4 (A); 16 (B)"):
        assert said in text


def test_twenty_runs_have_a_curve_each(browser: Any, tmp_path: Path) -> None:
    runs = [write_plausible(tmp_path / f"run-{k}", batch=4.0 + k, n=30) for k in range(20)]
    text = show(browser, write_page(tmp_path / "page.html", lambda: comparison_page(read_runs(runs))))
    assert browser.execute_script("return document.querySelector('.legend').childElementCount") == 20  # and no band
    styles = browser.execute_script(
        "return [...document.querySelector('.legend').querySelectorAll('svg')].map(e => e.outerHTML)"
    )
    assert len(set(styles)) == 20
    assert "T (run-19)" in text


def test_entropies_are_drawn_over_steps_and_text_of_the_user_is_never_run(browser: Any, tmp_path: Path) -> None:
    a = write_policy_run(tmp_path / "a", 24)
    b = write_policy_run(tmp_path / "b", 12)
    assert "A (a: adding by GRPO)" in show(
        browser, write_page(tmp_path / "policy.html", lambda: comparison_page(read_runs([a, b])))
    )
    assert len(browser.execute_script(DRAWN)) == 2  # reward, entropy
    b = write_plausible(tmp_path / "attack", run=ATTACK, metadata={ATTACK: ATTACK}, metrics={ATTACK: 1.0})
    c = write_plausible(tmp_path / "c", run="$$x$$", metrics={ATTACK: 2.0})
    text = show(browser, write_page(tmp_path / "page.html", lambda: comparison_page(read_runs([b, c]))))
    assert ATTACK in text
    assert browser.execute_script("return window.attacked === undefined")
    assert len(browser.execute_script(DRAWN)) == 5  # also the user's own

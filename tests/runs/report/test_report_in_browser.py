"""The report in a real browser: console and network, contrast, a dark scheme, the keyboard, and print."""

from __future__ import annotations

import base64
import io
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sonde.decision.kept_trial import TRIAL_NAME, trial_text
from sonde.decision.time_curve import TimeCurve, Timing
from sonde.evidence.branches import Branches
from sonde.runs.facts import facts_of_run
from sonde.runs.reader import read_run
from sonde.runs.report.branch_page import branch_page
from sonde.runs.report.page import write_page
from sonde.runs.report.write import write_report
from tests.chromium import DRAWN, OVERFLOW, RANGE, in_browser, open_page, page_text
from tests.runs.report.plausible_branches import PROXIES, diverged, plausible_branches
from tests.runs.report.plausible_policy import policy_header, policy_record, write_policy_run
from tests.runs.report.plausible_run import (
    alert_record,
    end_record,
    header_record,
    reading_record,
    with_metrics,
    write_run,
    written,
)

pytestmark = in_browser

ATTACK = "<script>alert(1)</script><img src=x onerror='window.attacked = 1'>"


@pytest.mark.parametrize(
    ("status", "n_plots", "n_readings", "width"),
    [
        (None, 7, 60, 1200),
        (None, 7, 60, 500),
        ("resolved", 7, 1, 1200),
        ("lower_bound", 7, 12, 1200),
        ("unresolved", 4, 1, 1200),
    ],
)
def test_every_status_fits_wide_and_narrow_windows(
    browser: Any, tmp_path: Path, status: str | None, n_plots: int, n_readings: int, width: int
) -> None:
    header = header_record(unit="prompts")
    run = write_run(tmp_path, n_readings, status=status, header=header, alerts=[alert_record()])
    open_page(browser, write_report(run), width=width)
    assert len(browser.execute_script(DRAWN)) == n_plots
    assert browser.execute_script(OVERFLOW) <= 0
    assert "Average over the run" in page_text(browser)


TOOLTIP = """
const lines = [];
const walk = node => { for (const e of node.querySelectorAll('*')) {
  if (e.classList.contains('bk-Tooltip')) lines.push(...e.shadowRoot.querySelectorAll('span'));
  if (e.shadowRoot) walk(e.shadowRoot); } };
walk(document);
return lines.map(span => [span.parentElement.textContent, getComputedStyle(span).color]);
"""


@pytest.mark.parametrize(
    ("figure", "line", "others"), [(2, "batch size: 64", "units seen: "), (4, f"group: {ATTACK}", "signal |G|²: ")]
)
def test_hovering_shows_the_reading(browser: Any, tmp_path: Path, figure: int, line: str, others: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    open_page(browser, write_report(write_run(tmp_path, 60, status="resolved", groups=[ATTACK, "head"])))
    hovered = browser.find_elements("tag name", "figure")[figure]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", hovered)
    ActionChains(browser).move_to_element_with_offset(hovered, 100, -30).perform()
    deadline = time.monotonic() + 5
    while line not in dict(shown := browser.execute_script(TOOLTIP)):
        assert time.monotonic() < deadline, f"no tooltip: {shown}"
        time.sleep(0.05)
    assert any(text.startswith(others) for text, _ in shown)
    assert min(_contrast(colour, "rgb(255, 255, 255)") for _, colour in shown) >= 4.5
    assert browser.execute_script("return window.attacked === undefined")


def test_text_of_the_user_is_shown_and_never_run(browser: Any, tmp_path: Path) -> None:
    texts = [ATTACK, "$$x$$", r"\[y\]", r"\(z\)", "@{x}", "</script>" + ATTACK, "${title}"]
    setup = header_record()["setup"] | {"groups": texts, "tap": ATTACK, "note": ATTACK, ATTACK: 1}
    header = header_record(
        run=ATTACK, unit=f"$$u$$ {ATTACK}", setup=setup, metadata={ATTACK: texts}, versions={ATTACK: ATTACK}
    )
    readings = [reading_record(i, 12, groups=texts, dropped={ATTACK: 3}, reason=ATTACK) for i in range(12)]
    logged = [with_metrics(record, {ATTACK: float(i), "$$v$$": 1.0}) for i, record in enumerate(readings)]
    open_page(
        browser, write_report(written(tmp_path, [header, *logged, alert_record(ATTACK), end_record(120, ATTACK)]))
    )
    text = page_text(browser)
    assert text.count(ATTACK) > 10
    for user_text in texts:
        assert json.dumps(user_text)[1:-1] in text, user_text  # the metadata are shown as JSON
    assert browser.title.startswith(ATTACK)
    assert browser.execute_script("return window.attacked === undefined")
    assert browser.find_elements("css selector", "img") == []
    # Even without escaping, the Content-Security-Policy of the page would stop the script.
    inject = "document.body.insertAdjacentHTML('beforeend', arguments[0])"
    browser.execute_script(inject, ATTACK)
    time.sleep(0.2)
    assert browser.execute_script("return window.attacked === undefined")


@pytest.mark.parametrize(("n", "width"), [(1, 1200), (24, 500)])
def test_a_run_with_a_policy_fits_wide_and_narrow_windows(browser: Any, tmp_path: Path, width: int, n: int) -> None:
    open_page(browser, write_report(write_policy_run(tmp_path, n)), width=width)
    # With one step, which is not to be trusted, there is no noise scale yet.
    assert len(browser.execute_script(DRAWN)) == (9 if n > 1 else 8)
    assert browser.execute_script(OVERFLOW) <= 0
    assert len(browser.find_elements("css selector", "table")) == 3


def test_text_of_a_prompt_is_shown_and_never_run(browser: Any, tmp_path: Path) -> None:
    records = [with_metrics(policy_record(i, reason=ATTACK), {ATTACK: float(i)}) for i in range(3)]
    for record in records:
        for part in (*record["shares"], *record["causes"]["prompts"]):
            part["prompt"] = f"{ATTACK} $$x$$ {part['prompt']}"
    open_page(browser, write_report(written(tmp_path, [policy_header(run=ATTACK), *records])))
    assert page_text(browser).count(f"{ATTACK} $$x$$ ") >= 20
    assert browser.execute_script("return window.attacked === undefined")


def _troubled_branches(text: str) -> Branches:
    """One diverged, one failed, and the user's own words everywhere."""
    proxies = [replace(proxy, name=f"{proxy.name} {text}") for proxy in PROXIES]
    branches = plausible_branches(unit=text, loss=text, rule=text, proxies=tuple(proxies))
    first, *rest, one, other, again = branches.branches
    other = replace(other, state="failed", message=text)
    return replace(branches, branches=(first, *rest, replace(one, curve=diverged()), other, again))


@pytest.mark.parametrize("width", [400, 1200])
def test_branches_fit_wide_and_narrow_windows(browser: Any, tmp_path: Path, width: int) -> None:
    page = write_page(tmp_path / "report.html", lambda: branch_page(_troubled_branches(f"{ATTACK} $$x$$")))
    open_page(browser, page, width=width)
    assert len(browser.execute_script(DRAWN)) == 3
    assert browser.execute_script(OVERFLOW) <= 0
    assert page_text(browser).count(f"{ATTACK} $$x$$") > 10
    assert browser.execute_script("return window.attacked === undefined")
    _check_contrast(browser)


@contextmanager
def _media(browser: Any, *, scheme: str = "light", media: str = "") -> Iterator[None]:
    """As if the reader prefers this scheme, or prints."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    yield
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


# The colour of each element's own text, and the nearest background that is painted behind it.
TEXTS = """
const painted = e => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/rgba\\(.*, 0\\)/.test(colour)) return colour;
  }
};
const own = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
return [...document.querySelectorAll(arguments[0])].filter(own)
  .map(e => [e.textContent, getComputedStyle(e).color, painted(e)]);
"""


def _luminance(colour: str) -> float:
    """Relative luminance of an `rgb(…)`, by WCAG 2.2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _check_contrast(browser: Any) -> None:
    """4.5 by WCAG for every text."""
    for scheme in ("light", "dark"):
        with _media(browser, scheme=scheme):
            texts = browser.execute_script(TEXTS, "body *:not(script):not(style)")
            assert any(len(text) > 20 for text, _, _ in texts)
            assert {text[:40]: scheme for text, ink, paper in texts if _contrast(ink, paper) < 4.5} == {}


KINDS = {"time": ("resolved", 6400.0), "keep": ("resolved", 30.0), "wait": ("unresolved", 1.0)}


@pytest.mark.parametrize("kind", [*KINDS, "falling", "collapses"])
def test_every_text_has_contrast(browser: Any, tmp_path: Path, kind: str) -> None:
    """Badges, tiles, notes, alerts, legends, tables."""
    if kind in KINDS:
        status, b_simple = KINDS[kind]
        record = reading_record(0, 1, status=status)
        known = {"gns/b_simple": b_simple, "gns/b_simple_low": 0.9 * b_simple, "gns/b_simple_high": 1.1 * b_simple}
        known |= dict.fromkeys(name for name in record["metrics"] if "average" in name)
        metrics = record["metrics"] | (known if status == "resolved" else {})
        more = {"setup": header_record()["setup"] | {"ranks": 64}} if kind == "keep" else {}
        alerts = [alert_record(window=900)]
        write_run(
            tmp_path, 1, header=header_record(**more), status=status, metrics=metrics, log_every=600, alerts=alerts
        )
        if kind == "keep":  # micro-batches of 1 on 64 ranks, whose devices are full
            curve = TimeCurve((Timing(1, 1, 64, 0.1, 0.0), Timing(4, 1, 64, 0.4, 0.0)))
            (tmp_path / TRIAL_NAME).write_text(trial_text(curve, facts_of_run(read_run(tmp_path))))
    else:
        write_policy_run(tmp_path, 24)
    report = write_report(tmp_path)
    if kind == "collapses":  # the colours of that verdict
        report.write_text(report.read_text(encoding="utf-8").replace("verdict falling", "verdict collapses"), "utf-8")
    open_page(browser, report)
    assert len(browser.find_elements("css selector", f".verdict.{kind} .badge")) == 1
    _check_contrast(browser)


def test_a_dark_scheme_darkens_page_and_figures_and_paper_stays_light(browser: Any, tmp_path: Path) -> None:
    report = write_report(write_run(tmp_path, 60))
    paper = "return getComputedStyle(document.body).backgroundColor"
    with _media(browser, scheme="dark"):
        open_page(browser, report)
        assert _luminance(browser.execute_script(paper)) < 0.02
        dark = _greys(browser, "figure")
        assert sorted(dark)[len(dark) // 2] < 40  # its background
        assert sum(grey > 120 for grey in dark) > 200  # its curves and labels
        assert sum(grey > 220 for grey in dark) < 200  # a light grid would stand out
    with _media(browser, scheme="dark", media="print"):
        assert _luminance(browser.execute_script(paper)) == 1.0
        light = _greys(browser, "figure")
        assert sorted(light)[len(light) // 2] > 250


def _greys(browser: Any, selector: str) -> list[int]:
    """The brightness of each pixel of an element as it is painted."""
    picture = browser.find_element("css selector", selector).screenshot_as_png
    return list(Image.open(io.BytesIO(picture)).convert("L").tobytes())


def test_each_figure_is_reached_and_zoomed_by_keyboard_and_has_a_text(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> None:
        for key in keys:
            ActionChains(browser).send_keys(key).perform()

    open_page(browser, write_report(write_run(tmp_path, 60)))
    figures = browser.find_elements("css selector", "figure")
    assert len(figures) == 6
    in_order = browser.find_elements("css selector", "a[href], button, [tabindex]")
    links = browser.find_elements("css selector", "a[href^='#']")
    assert in_order == [*links, *figures]  # nothing else takes the focus, but what is folded
    browser.execute_script("arguments[0].focus()", links[-1])
    over_run = [figures[k] for k in (1, 2, 3, 5)]  # the others are over batch sizes and noise scales
    for figure in figures:
        press(Keys.TAB)  # one stop a figure: Bokeh's own layers are none
        assert browser.switch_to.active_element == figure
        first = browser.execute_script(RANGE, figure)
        press("+")
        zoomed = browser.execute_script(RANGE, figure)
        together = [other for other in figures if browser.execute_script(RANGE, other) == zoomed]
        assert together == (over_run if figure in over_run else [figure])
        assert first[0] < zoomed[0] < zoomed[1] < first[1]
        press(Keys.ARROW_RIGHT)
        moved = browser.execute_script(RANGE, figure)
        assert zoomed[0] < moved[0]
        assert zoomed[1] < moved[1]
        press("-", Keys.ARROW_LEFT, "0")
        assert browser.execute_script(RANGE, figure) == first
        described = browser.find_element("id", figure.get_attribute("aria-describedby"))
        assert len(described.get_property("textContent")) > 40
    norm = browser.execute_script("return document.querySelectorAll('figcaption')[5].textContent")
    assert re.search(r"Gradient norm, gradient norm: [^:]*: [\d.]+ at first, [\d.]+ at last, between", norm)
    assert re.search(r"threshold[^.]*: 1 at first, 1 at last", norm)


def test_many_groups_scroll_and_on_paper_nothing_is_cut_off(browser: Any, tmp_path: Path) -> None:
    open_page(browser, write_report(write_run(tmp_path, 12, groups=[f"blocks.{i}" for i in range(60)])))
    tall = browser.find_element("css selector", "figure.tall")
    assert browser.execute_script("return arguments[0].scrollHeight", tall) > 60 * 15
    assert browser.execute_script("return arguments[0].clientHeight", tall) < 700
    with _media(browser, scheme="dark", media="print"):
        inside = "const f = arguments[0]; return [f.scrollHeight - f.clientHeight, getComputedStyle(f).breakInside]"
        assert browser.execute_script(inside, tall)[0] <= 0
        assert browser.execute_script(inside, browser.find_element("css selector", "figure:not(.tall)"))[1] == "avoid"
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    assert 3 <= len(re.findall(rb"/Type /Page\b", base64.b64decode(pdf["data"]))) <= 9

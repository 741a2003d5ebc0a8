"""The report in a real browser, whose console and network requests are checked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sonde.log.sinks import JsonlSink
from sonde.runs.report.write import write_report
from tests.chromium import chromium, in_browser
from tests.runs.report.plausible_policy import policy_header, policy_record, write_policy_run
from tests.runs.report.plausible_run import GROUPS, alert_record, end_record, header_record, reading_record, write_run

pytestmark = in_browser

ATTACK = "<script>alert(1)</script><img src=x onerror='window.attacked = 1'>"

# Bokeh draws inside shadow roots, which querySelector does not enter.
DRAWN = """
const canvases = [];
const walk = node => {
  for (const element of node.querySelectorAll('*')) {
    if (element.tagName === 'CANVAS') canvases.push(element);
    if (element.shadowRoot) walk(element.shadowRoot);
  }
};
const drawn = holder => {
  canvases.length = 0;
  walk(holder);
  return canvases.some(canvas => {
    if (!canvas.width || !canvas.height) return false;
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    for (let i = 0; i < pixels.length && colours.size < 8; i += 4)
      colours.add((pixels[i] << 16) + (pixels[i + 1] << 8) + pixels[i + 2]);
    return colours.size >= 8;
  });
};
return [...document.querySelectorAll('figure [data-root-id]')].map(drawn);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


def _open(browser: Any, report: Path, *, width: int = 1200) -> None:
    """Load the report; fail on a console message, a request that leaves the page, or a plot that is not drawn."""
    browser.get("about:blank")
    browser.set_window_size(width, 900)
    for log in ("browser", "performance"):
        browser.get_log(log)  # discard entries of the page before
    browser.get(report.as_uri())
    deadline = time.monotonic() + 15
    while not browser.execute_script("return window.Bokeh !== undefined && Bokeh.documents.every(d => d.is_idle)"):
        assert time.monotonic() < deadline, "Bokeh did not come to rest"
        time.sleep(0.05)

    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert report.as_uri() in requests  # the log does see requests
    assert [url for url in requests if not url.startswith("data:") and url != report.as_uri()] == []
    drawn = browser.execute_script(DRAWN)
    expected = browser.execute_script("return Bokeh.documents.reduce((n, d) => n + d.roots().length, 0)")
    assert drawn == [True] * expected


def _text(browser: Any) -> str:
    return str(browser.find_element("tag name", "body").text)


@pytest.mark.parametrize("width", [1200, 500])
def test_a_whole_run_fits_wide_and_narrow_windows(browser: Any, tmp_path: Path, width: int) -> None:
    report = write_report(write_run(tmp_path, 60, alerts=[alert_record()]))
    _open(browser, report, width=width)
    assert len(browser.execute_script(DRAWN)) == 7
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(overflow) <= 0


@pytest.mark.parametrize(("status", "n_plots"), [("resolved", 7), ("lower_bound", 7), ("unresolved", 4)])
@pytest.mark.parametrize("n_readings", [1, 12])
def test_every_status(browser: Any, tmp_path: Path, status: str, n_plots: int, n_readings: int) -> None:
    _open(browser, write_report(write_run(tmp_path, n_readings, status=status, header=header_record(unit="prompts"))))
    assert len(browser.execute_script(DRAWN)) == n_plots
    assert "Prompts used" in _text(browser)


def test_200_groups_are_all_there_and_scroll(browser: Any, tmp_path: Path) -> None:
    groups = [f"model.layers.{i // 2}.{'self_attn' if i % 2 else 'mlp'}" for i in range(200)]
    setup = header_record()["setup"] | {"groups": groups}
    _open(browser, write_report(write_run(tmp_path, 5, groups=groups, header=header_record(setup=setup))))
    tall = browser.find_element("css selector", "figure.tall")
    assert browser.execute_script("return arguments[0].scrollHeight", tall) > 200 * 15
    assert browser.execute_script("return arguments[0].clientHeight", tall) < 700


def test_hovering_shows_the_reading(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    _open(browser, write_report(write_run(tmp_path, 60, status="resolved")))
    figure = browser.find_element("tag name", "figure")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
    ActionChains(browser).move_to_element(figure).perform()
    tooltip = """
        const texts = [];
        const walk = node => { for (const e of node.querySelectorAll('*')) {
          if (e.classList.contains('bk-Tooltip')) texts.push(e.shadowRoot.textContent);
          if (e.shadowRoot) walk(e.shadowRoot); } };
        walk(document);
        return texts.join(' ');
    """
    deadline = time.monotonic() + 5
    while "noise scale" not in (shown := browser.execute_script(tooltip)):
        assert time.monotonic() < deadline, f"no tooltip: {shown!r}"
        time.sleep(0.05)
    assert "batch size" in shown
    assert "units seen" in shown


def test_text_of_the_user_is_shown_and_never_run(browser: Any, tmp_path: Path) -> None:
    texts = [ATTACK, "$$x$$", r"\[y\]", r"\(z\)", "@{x}", "</script>" + ATTACK, "${title}"]
    setup = header_record()["setup"] | {"groups": texts, "tap": ATTACK, "note": ATTACK, ATTACK: 1}
    header = header_record(
        run=ATTACK, unit=f"$$u$$ {ATTACK}", setup=setup, metadata={ATTACK: texts}, versions={ATTACK: ATTACK}
    )
    sink = JsonlSink(tmp_path)
    sink.write(header)
    for i in range(12):
        record = reading_record(i, 12, groups=texts, dropped={ATTACK: 3}, reason=ATTACK)
        sink.write(record | {"metrics": record["metrics"] | {ATTACK: float(i), "$$v$$": 1.0}})
    sink.write(alert_record(ATTACK))
    sink.write(end_record(120, ATTACK))
    sink.close()

    _open(browser, write_report(tmp_path))
    text = _text(browser)
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


def test_a_restarted_run(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path, 30, end=False)
    sink = JsonlSink(tmp_path)
    sink.write(header_record())
    for i in range(26, 60):
        sink.write(reading_record(i, 60, seed=1, groups=GROUPS[:3]))
    sink.close()
    _open(browser, write_report(tmp_path))
    assert "restarted 1 time" in _text(browser)


@pytest.mark.parametrize("width", [1200, 500])
@pytest.mark.parametrize("n", [1, 24])
def test_a_run_with_a_policy_fits_wide_and_narrow_windows(browser: Any, tmp_path: Path, width: int, n: int) -> None:
    _open(browser, write_report(write_policy_run(tmp_path, n)), width=width)
    # With one step, which is not to be trusted, there is no coverage and no noise scale yet.
    assert len(browser.execute_script(DRAWN)) == (11 if n > 1 else 9)
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(overflow) <= 0
    assert len(browser.find_elements("css selector", "table")) == 3


def test_text_of_a_prompt_is_shown_and_never_run(browser: Any, tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write(policy_header(run=ATTACK))
    for i in range(3):
        record = policy_record(i, reason=ATTACK)
        for part in (*record["shares"], *record["causes"]["prompts"]):
            part["prompt"] = f"{ATTACK} $$x$$ {part['prompt']}"
        sink.write(record | {"metrics": record["metrics"] | {ATTACK: float(i)}})
    sink.close()
    _open(browser, write_report(tmp_path))
    assert _text(browser).count(f"{ATTACK} $$x$$ ") >= 20
    assert browser.execute_script("return window.attacked === undefined")

"""`sonde watch --serve` in a real browser, while another process appends to the log."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sonde.log.lines import encode_line
from tests.chromium import OVERFLOW, RANGE, in_browser
from tests.runs.report.plausible_policy import write_policy_run
from tests.runs.report.plausible_run import Record, alert_record, header_record, reading_record, write_run, written

pytestmark = [*in_browser, pytest.mark.timeout(120)]

STILL = "return window.Bokeh !== undefined && Bokeh.documents.length === 1 && Bokeh.documents[0].is_idle"
NEWEST = """
const fig = Bokeh.documents[0].get_model_by_id(arguments[0].querySelector('[data-root-id]').dataset.rootId);
return [...fig.references()].map(model => model.data?.text2?.at(-1)).find(text => text !== undefined);
"""
TOP = "return arguments[0].getBoundingClientRect().top"


@contextmanager
def _watched(*folders: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "sonde", "watch", *map(str, folders), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        try:
            yield watch.stdout.readline().strip(), watch
        finally:
            watch.kill()


def _text(browser: Any) -> str:
    return str(browser.execute_script("return document.querySelector('main').innerText"))


def _wait(reached: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"{what} is not shown after {seconds} seconds"
        time.sleep(0.05)


def _open(browser: Any, address: str) -> None:
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)  # discard entries of the page before
    browser.get(address)
    _wait(lambda: browser.execute_script(STILL), "the report")


def _append(folder: Path, record: Record) -> None:
    with (folder / "records.jsonl").open("ab") as log:
        log.write(encode_line(record))


def _listeners(browser: Any) -> int:
    """Listeners for events that the page holds. Figures that are kept for ever keep theirs."""
    browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return int(next(metric["value"] for metric in metrics if metric["name"] == "JSEventListeners"))


def _errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] != "INFO"]


def test_a_new_reading_is_shown_within_seconds_and_the_reader_stays_where_they_are(
    browser: Any, tmp_path: Path
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    write_run(tmp_path, 60, end=False)
    with _watched(tmp_path) as (address, _):
        _open(browser, address)
        assert _text(browser).startswith("Last record ")
        assert " · loss 1.712\n" in _text(browser)
        figures = browser.find_elements("css selector", "figure")
        assert len(figures) == 6
        browser.execute_cdp_cmd("Performance.enable", {})
        listeners = _listeners(browser)
        whole = browser.execute_script(RANGE, figures[3])
        browser.execute_script("arguments[0].focus()", figures[3])
        ActionChains(browser).send_keys("+").perform()
        zoomed = browser.execute_script(RANGE, figures[3])
        assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
        browser.execute_script("arguments[0].scrollIntoView()", figures[3])
        top, spoken = browser.execute_script(TOP, figures[3]), figures[3].find_element("tag name", "figcaption")
        before = spoken.get_property("textContent")

        browser.execute_script("getSelection().selectAllChildren(document.querySelector('h1'))")
        _append(tmp_path, reading_record(60, 61) | {"alerts": {"same_data": "All ranks train on the same data."}})
        _append(tmp_path, alert_record("All ranks train on the same data.", window=610))  # it makes the page longer
        _wait(lambda: "window 610" in _text(browser), "the reading")
        assert "All ranks train on the same data." in _text(browser)
        assert browser.execute_script("return String(getSelection())") == "small language model"
        _wait(lambda: spoken.get_property("textContent") != before, "the reading in the figures")
        _wait(lambda: browser.execute_script(NEWEST, figures[3]) == "610", "the reading in the drawing")
        assert browser.execute_script(TOP, figures[3]) == pytest.approx(top, abs=2)
        assert browser.execute_script(RANGE, figures[3]) == zoomed
        assert browser.switch_to.active_element == figures[3]
        ActionChains(browser).send_keys("0").perform()
        assert browser.execute_script(RANGE, figures[3])[1] > whole[1]
        assert browser.execute_script(STILL)
        assert _listeners(browser) == pytest.approx(listeners, rel=0.05)  # 485 for 356 if a drawing stays

        events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        requests = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        own = address.partition("?")[0]
        assert any(url.startswith(f"{own}news?") for url in requests)
        assert [url for url in requests if not url.startswith((own, "data:", "about:"))] == []
        assert _errors(browser) == []


def test_it_survives_restarts_a_torn_line_a_removed_folder_and_a_new_run(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 12, end=False)
    with _watched(folder) as (address, watch):
        _open(browser, address)
        with (folder / "records.jsonl").open("ab") as log:
            log.write(b'{"kind":"reading","time":17')
        written(folder, [header_record(), reading_record(12, 13)])
        _wait(lambda: "window 130" in _text(browser) and "restarted 1 time" in _text(browser), "the restart")

        folder.rename(tmp_path / "elsewhere")
        _wait(lambda: "holds no log any more" in _text(browser), "the removed folder")
        assert "window 130" in _text(browser)
        (tmp_path / "elsewhere").rename(folder)
        _wait(lambda: "holds no log any more" not in _text(browser), "the folder that is back")

        shutil.rmtree(folder)
        write_run(folder, 5, header=header_record(run="another run", time=1_790_001_000.0))
        _wait(lambda: "another run" in _text(browser) and "window 50" in _text(browser), "the run in its place")
        _wait(lambda: browser.execute_script(STILL) and "restarted" not in _text(browser), "its figures")
        assert _errors(browser) == []

        watch.kill()
        _wait(lambda: "sonde watch does not answer" in _text(browser), "the end of sonde watch")
        assert "window 50" in _text(browser)


def test_several_runs_are_chosen_from_a_list(browser: Any, tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one", 12, end=False), write_policy_run(tmp_path / "other", 12)
    with _watched(one, other) as (address, _):
        _open(browser, address)
        links = "return [...document.querySelectorAll('.bar a')].map(link => link.innerText)"
        first, second = browser.execute_script(links)
        assert (first, second) == ("small language model", "adding by GRPO")
        rows = browser.find_elements("css selector", ".bar tbody tr")
        assert [" ".join(row.text.split(" last ")[0].split()) for row in rows] == [
            "small language model Time it first 1.645 120",
            "adding by GRPO Entropy is falling – 56 ended: training ended",
        ]
        browser.find_element("link text", second).click()
        _wait(lambda: "Entropy of the policy" in _text(browser), "the second run")
        _wait(lambda: browser.execute_script(STILL), "its figures")
        assert browser.execute_script("return document.title") == "adding by GRPO: Entropy is falling"
        assert browser.find_element("css selector", "[aria-current=true]").text == second
        assert _text(browser).count("Time it first") == 1  # in the list
        metrics = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        assert browser.execute_script(OVERFLOW) <= 0
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.back()
        _wait(lambda: "window 120" in _text(browser), "the first run again")
        assert _errors(browser) == []

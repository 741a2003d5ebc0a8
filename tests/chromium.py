"""A real browser, driven by selenium, whose console and network requests can be read."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

in_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"),
]
"""Marks of tests that need the browser."""


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """The browser, with an empty folder for its profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1200,900",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))  # named, so nothing is downloaded
    try:
        yield driver
    finally:
        driver.quit()


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
RANGE = """
const root = arguments[0].querySelector('[data-root-id]').dataset.rootId;
const range = Bokeh.documents.map(d => d.get_model_by_id(root)).find(m => m).x_range;
return [range.start, range.end];
"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def open_page(browser: Any, page: Path, *, width: int = 1200) -> None:
    """Load a page; fail on a console message, a request that leaves the page, or a figure that is not drawn."""
    browser.get("about:blank")
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)  # a window grows no narrower than 500 px
    for log in ("browser", "performance"):
        browser.get_log(log)  # discard entries of the page before
    browser.get(page.as_uri())
    deadline = time.monotonic() + 15
    while not browser.execute_script("return window.Bokeh !== undefined && Bokeh.documents.every(d => d.is_idle)"):
        assert time.monotonic() < deadline, "Bokeh did not come to rest"
        time.sleep(0.05)

    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert page.as_uri() in requests  # the log does see requests
    assert [url for url in requests if not url.startswith("data:") and url != page.as_uri()] == []
    drawn = browser.execute_script(DRAWN)
    expected = browser.execute_script("return Bokeh.documents.reduce((n, d) => n + d.roots().length, 0)")
    assert drawn == [True] * expected


def page_text(browser: Any) -> str:
    return str(browser.find_element("tag name", "body").text)

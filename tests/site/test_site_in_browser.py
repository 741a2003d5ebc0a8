"""Each page of the site in a real browser, as wide as a phone and as wide as a desk's screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import chromium, in_browser

pytestmark = [pytest.mark.slow, *in_browser]

WIDTHS = (390, 1280)  # px: a phone, a screen on a desk
SMALLEST_TEXT = 14  # px

# What is wrong with a page, in words.
FAULTS = """
const faults = [];
const root = document.scrollingElement, viewport = document.querySelector('meta[name=viewport]');
if (!viewport || !viewport.content.includes('width=device-width')) faults.push('is as wide on a phone as on a desk');
if (root.clientWidth > WIDTH || root.clientWidth < WIDTH - 20) faults.push(`is ${root.clientWidth} px wide`);
// The theme lets the whole article scroll on a phone, which is as bad as a page that scrolls.
for (const whole of [root, document.querySelector('.content')])
  if (whole.scrollWidth > whole.clientWidth) faults.push(`scrolls sideways: ${whole.scrollWidth} px`);
const scrolls = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
for (const element of document.querySelectorAll('article table, article pre, article img')) {
  let inside = element;
  while (inside.tagName !== 'ARTICLE' && !scrolls(inside)) inside = inside.parentElement;
  const right = element.getBoundingClientRect().left + element.scrollWidth;
  if (right > WIDTH && inside.tagName === 'ARTICLE') faults.push('cut off: ' + element.outerHTML.slice(0, 80));
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const small = new Set();
while (walker.nextNode()) {
  const text = walker.currentNode.data, parent = walker.currentNode.parentElement;
  if (!text.trim() || ['SCRIPT', 'STYLE', 'TITLE', 'NOSCRIPT'].includes(parent.tagName)) continue;
  const size = parseFloat(getComputedStyle(parent).fontSize);
  if (size < SMALLEST) small.add(`${size} px: ${parent.tagName}.${parent.className} ${text.slice(0, 40)}`);
}
return [...faults, ...[...small].slice(0, 5)];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


def widen(browser: Any, width: int) -> None:
    """A window of the browser itself grows no narrower than 500 px.

    A phone would zoom out where a page is too wide, and hide that it is.
    """
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def faults(browser: Any, width: int) -> list[str]:
    script = FAULTS.replace("WIDTH", str(width)).replace("SMALLEST", str(SMALLEST_TEXT))
    return list(browser.execute_script(script))


def test_every_page_can_be_read_on_a_phone_and_on_a_desk(browser: Any, site: Path) -> None:
    wrong = {}
    for page in sorted(set(site.rglob("*.html")) - {site / "index.html"}):  # which leads to docs/index.html at once
        browser.get(page.as_uri())
        for width in WIDTHS:
            widen(browser, width)
            if found := faults(browser, width):
                wrong[str(page.relative_to(site)), width] = found
    assert wrong == {}
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_can_be_reached(browser: Any, site: Path, width: int) -> None:
    """A phone's navigation is behind a button, which opens it over the page."""
    widen(browser, width)
    browser.get((site / "docs" / "limits.html").as_uri())
    link = browser.find_element("css selector", ".sidebar-tree a[href='batch-size.html']")

    def is_in_sight() -> bool:
        box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", link)
        return bool(box["left"] >= 0 and box["right"] <= width and box["height"] > 10)

    assert is_in_sight() == (width > 500)
    if width < 500:
        button = browser.find_element("css selector", "header label[for='__navigation']")
        assert min(button.size.values()) >= 24  # px: a finger finds it
        button.click()
        wait_until(is_in_sight)
    browser.execute_script("arguments[0].scrollIntoView({behavior: 'instant', block: 'center'})", link)
    link.click()
    assert browser.current_url.endswith("batch-size.html")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""Makes the pictures of docs/ anew: runs both demos and the commands of docs/branch.md, and takes pictures of their
reports in Chromium; also of trackers.

python -m docs.figures [batch-size] [entropy] [branch] [trackers]
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from docs.figures import trackers
from tests.chromium import chromium

from sonde.runs.report.write import write_report

DOCS = Path(__file__).parent.parent
WIDTH = 985  # px

# Chromium waits for the plots: they are drawn when every document of Bokeh has come to rest.
AT_REST = "return window.Bokeh !== undefined && Bokeh.documents.every(d => d.is_idle)"
# The box around the first and the last of the elements, with a margin.
BOX = """
const boxes = arguments[0].map(e => e.getBoundingClientRect()), margin = 16;
const top = Math.max(0, Math.min(...boxes.map(b => b.top)) + scrollY - margin);
const bottom = Math.max(...boxes.map(b => b.bottom)) + scrollY + margin;
return {x: 0, y: top, width: innerWidth, height: bottom - top, scale: 1};
"""


def report_of(demo: list[str], folder: Path) -> Path:
    """Run a demo; return its report."""
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "sonde", "demo", *demo, "--out", "runs/demo"], check=True, cwd=folder)
    return folder / "runs/demo/report.html"


def report_of_branches(folder: Path) -> Path:
    """Run the first commands of docs/branch.md; return the report."""
    folder.mkdir()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    text = re.sub(r" \\\n +", " ", (DOCS / "branch.md").read_text())
    for command in re.findall(r"^    ((?:python|sonde branch) .*examples/branch_nanogpt.py .*)$", text, flags=re.M):
        words = shlex.split(command.replace("examples/", f"{DOCS.parent}/examples/"))
        started = words[1:] if words[0] == "python" else ["-m", *words]
        subprocess.run([sys.executable, *started], check=True, cwd=folder, env=environment)
    return write_report(folder / "branches")


def open_report(browser: Any, report: Path) -> None:
    """Show it, and wait until it is drawn."""
    browser.set_window_size(WIDTH, 1000)
    browser.get(report.as_uri())
    while not browser.execute_script(AT_REST):
        time.sleep(0.1)


def picture(browser: Any, name: str, *selectors: str) -> None:
    """Write a picture of the part of the report from the first to the last of these elements."""
    elements = [browser.find_element("xpath", selector) for selector in selectors]
    clip = browser.execute_script(BOX, elements)
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    (DOCS / name).write_bytes(base64.b64decode(taken["data"]))
    sys.stdout.write(f"{DOCS / name}\n")


def section(title: str) -> str:
    """The section of the report with this heading."""
    return f"//section[h2[text()='{title}']]"


def main(demos: list[str]) -> None:
    """Six pictures, or those of what is named."""
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder) / "profile") as browser:
        if "batch-size" in demos:
            open_report(browser, report_of([], Path(folder) / "batch-size"))
            picture(browser, "report.png", "//header", section("Noise scale and batch size"))
            picture(browser, "tradeoff.png", section("What the batch size costs"))
        if "entropy" in demos:
            open_report(browser, report_of(["entropy"], Path(folder) / "entropy"))
            picture(browser, "entropy-report.png", section("Forecast against truth"))
        if "branch" in demos:
            open_report(browser, report_of_branches(Path(folder) / "branch"))
            picture(browser, "branch.png", section("Units that each batch size needs"))
        if "trackers" in demos:
            trackers.pictures(browser, Path(folder), DOCS)


if __name__ == "__main__":
    main(sys.argv[1:] or ["batch-size", "entropy", "branch", "trackers"])

"""Pictures of sonde's numbers in the pages of TensorBoard and trackio, which run on this machine alone."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
SHOWN = ("gns/b_simple", "gns/b_simple_low", "gns/b_simple_high", "gns/trace_cov")
SCRIPT = """
import torch, sonde
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
direction = torch.randn(32, 1)
log = sonde.RunLog(["tensorboard", "trackio"], run="tiny", every=5)
with sonde.attach(model, optimizer, unit="rows", units_per_piece="first dim", log=log, every=1) as probe:
    for step in range(240):
        for micro in range(4):
            x = torch.randn(64, 32)
            loss = (model(x) - torch.tanh(x @ direction) - torch.randn(64, 1)).square().mean() / 4
            loss.backward()
        probe.step()
        optimizer.step()
        optimizer.zero_grad()
"""


def pictures(browser: Any, folder: Path, docs: Path) -> None:
    """Train a tiny model with both trackers, and take a picture of the page of each.

    Args:
        browser: of selenium.
        folder: for what the trackers write.
        docs: where the pictures go.
    """
    environment = os.environ | {"TRACKIO_DIR": str(folder / "trackio"), "GRADIO_ANALYTICS_ENABLED": "False"}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, env=environment, check=True)
    browser.set_window_size(1300, 1000)
    port = _free_port()
    command = ["tensorboard", "--logdir", "runs", "--host", "127.0.0.1", "--port", str(port)]
    with _server(command, port, folder, environment):
        tags = "|".join(SHOWN)
        browser.get(f"http://127.0.0.1:{port}/?darkMode=false&smoothing=0&tagFilter=^({tags})$#timeseries")
        time.sleep(5)
        browser.find_element("xpath", "//button[contains(., 'Settings')]").click()
        _save(browser, docs / "tensorboard.png")
    with _server(["trackio", "show", "--project", "sonde"], 7860, folder, environment):
        browser.get(f"http://127.0.0.1:7860/?project=sonde&metrics={','.join(SHOWN)}&sidebar=hidden&smoothing=0")
        _save(browser, docs / "trackio.png")


def _save(browser: Any, file: Path) -> None:
    time.sleep(5)  # the page draws its curves
    browser.save_screenshot(str(file))
    sys.stdout.write(f"{file}\n")


@contextlib.contextmanager
def _server(command: list[str], port: int, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen([str(BIN / command[0]), *command[1:]], cwd=folder, env=environment)
    try:
        for _ in range(120):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
                break
            time.sleep(0.5)
        else:
            raise TimeoutError(f"{command[0]} has not answered on port {port}")
        yield
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

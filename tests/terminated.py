"""A run that SIGTERM reaches, in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import sonde

{before}
model = nn.Linear(3, 1)
log = sonde.RunLog(sonde.JsonlSink(sys.argv[1]), every={every})
probe = sonde.attach(model, unit="rows", log=log, verbose=False)
{after}
def window():
    for _ in range(2):
        with probe.piece(units=4):
            model(torch.randn(4, 3)).square().mean().backward()
    probe.step()
    model.zero_grad()
for _ in range({windows}):
    window()
{signal}
window()
print("went on", flush=True)
{end}
"""

TOLD = "the process was told to end (SIGTERM)"
"""The reason in the log."""

RAISES = "def stop(*_): raise KeyboardInterrupt\nsignal.signal(signal.SIGTERM, stop)"
CATCHES = "try:\n    {}\nexcept KeyboardInterrupt:\n    {}"

SEND = "os.kill(os.getpid(), signal.SIGTERM)"


def run_script(
    folder: Path,
    *,
    before: str = "",
    after: str = "",
    end: str = "",
    send: str = SEND,
    every: int = 2,
    windows: int = 5,
) -> tuple[int, str, str]:
    """Run the script in a child that is forked here, since a new process takes seconds to import torch.

    Returns:
        Its status, minus the signal that ended it, and what it wrote to its two outputs.
    """
    code = SCRIPT.format(before=before, after=after, signal=send, end=end, every=every, windows=windows)
    folder.mkdir(parents=True, exist_ok=True)
    if (child := os.fork()) == 0:
        status = 1
        try:
            for output, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), output)
            sys.argv = ["script", str(folder)]
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            logging.basicConfig(stream=sys.stderr, force=True)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            exec(code, {"__name__": "script"})
            status = 0
        except SystemExit as asked:
            status = int(asked.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, waited = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(waited), (folder / "out").read_text(), (folder / "err").read_text()


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def ends_of(folder: Path) -> list[str]:
    return [record["reason"] for record in records_of(folder) if record["kind"] == "end"]

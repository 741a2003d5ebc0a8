"""sonde's sentences beside the progress bars of tqdm."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sonde.console import tell
from tests.commands.scripts import END, START
from tests.commands.unmodified import check_untouched

tqdm = pytest.importorskip("tqdm").tqdm


def shown(written: str) -> list[str]:
    """The lines of a terminal: what comes after a carriage return is written over the line."""
    lines = [""]
    for part in written.replace("\r\n", "\n").replace("\n", "\r\n").split("\r"):
        if part.startswith("\n"):
            lines.append("")
            part = part[1:]
        lines[-1] = part + lines[-1][len(part) :]
    return [line.rstrip() for line in lines]


def train_with_a_bar(say: Callable[[str], None], **options: object) -> None:
    for step in tqdm(range(4), mininterval=0, ncols=60, desc="training", **options):
        if step == 2:
            say("a sentence")


def test_a_sentence_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    train_with_a_bar(tell)
    lines = shown(stream.getvalue())
    assert lines[0] == "sonde: a sentence"
    assert lines[1].startswith("training: 100%")
    assert lines[2:] == [""]


def test_a_bar_on_the_same_terminal_by_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, end = os.openpty()
    with open(end, "w") as stream, open(os.dup(end), "w") as of_bar:
        monkeypatch.setattr(sys, "stderr", stream)
        train_with_a_bar(tell, file=of_bar)
        written = b""
        while b"100%" not in written:  # a terminal hands on what was written a little later
            written += os.read(terminal, 2**16)
    os.close(terminal)
    lines = shown(written.decode())
    assert lines[0] == "sonde: a sentence"
    assert lines[1].startswith("training: 100%")


def test_a_bar_in_a_file_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    files = [io.StringIO(), io.StringIO()]
    bar = "{desc}: {n_fmt}/{total_fmt}"  # without the time
    train_with_a_bar(tell, file=files[0], bar_format=bar)
    train_with_a_bar(lambda text: None, file=files[1], bar_format=bar)
    assert files[0].getvalue() == files[1].getvalue()
    assert sys.stderr.getvalue() == "sonde: a sentence\n"


WITH_A_BAR = (
    START
    + """
from tqdm import tqdm
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in tqdm(range(12), mininterval=0, ncols=60, bar_format="{desc}: {n_fmt}/{total_fmt}", desc="training"):
    for micro in range(2):
        x, y = batch()
        nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    + END
)


def test_a_script_with_a_bar_under_sonde_run(tmp_path: Path) -> None:
    measured = check_untouched(WITH_A_BAR, tmp_path, forks=True)
    lines = shown(measured.err)
    assert len([line for line in lines if line.startswith("sonde: ")]) >= 3
    assert all("sonde: " not in line[1:] and "training" not in line[1:] for line in lines)

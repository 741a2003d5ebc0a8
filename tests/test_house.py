"""Ratchets: how large the house may be, and that it gives the numbers that it gave before it was rebuilt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import house, recorded_windows
from tests.new_process import in_new_process
from tests.ranks import Ranks

PRESENT = {
    "lines of code: batch_size": 8_600,  # the verdict quotes the study
    "lines of code: commands": 1_471,  # sonde branch: units and noise scales that contradict each other
    "lines of code: contrib": 478,
    "lines of code: demos": 633,  # no Ctrl-C is lost while ranks start
    "lines of code: evidence": 1_315,  # killed branches end; rules of the rate near a noise scale
    "lines of code: files outside folders": 766,  # a command more
    "lines of code: gradient_norm": 1_793,  # several threads share no short loop out
    "lines of code: integrations": 1_604,  # TRL: truncated sampling, terms of the loss, a budget
    "lines of code: log": 450,  # a branch has a log of its own
    "lines of code: parallel": 1_182,  # gradients of some parameters alone are given back
    "lines of code: policy": 5_211,  # truncated policies, entropies by position, KL and bonus as causes
    "lines of code: runs": 2_745,  # the page of branches
    "lines of code: stats": 178,  # + 1: a state shares nothing with its object
    "lines of code of the study": 1_603,  # its laws moved here; what the verdict quotes
    "files of source": 198,  # evidence
    "files that one window closes over": 71,  # the verdict quotes the study
    "files that one clip closes over": 16,
    "files that one forecast closes over": 36,
    "calls of one measured window": 373,
    "files of one measured window": 25,
    "words of docs": 19_170,  # what the noise scale is worth
    "lines of tests": 50_262,  # the verdict by optimizer; branches that are killed
}
"""What `python -m tests.house` prints. A change may lower a number. A line that raises one says why, beside it."""


def test_nothing_has_grown() -> None:
    now = in_new_process(house.sizes)  # where no probe is that another test has left open
    assert {name: n for name, n in now.items() if n > PRESENT.get(name, 0)} == {}, "make something smaller instead"
    too_high = {name: now.get(name, 0) for name, n in PRESENT.items() if now.get(name, 0) < 0.97 * n}
    assert too_high == {}, "smaller than the table says: write the new numbers into it"


@pytest.mark.parametrize("run", ["plain", "two DDP ranks"])
def test_windows_are_those_recorded_before_the_house_was_rebuilt(run: str, ranks2: Ranks) -> None:
    """All sums are in float64, and so are the weights: what differs between processors is below 1e-12."""
    rows = recorded_windows.plain() if run == "plain" else ranks2(recorded_windows.on_ranks)[0]
    expected = json.loads(recorded_windows.PATH.read_text())[run]
    assert len(rows) == len(expected) == recorded_windows.WINDOWS
    for row, recorded in zip(rows, expected, strict=True):
        assert _flat(row) == pytest.approx(_flat(recorded), rel=1e-9)


def _flat(value: Any, name: str = "") -> dict[str, float]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{name}/{key}").items()}

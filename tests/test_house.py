"""Ratchets: how large the house may be, and that it gives the numbers that it gave before it was rebuilt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import house, recorded_windows
from tests.new_process import in_new_process
from tests.ranks import Ranks

PRESENT = {
    "lines of code: batch_size": 8_402,  # whole batches; the advice at exit knows the ranks
    "lines of code: commands": 2_376,  # trials of a script, JSON of all commands
    "lines of code: contrib": 388,
    "lines of code: decision": 1_186,  # what to do with the batch size: in four folders before
    "lines of code: demos": 510,  # the verdict of a log
    "lines of code: evidence": 1_110,  # SIGTERM ends what sonde doctor starts; rates by step
    "lines of code: files outside folders": 562,  # a table of commands
    "lines of code: gradient_norm": 1_599,  # several threads share no short loop out
    "lines of code: integrations": 1_586,  # schedules of trainers; their own norms, for all by one mechanism
    "lines of code: log": 514,  # the values of records, which lay in runs
    "lines of code: parallel": 1_238,  # norms that are still to be summed
    "lines of code: policy": 4_722,  # truncated policies, entropies by position, KL and bonus as causes
    "lines of code: runs": 3_026,  # what a log says of the next batch, for the report and for sonde advise
    "lines of code: schedule": 339,  # rates of a loop, which lay in evidence
    "lines of code: stats": 261,  # + 1: a state shares nothing with its object
    "lines of code of the study": 2_117,  # what rules of the rate cost beside the best rates
    "files of source": 240,  # advice from a log, for the report too; own norms
    "files that one window closes over": 74,  # the next batch; the norm of the update
    "files that one clip closes over": 14,
    "files that one forecast closes over": 34,
    "calls of one measured window": 388,  # the update's norm by a sample of elements
    "files of one measured window": 27,  # the same
    "words of docs": 23_545,  # B_crit in the verdict; a growing batch at two ratios
    "lines of tests": 55_649,  # advice, its verdict, flags that multiply, norms of all trainers
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

"""`sonde doctor`: checks this machine."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import arg

from sonde.commands.doctor_checks.check import Check
from sonde.commands.doctor_checks.environment import environment_checks, has_torch
from sonde.commands.doctor_checks.processes import self_tests
from sonde.evidence.shell_run import terminated_as_interrupted
from sonde.version import __version__

FAILED = 1
_STYLES = {"ok": "green", "warning": "yellow", "fails": "red", "not there": "dim"}


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine: versions, ranks, devices, the folder of logs, and each mechanism beside an exact result.

    Attributes:
        out: Folder of your logs.
        json: Print JSON.
    """

    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs")
    json: bool = False


def run_doctor(options: DoctorOptions) -> int:
    """Check, and print a row for each check.

    Args:
        options: of the command line.

    Returns:
        The exit status: 0 if nothing fails, otherwise 1.
    """
    with terminated_as_interrupted(), Console(stderr=True).status("checking"):
        checks = list(_checks(options.out))
    if options.json:
        rows = [dataclasses.asdict(check) for check in checks]
        sys.stdout.write(json.dumps({"sonde": __version__, "checks": rows}, indent=1, ensure_ascii=False) + "\n")
    else:
        _print(checks)
    return FAILED if any(check.state == "fails" for check in checks) else 0


def _checks(folder: Path) -> Iterator[Check]:
    yield from environment_checks(folder)
    if not has_torch():
        yield Check("self-tests", "not there", "they need torch")
        return
    yield from self_tests("alone")
    yield from self_tests("ranks", n_ranks=2)


def _print(checks: Sequence[Check]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("check", "result", "found", "what to do"):
        table.add_column(title, no_wrap=title in ("check", "result"), overflow="fold")
    for each in checks:
        state = Text(each.state, _STYLES[each.state])
        table.add_row(Text(each.name), state, Text(each.found), Text(each.advice))
    Console(highlight=False).print(table)


COMMAND = (DoctorOptions, run_doctor)

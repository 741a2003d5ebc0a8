"""`sonde doctor`: checks this machine, and what `sonde run` would find in a script."""

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
from sonde.commands.doctor_checks.script import script_checks
from sonde.commands.run import RunOptions, arguments_of, check_options
from sonde.evidence.shell_run import terminated_as_interrupted
from sonde.version import __version__

USAGE = "sonde doctor [options of sonde run] -- train.py …"
FAILED = 1
_STYLES = {"ok": "green", "warning": "yellow", "fails": "red", "not there": "dim"}


@dataclass(frozen=True)
class DoctorOptions(RunOptions):
    """Check this machine: versions, ranks, devices, the folder of logs, and each mechanism beside an exact result.

    Use: sonde doctor, or sonde doctor [options of sonde run] -- train.py --its own options. The script really starts,
    as with sonde run, and is stopped when a step of it was measured. No log of it is left.

    Attributes:
        seconds: Stop the script after this time, if no step was measured by then.
        json: Print JSON.
    """

    seconds: Annotated[float, arg(metavar="SECONDS")] = 120.0
    json: bool = False


def run_doctor(options: DoctorOptions, command: Sequence[str]) -> int:
    """Check, and print a row for each check.

    Args:
        options: of the command line.
        command: a script with its arguments; none to check the machine alone.

    Returns:
        The exit status: 0 if nothing fails, otherwise 1.

    Raises:
        ValueError: for options outside their range, and a command that is not there.
    """
    if not options.seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {options.seconds:g}: leave it out to wait for 120 s")
    if command:
        check_options(options)
        arguments_of(command, options.nproc)
    with terminated_as_interrupted(), Console(stderr=True).status("checking"):
        checks = list(_checks(options, command))
    if options.json:
        rows = [dataclasses.asdict(check) for check in checks]
        sys.stdout.write(json.dumps({"sonde": __version__, "checks": rows}, indent=1, ensure_ascii=False) + "\n")
    else:
        _print(checks)
    return FAILED if any(check.state == "fails" for check in checks) else 0


def _checks(options: DoctorOptions, command: Sequence[str]) -> Iterator[Check]:
    folder = options.out or Path("runs")
    yield from environment_checks(folder)
    if not has_torch():
        yield Check("self-tests", "not there", "they need torch")
        return
    yield from self_tests("alone", folder)
    yield from self_tests("ranks", folder, n_ranks=2)
    if command:
        yield from script_checks(options, command, options.seconds)


def _print(checks: Sequence[Check]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("check", "result", "found", "what to do"):
        table.add_column(title, no_wrap=title in ("check", "result"), overflow="fold")
    for each in checks:
        state = Text(each.state, _STYLES[each.state])
        table.add_row(Text(each.name), state, Text(each.found), Text(each.advice))
    Console(highlight=False).print(table)


COMMAND = (DoctorOptions, run_doctor)

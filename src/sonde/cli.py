"""The command line: `sonde run -- SCRIPT`, `sonde measure MODEL`, `sonde branch -- SCRIPT`, `sonde report RUN`, and
`sonde demo [entropy]`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg, subcommand

from sonde.runs.report.write import write_report
from sonde.version import __version__

ERROR = 2
INTERRUPTED = 130  # what shells expect after Ctrl-C


@dataclass(frozen=True)
class ReportOptions:
    """Write the report of a run: one HTML file that opens in any browser.

    Attributes:
        run: Folder of the run, or its records.jsonl.
        out: File to write.
    """

    run: Positional[Path]
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: report.html beside the log)")] = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        The exit status: that of the command, or 2 for input that cannot be used.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except SystemExit as exit_of_parser:  # after --help, or after a message about wrong arguments
        return int(exit_of_parser.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, ImportError) as error:
        needs_torch = isinstance(error, ImportError) and error.name == "torch"
        hint = ": install torch, without which only `sonde report` works" if needs_torch else ""
        print(f"sonde: error: {error}{hint}", file=sys.stderr)
        return ERROR


def options_of(args: Sequence[str]) -> tuple[Any, list[str]]:
    """The options of a command, and the script of `sonde run` or `sonde branch` with its own.

    Args:
        args: arguments after the program's name.
    """
    if args[:1] == ["report"]:
        return tyro.cli(ReportOptions, prog="sonde report", args=args[1:]), []
    # Here, since they import torch, which a report does not need.
    from sonde.commands.branch import USAGE, BranchOptions
    from sonde.commands.measure import MeasureOptions
    from sonde.commands.run import RunOptions, split_command
    from sonde.demos.arithmetic.run import EntropyDemoOptions
    from sonde.demos.byte_lm.options import DemoOptions

    script: list[str] = []
    if args[:1] == ["run"]:
        own, script = split_command(args[1:])
        args = ["run", *own]
    if args[:1] == ["branch"]:
        own, script = split_command(args[1:], "branch", USAGE)
        args = ["branch", *own]
    if args[:2] == ["demo", "entropy"]:
        return tyro.cli(EntropyDemoOptions, prog="sonde demo entropy", args=args[2:]), script
    commands = (
        Annotated[RunOptions, subcommand("run")]
        | Annotated[DemoOptions, subcommand("demo")]
        | Annotated[MeasureOptions, subcommand("measure")]
        | Annotated[BranchOptions, subcommand("branch")]
        | Annotated[ReportOptions, subcommand("report")]
    )
    about = "Measure a PyTorch training run while it runs, or a checkpoint. `sonde --version` prints the version."
    return tyro.cli(commands, prog="sonde", description=about, args=args), script


def _run(args: list[str]) -> int:
    if args == ["--version"]:
        print(f"sonde {__version__}")
        return 0
    options, script = options_of(args)
    if isinstance(options, ReportOptions):
        print(f"report  {write_report(options.run, options.out)}")
        return 0
    from sonde.commands.branch import BranchOptions, run_branch
    from sonde.commands.measure import MeasureOptions, run_measure
    from sonde.commands.run import RunOptions, run_script
    from sonde.demos.arithmetic.run import EntropyDemoOptions, run_entropy_demo
    from sonde.demos.byte_lm.options import DemoOptions
    from sonde.demos.byte_lm.run import run_demo

    match options:
        case RunOptions():
            return run_script(options, script)
        case DemoOptions():
            return run_demo(options)
        case EntropyDemoOptions():
            return run_entropy_demo(options)
        case MeasureOptions():
            return run_measure(options)
        case BranchOptions():
            return run_branch(options, script)
    raise AssertionError(f"a command of the kind {type(options).__name__}")

"""The command line: `sonde run -- SCRIPT`, `sonde measure MODEL`, `sonde report RUN`, `sonde demo [entropy]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg, subcommand

from sonde.commands.measure_options import MeasureOptions
from sonde.commands.run_options import RunOptions
from sonde.demos.arithmetic.options import EntropyDemoOptions
from sonde.demos.byte_lm.options import DemoOptions
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


Command = RunOptions | DemoOptions | EntropyDemoOptions | MeasureOptions | ReportOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        The exit status: that of the command, or 2 for input that cannot be used.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:
        print(f"sonde {__version__}")
        return 0
    try:
        if args[:1] == ["run"]:
            return _run_script(args[1:])
        return _run(_parse(args))
    except SystemExit as exit_of_parser:  # after --help, or after a message about wrong arguments
        return int(exit_of_parser.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, ImportError) as error:
        print(f"sonde: error: {error}", file=sys.stderr)
        return ERROR


def _parse(args: Sequence[str]) -> Command:
    if list(args[:2]) == ["demo", "entropy"]:
        return _parse_entropy_demo(args[2:])
    command = _parse_with(args, DemoOptions())
    if isinstance(command, DemoOptions) and command.config is not None:
        command = _parse_with(args, DemoOptions.from_file(command.config))  # flags win over the file
    return command


def _parse_with(args: Sequence[str], demo: DemoOptions) -> Command:
    commands = (
        Annotated[RunOptions, subcommand("run")]
        | Annotated[DemoOptions, subcommand("demo", default=demo)]
        | Annotated[MeasureOptions, subcommand("measure")]
        | Annotated[ReportOptions, subcommand("report")]
    )
    return tyro.cli(
        commands,
        prog="sonde",
        description="Measure a PyTorch training run while it runs, or a checkpoint. "
        "`sonde --version` prints the version.",
        args=args,
    )


def _parse_entropy_demo(args: Sequence[str]) -> EntropyDemoOptions:
    def parsed(default: EntropyDemoOptions) -> EntropyDemoOptions:
        return tyro.cli(EntropyDemoOptions, prog="sonde demo entropy", default=default, args=args)

    options = parsed(EntropyDemoOptions())
    return options if options.config is None else parsed(EntropyDemoOptions.from_file(options.config))


def _run_script(args: Sequence[str]) -> int:
    """`sonde run`: only the arguments before `--` are sonde's own."""
    from sonde.commands.run import run_script, split_command

    own, script = split_command(args)
    options = _parse_with(["run", *own], DemoOptions())
    assert isinstance(options, RunOptions)
    return run_script(options, script)


def _run(command: Command) -> int:
    """Carry out a command. What it needs is imported only here: --help needs none of it."""
    match command:
        case DemoOptions():
            from sonde.demos.byte_lm.run import run_demo

            return run_demo(command)
        case EntropyDemoOptions():
            from sonde.demos.arithmetic.run import run_entropy_demo

            return run_entropy_demo(command)
        case MeasureOptions():
            from sonde.commands.measure import run_measure

            return run_measure(command)
        case ReportOptions():
            from sonde.runs.report.write import write_report

            print(f"report  {write_report(command.run, command.out)}")
            return 0
        case RunOptions():
            raise AssertionError("`sonde run` takes its script from the command line, in `_run_script`")

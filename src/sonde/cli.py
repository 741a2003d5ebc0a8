"""The command line: a table of commands, each with its options and what runs it in a module of its own."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from sonde.version import __version__

ERROR = 2
INTERRUPTED = 130  # what shells expect after Ctrl-C


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        about: what it does, for `sonde --help`.
        module: imported when the command is used; most import torch.
        options: the dataclass of its options there. tyro reads them from the command line.
        run: the function there that takes these options, and returns the exit status.
        takes_script: whether a script of the user's follows two dashes, which `run` takes too. `USAGE` of the module
            shows how.
    """

    about: str
    module: str
    options: str
    run: str
    takes_script: bool = False


COMMANDS = {
    "run": Command(
        "measure a training script as it is: sonde run -- train.py",
        "sonde.commands.run",
        "RunOptions",
        "run_script",
        takes_script=True,
    ),
    "report": Command("write the report of a run", "sonde.commands.report", "ReportOptions", "run_report"),
    "watch": Command(
        "watch runs while they train, in the terminal and on a page",
        "sonde.commands.watch",
        "WatchOptions",
        "run_watch",
    ),
    "measure": Command(
        "measure a checkpoint on your text, without training",
        "sonde.commands.measure",
        "MeasureOptions",
        "run_measure",
    ),
    "branch": Command(
        "measure the critical batch size by short trainings from a checkpoint",
        "sonde.commands.branch",
        "BranchOptions",
        "run_branch",
        takes_script=True,
    ),
    "demo": Command(
        "train a small language model and judge its batch size",
        "sonde.demos.byte_lm.run",
        "DemoOptions",
        "run_demo",
    ),
    "demo entropy": Command(
        "train a tiny policy and forecast its entropy",
        "sonde.demos.arithmetic.run",
        "EntropyDemoOptions",
        "run_entropy_demo",
    ),
}


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


def _run(args: list[str]) -> int:
    if args[:1] == ["--version"]:
        print(f"sonde {__version__}")
        return 0
    if args[:1] in (["--help"], ["-h"]):
        print(_help())
        return 0
    # The longest name: "demo entropy" before "demo".
    name = next((name for n in (2, 1) if (name := " ".join(args[:n])) in COMMANDS), None)
    if name is None:
        raise ValueError(_unknown(args))
    command, args = COMMANDS[name], args[len(name.split()) :]
    module = importlib.import_module(command.module)
    run = getattr(module, command.run)
    script: list[str] = []
    if command.takes_script:
        from sonde.commands.run import split_command

        args, script = split_command(args, name, module.USAGE)
    options = tyro.cli(getattr(module, command.options), prog=f"sonde {name}", args=args)
    status: int = run(options, script) if command.takes_script else run(options)
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: sonde COMMAND [options]",
            "",
            "Measure a PyTorch training run while it runs, or a checkpoint.",
            "",
            *lines,
            "",
            "sonde COMMAND --help lists the options of a command; sonde --version prints the version.",
        )
    )


def _unknown(args: Sequence[str]) -> str:
    names = ", ".join(COMMANDS)
    if not args:
        return f"expected a command, got none: use one of {names}; sonde --help says what they do"
    near = difflib.get_close_matches(args[0], COMMANDS, n=1)
    hint = f": did you mean {near[0]}?" if near else "; sonde --help says what they do"
    return f"expected one of {names}, got {args[0]!r}{hint}"

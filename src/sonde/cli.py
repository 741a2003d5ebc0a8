"""The command line: a table of commands, each in a module of its own."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from sonde.version import __version__

ERROR = 2
INTERRUPTED = 130  # what shells expect after Ctrl-C


COMMANDS = {
    "run": ("sonde.commands.run", "measure a training script as it is: sonde run -- train.py"),
    "report": ("sonde.commands.report", "write the report of a run"),
    "compare": ("sonde.commands.compare", "compare several runs: losses at equal units, steps and time"),
    "watch": ("sonde.commands.watch", "watch runs while they train, in the terminal and on a page"),
    "advise": ("sonde.commands.advise", "say which batch size and learning rate to take next, and what they save"),
    "measure": ("sonde.commands.measure", "measure a checkpoint on your text, without training"),
    "branch": ("sonde.commands.branch", "measure the critical batch size by short trainings from a checkpoint"),
    "doctor": ("sonde.commands.doctor", "check whether this machine is right"),
    "demo": ("sonde.demos.byte_lm.run", "train a small language model and judge its batch size"),
    "demo entropy": ("sonde.demos.arithmetic.run", "train a tiny policy and forecast its entropy"),
}
"""The module of each command, and what the command does.

A module is imported when its command is used; most import torch. It ends with `COMMAND`: the dataclass of its options,
which tyro reads from the command line, and the function that takes these options and returns the exit status. If a
script of the user's follows two dashes, the function takes the script too, and the module shows that in its `USAGE`.
"""


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
        hint = (
            ": install torch, without which `sonde report`, `advise`, `compare` and `watch` work" if needs_torch else ""
        )
        print(f"sonde: error: {error}{hint}", file=sys.stderr)
        return ERROR


def _run(args: list[str]) -> int:
    if args[:1] == ["--version"]:
        print(f"sonde {__version__}")
        return 0
    if args[:1] in (["--help"], ["-h"]):
        print(_help())
        return 0
    run, options, script = options_of(args)
    return run(options) if script is None else run(options, script)


def options_of(args: Sequence[str]) -> tuple[Callable[..., int], Any, list[str] | None]:
    """What runs a command, its options, and the script with its own arguments; None for a command that takes none.

    Args:
        args: arguments after the program's name.

    Raises:
        ValueError: for an unknown command, and a script that is missing.
        SystemExit: after --help, and after a message about wrong options.
    """
    # The longest name: "demo entropy" before "demo".
    name = next((name for n in (2, 1) if (name := " ".join(args[:n])) in COMMANDS), None)
    if name is None:
        raise ValueError(_unknown(args))
    own, script = list(args[len(name.split()) :]), None
    module = importlib.import_module(COMMANDS[name][0])
    if hasattr(module, "USAGE"):
        from sonde.commands.run import split_command

        own, script = split_command(own, name, module.USAGE, is_optional=name == "advise")
    options_type, run = module.COMMAND
    return run, tyro.cli(options_type, prog=f"sonde {name}", args=own), script


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
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

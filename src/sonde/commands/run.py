"""`sonde run -- train.py …`: starts an unmodified script, in whose processes sonde attaches itself.

The command becomes the script's own process, or its launcher: exit status, signals and stdout are its own.
Environment variables tell Python to import `on_start/sitecustomize.py` first, in that process and in all it starts.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sonde.batch_size.setup import NoiseScaleOptions
from sonde.commands.run_options import RunOptions
from sonde.commands.run_script.counted_units import check_units_from
from sonde.commands.run_script.settings import VARIABLE, Settings

USAGE = "sonde run [options] -- train.py …"
_ON_START = Path(__file__).parent / "run_script" / "on_start"
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")


def split_command(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of `sonde run`, and the command after `--`.

    Args:
        args: what follows `run`.

    Raises:
        ValueError: when there is no command.
    """
    own, dashes, command = _partition(list(args), "--")
    if not command and not {"--help", "-h"} & set(own):
        got = "nothing after --" if dashes else f"no -- in {' '.join(args)!r:.80}"
        raise ValueError(f"the script comes after two dashes, got {got}: {USAGE}")
    return own, command


def _partition(args: list[str], at: str) -> tuple[list[str], bool, list[str]]:
    if at not in args:
        return args, False, []
    place = args.index(at)
    return args[:place], True, args[place + 1 :]


def run_script(options: RunOptions, command: Sequence[str]) -> int:
    """Become the script. This returns only where the script cannot be started.

    Args:
        options: of the user.
        command: a script, `-m` and a module, or another command, with its arguments.

    Raises:
        ValueError: for options outside their range, and a command that is not there.
        OSError: when the command cannot be started.
    """
    _check(options)
    program = arguments_of(command, options.nproc)
    environment = environment_of(options, command, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(program[0], program, environment)


def _check(options: RunOptions) -> None:
    """Refuse options outside their range, before anything starts.

    Raises:
        ValueError: with the option and its range.
    """
    if options.nproc is not None and options.nproc < 1:
        raise ValueError(f"--nproc must be at least 1, got {options.nproc}: leave it out to start one process")
    check_units_from(options.units_from)
    NoiseScaleOptions(options.unit or "rows", budget=options.budget, every=options.every)
    if options.out is not None:
        _check_out(options.out.absolute())


def _check_out(out: Path) -> None:
    """Refuse a folder that cannot be made, or written to.

    Raises:
        ValueError: with the reason.
    """
    existing = next(folder for folder in (out, *out.parents) if folder.exists())
    if not existing.is_dir():
        raise ValueError(f"--out must be a folder, got {out}, and {existing} is a file: give another one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--out must be a folder that you may write to, got {out}, and {existing} is read-only")


def arguments_of(command: Sequence[str], nproc: int | None) -> list[str]:
    """The program to become, with its arguments.

    Args:
        command: a script, `-m` and a module, or another command, with its arguments.
        nproc: processes that torchrun is to start; None to start one without it.

    Raises:
        ValueError: when there is no such script or command, and for several processes of a launcher.
    """
    launcher = [] if nproc is None else [*_TORCHRUN, "--nproc-per-node", str(nproc)]
    first = command[0]
    if first == "-m":
        if len(command) < 2:
            raise ValueError("-m needs the name of a module: sonde run -- -m package.module")
        return [sys.executable, *launcher, *command]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise ValueError(f"no script at {first}: pass the path of a file that ends in .py, {USAGE}")
        return [sys.executable, *launcher, *command]
    # Also beside this Python, for a sonde that is called by its full path.
    beside = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if (program := shutil.which(first, path=beside)) is None:
        if Path(first).is_file():
            raise ValueError(f"{first!r} does not end in .py, and cannot be executed: sonde run -- python {first} …")
        raise ValueError(f"{first!r} is no script that ends in .py, and no command that is installed: {USAGE}")
    if nproc is not None:
        raise ValueError(f"--nproc starts processes of a script, and {first!r} is a command: tell it how many to start")
    return [program, *command[1:]]


def environment_of(options: RunOptions, command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the script: as it is, with sonde's settings, and a folder in front of Python's path.

    Args:
        options: of the user.
        command: for the log.
        environment: of this process.
    """
    folder = options.out or Path("runs") / f"{_name_of(command)}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    settings = Settings(
        command=tuple(command),
        folder=str(folder.absolute()),
        start=f"{time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}",
        unit=options.unit,
        units_from=options.units_from,
        weights_from=options.weights_from,
        reduced_by_hand=options.reduced_by_hand,
        micro_batches=options.micro_batches,
        budget=options.budget,
        every=options.every,
        report=options.report,
    )
    before = environment.get("PYTHONPATH")
    path = str(_ON_START) if not before else f"{_ON_START}{os.pathsep}{before}"
    return dict(environment) | {VARIABLE: settings.in_environment(), "PYTHONPATH": path}


def _name_of(command: Sequence[str]) -> str:
    """The name of the script: the first argument that is a file of Python, or the module after -m."""
    module = next((b for a, b in itertools.pairwise(command) if a == "-m"), None)
    script = next((Path(word).stem for word in command if word.endswith(".py")), None)
    return script or module or Path(command[0]).name

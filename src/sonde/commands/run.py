"""`sonde run -- train.py …`: starts an unmodified script, in whose processes sonde attaches itself.

The command becomes the script's own process, or its launcher: exit status, signals and stdout are its own.
Environment variables tell Python to import `on_start/sitecustomize.py` first, in that process and in all it starts.
"""

from __future__ import annotations

import datetime
import itertools
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from sonde.log.sinks import in_branch

USAGE = "sonde run [options] -- train.py …"
ON_START = Path(__file__).parent / "run_script" / "on_start"
_STARTERS = ("python", "torchrun", "accelerate")
"""Programs that start scripts, by the beginning of their names."""
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")


@dataclass(frozen=True)
class RunOptions:
    """Measure a training script as it is: no line of it changes.

    Use: sonde run [options] -- train.py --its own options. After the two dashes also: -m package.module, torchrun …,
    accelerate launch …, or any other command that starts Python. The script computes what it computes without sonde,
    and ends with its own exit status. At its end, sonde prints the noise scale on stderr and writes a report.

    Attributes:
        nproc: Start this number of processes, as torchrun --nproc-per-node does.
        unit: What a row of a batch is, as a plural: sequences, images. The noise scale is counted in it.
        units_from: What shows how many units a micro-batch has. first-dim: the rows of what the model is called with,
            unless it is not clear which dim they are. A number: it has always so many. package.module:function: a
            function of yours, called as the model is. Micro-batches weigh the same, or by their labels where a model
            of transformers is told the tokens of the step; a function may say otherwise.
        reduced_by_hand: The script averages or adds up gradients over all processes by itself, without DDP or FSDP2.
        micro_batches: Several backwards in a step are micro-batches of one batch, also where the script trains several
            models. Without it, such a model is not measured: its backwards may be of different losses.
        budget: Part of the run's time that measuring may cost: 0.01 for 1 %.
        allowance: Seconds that measuring may take in any case, however short the run is.
        every: Measure one step in N, whatever it costs. 1 measures all: use it for a few hundred steps.
        out: Folder for the log and the report. A second model of the script has its own, with -2 at the end.
        report: Write a report at the end.
    """

    nproc: Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")] = None
    unit: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: rows)")] = None
    units_from: Annotated[str, arg(metavar="SOURCE")] = "first-dim"
    reduced_by_hand: bool = False
    micro_batches: bool = False
    budget: Annotated[float, arg(metavar="PART")] = 0.01
    allowance: Annotated[float, arg(metavar="SECONDS")] = 10.0
    every: Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")] = None
    out: Annotated[
        Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: runs/ with the script's name and the time)")
    ] = None
    report: bool = True


def split_command(
    args: Sequence[str], name: str = "run", usage: str = USAGE, *, is_optional: bool = False
) -> tuple[list[str], list[str]]:
    """The options of one of sonde's commands, and the script's command after `--`.

    Args:
        args: what follows the name.
        name: of sonde's command.
        usage: of it, for messages.
        is_optional: whether there may be no script.

    Raises:
        ValueError: when there is no script.
    """
    at = list(args).index("--") if "--" in args else len(args)
    own, command = list(args[:at]), list(args[at + 1 :])
    if not command and not {"--help", "-h"} & set(own):
        begins = next((i for i, word in enumerate(own) if _begins_command(word)), None)
        if is_optional and at == len(args) and begins is None:
            return own, []
        if at < len(args) or begins is None:
            got = "nothing after --" if at < len(args) else f"no -- in {' '.join(args)!r:.80}"
            raise ValueError(f"the script comes after two dashes, got {got}: {usage}")
        right = shlex.join(["sonde", name, *own[:begins], "--", *own[begins:]])
        raise ValueError(f"two dashes come before the script, since what follows them is the script's own: {right}")
    return own, command


def _begins_command(word: str) -> bool:
    return word.endswith(".py") or word == "-m" or Path(word).name.startswith(_STARTERS)


def run_script(options: RunOptions, command: Sequence[str]) -> int:
    """Become the script. This returns only where the script cannot be started.

    Args:
        options: of the user.
        command: a script, `-m` and a module, or another command, with its arguments.

    Raises:
        ValueError: for options outside their range, and a command that is not there.
        OSError: when the command cannot be started.
    """
    from sonde.commands.run_script.settings import Settings

    check_options(options)
    program = arguments_of(command, options.nproc)
    environment = environment_of(options, command, os.environ)
    check_folder(Path(Settings.of_environment(environment).folder))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(program[0], program, environment)


def check_options(options: RunOptions) -> None:
    """Refuse options outside their range, before anything starts.

    Raises:
        ValueError: with the option and its range.
    """
    from sonde.batch_size.setup import NoiseScaleOptions  # imports torch, which `sonde doctor` may be without
    from sonde.commands.run_script.units import check_units_from

    if options.nproc is not None and options.nproc < 1:
        raise ValueError(f"--nproc must be at least 1, got {options.nproc}: leave it out to start one process")
    check_units_from(options.units_from)
    unit, every = options.unit or "rows", options.every
    try:
        NoiseScaleOptions(unit, budget=options.budget, allowance=options.allowance, every=every)
    except ValueError as error:
        raise ValueError(f"--{error}") from None  # it begins with the name of the option


def existing_part(folder: Path) -> Path:
    """The folder itself, or the innermost around it that exists."""
    return next(each for each in (folder, *folder.parents) if os.path.exists(each))


def check_folder(folder: Path) -> None:
    """Refuse a folder for the log that cannot be made, or written to. Nothing is left behind.

    Raises:
        ValueError: with the reason.
    """
    existing = existing_part(folder)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"sonde")
    except OSError as error:
        why = f"no file can be written in {existing} ({error.strerror})"
        raise ValueError(
            f"the log goes to {folder}, but {why}: pass --out with a folder that you may write to"
        ) from None


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
    if first == "-m" and len(command) < 2:
        raise ValueError("-m needs the name of a module: sonde run -- -m package.module")
    if first.endswith(".py") and not Path(first).is_file():
        raise ValueError(f"no script at {first}: pass the path of a file that ends in .py, {USAGE}")
    if first == "-m" or first.endswith(".py"):
        return [sys.executable, *launcher, *command]
    # Also beside this Python, for a sonde that is called by its full path.
    beside = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if (program := shutil.which(first, path=beside)) is None:
        usage = f"sonde run -- python {first} …" if first == "-c" or Path(first).is_file() else USAGE
        raise ValueError(f"{first!r} is no script that ends in .py, and no command that is installed: {usage}")
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
    from sonde.commands.run_script.settings import VARIABLE, Settings

    folder = in_branch(options.out or Path("runs") / f"{_name_of(command)}-{time.strftime('%Y-%m-%d_%H-%M-%S')}")
    start = f"{datetime.datetime.now()}, process {os.getpid()}"
    handed_on = {f.name: getattr(options, f.name) for f in fields(RunOptions) if f.name not in ("nproc", "out")}
    pid = os.getpid() if options.nproc is None else 0  # the command becomes the script, or torchrun
    settings = Settings(tuple(command), str(folder.absolute()), start, pid, **handed_on)
    before = environment.get("PYTHONPATH")
    path = str(ON_START) if not before else f"{ON_START}{os.pathsep}{before}"
    return dict(environment) | {VARIABLE: settings.in_environment(), "PYTHONPATH": path}


def _name_of(command: Sequence[str]) -> str:
    """The name of the script: the first argument that is a file of Python, or the module after -m."""
    module = next((b for a, b in itertools.pairwise(command) if a == "-m"), None)
    script = next((Path(word).stem for word in command if word.endswith(".py")), None)
    return script or module or Path(command[0]).name


COMMAND = (RunOptions, run_script)

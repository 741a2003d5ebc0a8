"""Trains branches by a launcher, ends each one when it has trained enough, and keeps what it has shown."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sonde.evidence.branches import Branch, State
from sonde.evidence.shell_losses import STATUS, STDERR, STDOUT, Losses, LossSource, read_losses
from sonde.evidence.shell_plan import Asked, fill
from sonde.evidence.stats.loss_curves import Curve
from sonde.log.sinks import BRANCH_FOLDER, BRANCH_LOSS
from sonde.log.values import filled
from sonde.record_values import as_json
from sonde.wording import count, duration

_RESULT, _LAUNCHER, _SCRIPT = "result.json", "launcher.txt", "run.sh"
_SECONDS_BETWEEN_LOOKS = 0.25
_GRACE = 10.0
"""Seconds that a branch has to end after SIGTERM."""
_WATCHED = (
    f"exec 3<&0; (read line <&3 && exit; trap '' TERM; kill 0; sleep {_GRACE:g}; kill -9 0) & "
    'exec "$@" 3<&- < /dev/null'
)
"""Runs a command in a shell whose input is a pipe from this process. Where the pipe closes without a line, this process
has died, even by SIGKILL, and all that the command has started is ended."""
_ENDED = b"\n"
_ALMOST = 1 - 1e-9
"""Sums of units are rounded."""


def result_of(asked: Asked) -> Branch | None:
    """What was kept of a branch that has ended, in this call or an earlier one."""
    file = asked.folder / _RESULT
    return filled(Branch, json.loads(file.read_text())) if file.exists() else None


def collect(asked: Asked, source: LossSource, *, is_done: bool = False, silent: float | None = None) -> Branch:
    """Judge a run that has ended, and keep the result in its folder.

    Args:
        asked: the run.
        source: of its losses.
        is_done: whether it was ended because it has shown what it was for.
        silent: seconds without a new loss, after which it was ended.
    """
    losses, status, units = read_losses(asked.folder, asked.batch, source), asked.folder / STATUS, asked.units
    state, message = _judged(losses, units, status.read_text().strip() if status.exists() else "", asked.folder)
    if is_done:
        state, message = "finished", ""
    elif silent is not None:
        why = losses.problem or f"its last one was after {count(max(losses.curve.units))} units"
        state, message = (
            "failed",
            f"it showed no new loss for {duration(silent)} ({why}): evaluate more often, or pass --patience",
        )
    curve = whole(losses.curve, units) or losses.curve
    branch = Branch(asked.batch, asked.seed, asked.rate, curve, state, message)
    unfinished = asked.folder / f".{_RESULT}"
    unfinished.write_text(json.dumps(as_json(branch)))
    unfinished.replace(asked.folder / _RESULT)
    return branch


def forget(asked: Iterable[Asked]) -> None:
    """Have runs trained again by the next command, since their script has to change. Their folders stay."""
    for each in asked:
        (each.folder / _RESULT).unlink(missing_ok=True)


def _judged(losses: Losses, units: float, status: str, folder: Path) -> tuple[State, str]:
    """How a branch has ended, and what to do about it."""
    points = (0.0, *losses.curve.units)
    next_point = points[-1] + max((b - a for a, b in itertools.pairwise(points)), default=0.0)
    if whole(losses.curve, units) or (status == "0" and next_point > units):
        return "finished", ""
    if status != "0":
        said = next((s for name in (STDERR, STDOUT, _LAUNCHER) if (s := _last_line(folder / name))), "without a word")
        return "failed", f"it {f'ended with status {status}' if status else 'was killed, or not started'}: {said}"
    if losses.problem:
        return "failed", losses.problem
    remedy = "have the script train as long as {steps} or {units} says, or pass a smaller --units"
    if losses.counts_on:
        remedy += "; if its first printed loss is not the checkpoint's own, pass the checkpoint's step as --first-step"
    return "cut off", f"it ended by itself after {count(points[-1])} of {count(units)} units: {remedy}"


def whole(curve: Curve, units: float) -> Curve | None:
    """A branch's curve until its units or a loss that is not finite; None if it has reached neither yet.

    How far a script runs on before it is ended is chance.
    """
    points = enumerate(zip(curve.units, curve.losses, strict=True), 1)
    n = next((n for n, (at, loss) in points if at >= units * _ALMOST or not math.isfinite(loss)), None)
    return None if n is None else Curve(curve.units[:n], curve.losses[:n])


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines() if file.exists() else []
    return f"{lines[-1].strip():.300} (see {file})" if lines else ""


def joined(ended: Mapping[Asked, Branch]) -> tuple[Branch, ...]:
    """Branches of several lengths as one: its losses are their last ones, and the first of all."""
    groups: dict[tuple[float, int], list[Branch]] = {}
    for each, branch in ended.items():
        if not each.changed:
            groups.setdefault((each.batch, each.seed), []).append(branch)
    return tuple(map(_joined, groups.values()))


def _joined(group: Sequence[Branch]) -> Branch:
    unfinished = [branch for branch in group if branch.state != "finished"]
    if unfinished or len(group) == 1:
        return [*unfinished, *group][0]
    ends = {group[0].curve.units[0]: group[0].curve.losses[0]}
    ends |= {branch.curve.units[-1]: branch.curve.losses[-1] for branch in group}
    return replace(group[-1], curve=Curve(tuple(sorted(ends)), tuple(ends[units] for units in sorted(ends))))


def prepare(asked: Asked, source: LossSource) -> None:
    """Make a branch's folder, with the script that trains it. What an earlier try has left is moved aside."""
    folder = asked.folder
    if folder.exists():
        names = (folder.with_name(f"{folder.name}.old-{n}") for n in itertools.count(1))
        folder.rename(next(name for name in names if not name.exists()))
    folder.mkdir(parents=True)
    variables = {"PYTHONUNBUFFERED": "1", BRANCH_FOLDER: str(folder)}
    if source.pattern is None:
        variables[BRANCH_LOSS] = source.name
    out, err, status = (shlex.quote(str(folder / name)) for name in (STDOUT, STDERR, STATUS))
    lines = [
        "#!/bin/sh",
        "trap : TERM  # wait for the training, which gets the signal too, and note its status",
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        f"{shlex.join(asked.command)} > {out} 2> {err}",
        f"echo $? > {status}",
    ]
    (folder / _SCRIPT).write_text("\n".join(lines) + "\n")


def launch_words(launcher: str, asked: Asked) -> list[str]:
    """The command that hands a branch to its engine.

    Args:
        launcher: a command with {command}, which becomes the words of the branch's own command, and perhaps {out}.
        asked: the branch.

    Example:
        >>> asked = Asked(16, 1, 20000, (), ("python", "train.py"), Path("/out/one"))
        >>> launch_words("srun --output {out}/log {command}", asked)
        ['srun', '--output', '/out/one/log', 'sh', '/out/one/run.sh']
    """
    own, words = ["sh", str(asked.folder / _SCRIPT)], list[str]()
    for word in shlex.split(launcher):  # first, since a folder's name may hold spaces
        words += own if word == "{command}" else fill([word], {"command": shlex.join(own), "out": asked.folder})
    return words


def train(
    asked: Sequence[Asked],
    source: LossSource,
    *,
    launcher: str,
    n_jobs: int,
    is_done: Callable[[Asked, Losses], bool],
    patience: float,
    on_progress: Callable[[float], object],
) -> Generator[tuple[Asked, Branch]]:
    """Train branches and their twins, some at a time, each until it is done.

    Args:
        asked: the runs.
        source: of their losses.
        launcher: see `launch_words`.
        n_jobs: runs at the same time.
        is_done: whether a run has shown all that it is for.
        patience: seconds that a run may go on without a new loss.
        on_progress: called now and then with the units of the branches that run.

    Yields:
        Each branch that has ended. When the generator is closed, those that run are ended.
    """
    waiting, running = [*asked], dict[subprocess.Popen[bytes], Asked]()
    heard = dict[Asked, tuple[int, float]]()  # losses of each run, and when the last one was seen
    try:
        while waiting or running:
            while waiting and len(running) < n_jobs:
                each = waiting.pop(0)
                prepare(each, source)
                running[_started(each, launcher)] = each
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(iter(running)).wait(_SECONDS_BETWEEN_LOOKS)
            over = {process for process in running if process.poll() is not None}  # before the last lines are read
            seen = {process: read_losses(each.folder, each.batch, source) for process, each in running.items()}
            on_progress(sum(losses.curve.units[-1] for losses in seen.values() if losses.curve.units))
            done, silent = list[Asked](), list[Asked]()
            for process, each in running.items():
                if (n := len(seen[process].curve.units)) != heard.get(each, (-1, 0.0))[0]:
                    heard[each] = n, time.monotonic()
                if is_done(each, seen[process]):
                    done.append(each)
                elif process not in over and time.monotonic() - heard[each][1] > patience:
                    silent.append(each)
            end_processes([process for process, each in running.items() if each in (*done, *silent)])
            for process in [
                process for process, each in running.items() if process in over or each in (*done, *silent)
            ]:
                process.communicate(_ENDED)
                each = running.pop(process)
                yield each, collect(each, source, is_done=each in done, silent=patience if each in silent else None)
    finally:
        end_processes([*running])
        for process in running:
            process.communicate(_ENDED)


def _started(asked: Asked, launcher: str) -> subprocess.Popen[bytes]:
    """The launcher's process, in a session of its own, so that Ctrl-C reaches this process alone."""
    with (asked.folder / _LAUNCHER).open("wb") as out:
        words = ["sh", "-c", _WATCHED, "sh", *launch_words(launcher, asked)]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """End processes after SIGTERM too, and when the terminal is lost, which otherwise would leave them behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_processes(processes: Sequence[subprocess.Popen[Any]], grace: float = _GRACE) -> None:
    """End processes and all that they have started: by SIGTERM, and those that go on, by SIGKILL.

    Args:
        processes: each in a session of its own.
        grace: seconds that they have after SIGTERM.
    """
    _signal(processes, signal.SIGTERM)
    deadline = time.monotonic() + grace
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
    finally:  # also after a second Ctrl-C
        _signal(processes, signal.SIGKILL)
        for process in processes:
            process.wait()


def _signal(processes: Sequence[subprocess.Popen[Any]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)

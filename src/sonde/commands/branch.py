"""`sonde branch … -- train.py --batch {batch} …`: the critical batch size, by short trainings from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tyro.conf import UseAppendAction, arg

from sonde.commands.branch_result import print_json, print_result, result_of_all
from sonde.decision.rate import DECAYED, FALLING, WITH_DECAY
from sonde.evidence.branches import Branch, Branches, Proxy
from sonde.evidence.shell_losses import LossSource, noise_scales, unit_of
from sonde.evidence.shell_plan import ADAM, Asked, Plan, check_command, rates_of, used_placeholders
from sonde.evidence.shell_run import joined, result_of, terminated_as_interrupted, train
from sonde.evidence.twins import Twins, noise_of
from sonde.runs.report.branch_page import branch_page
from sonde.runs.report.page import write_page
from sonde.wording import duration

USAGE = "sonde branch --batches 16,32,64 --units 20000 [options] -- python train.py --batch {batch} --seed {seed} …"
RESULT = "branches.json"
ERROR = 2
LOCAL = "{command}"


@dataclass(frozen=True)
class BranchOptions:
    """Measure the critical batch size directly: train short branches from a checkpoint, at several batch sizes.

    Use: sonde branch --batches 16,32,64 --units 20000 -- python train.py --resume {checkpoint} --batch {batch} --seed
    {seed}. Each batch trains on as many units, once with each seed. The answer is how many units each batch needs for
    the loss of the smallest one. Words in braces are filled in: {checkpoint}, {batch}, {lr}, {seed}, {units}, {steps},
    {out} (the branch's folder), {beta1}, {beta2}, {eps}, {weight_decay}. sonde first checks that the script uses them.
    The same command again goes on with what is missing.

    Attributes:
        batches: Batch sizes, in units: 16,32,64,128.
        units: Units that each branch trains on.
        seeds: Seeds of each batch: 1 to this number.
        jobs: Branches that run at the same time.
        checkpoint: Where all branches begin, for {checkpoint}.
        lr: Learning rate of the reference, for {lr}.
        lr_rule: How the rate follows the batch: sqrt (Adam), linear (SGD), none, sgd=N (SGD at a noise scale of N),
            sign=N (Muon, likewise), or a table as 16:1e-3,32:1.4e-3.
        beta1: Of the reference, for {beta1}. With {beta1}, {beta2} and {eps}, Adam's whole rule is used.
        beta2: Of the reference, for {beta2}.
        eps: Of the reference, for {eps}.
        weight_decay: Of the reference, for {weight_decay}, which is scaled so that it acts as fast per unit.
        decay: The script lets its rate fall to 0 until {steps} or {units}. Only last losses count then, so each branch
            is trained on 0.5, 0.7 and 1 of the units. A ratio above 2 is only said to be about so large.
        tolerance: Part of the units that a batch may need more and still be below the critical batch.
        reference: Batch that the others are compared with.
        loss: Name of the held-out loss that the script gives to probe.log.
        loss_regex: Read the loss from what the script prints, by a regular expression with (?P<loss>…) and (?P<step>…)
            or (?P<units>…).
        first_step: Step of the checkpoint, if the printed steps count on from there.
        noise: Noise scales measured elsewhere, to stand beside the result: the folder of sonde measure's log,
            or NAME=VALUE:LOW:HIGH.
        unit: Plural name of the unit, where no log has it.
        patience: Minutes that a branch may go on without a new loss.
        launcher: What runs a branch: on this machine, or by a command such as 'srun {command}'.
        out: Folder of all branches and of the result.
        json: Print JSON.
    """

    batches: Annotated[str, arg(metavar="N,N,…")]
    units: Annotated[float, arg(metavar="N")]
    seeds: Annotated[int, arg(metavar="N")] = 3
    jobs: Annotated[int, arg(metavar="N")] = 1
    checkpoint: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(optional)")] = None
    lr: Annotated[float | None, arg(metavar="RATE", help_behavior_hint="(optional)")] = None
    lr_rule: Annotated[str | None, arg(metavar="RULE", help_behavior_hint="(default: sqrt)")] = None
    beta1: Annotated[float | None, arg(metavar="BETA", help_behavior_hint="(optional)")] = None
    beta2: Annotated[float | None, arg(metavar="BETA", help_behavior_hint="(optional)")] = None
    eps: Annotated[float | None, arg(metavar="EPS", help_behavior_hint="(optional)")] = None
    weight_decay: Annotated[float | None, arg(metavar="DECAY", help_behavior_hint="(optional)")] = None
    decay: bool = False
    tolerance: Annotated[float, arg(metavar="PART")] = 0.2
    reference: Annotated[float | None, arg(metavar="N", help_behavior_hint="(default: the smallest batch)")] = None
    loss: Annotated[str, arg(metavar="NAME")] = "eval_loss"
    loss_regex: Annotated[str | None, arg(metavar="REGEX", help_behavior_hint="(optional)")] = None
    first_step: Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")] = None
    noise: Annotated[
        tuple[str, ...], arg(metavar="LOG or NAME=…", help_behavior_hint="(may be repeated)"), UseAppendAction
    ] = ()
    unit: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: the unit of the logs)")] = None
    patience: Annotated[float, arg(metavar="MINUTES")] = 30.0
    launcher: Annotated[str, arg(metavar="LAUNCHER")] = LOCAL
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("branches")
    json: bool = False


def run_branch(options: BranchOptions, command: Sequence[str]) -> int:
    """Train what is missing, and say what all branches show.

    Args:
        options: of the user.
        command: the script with its arguments and placeholders.

    Returns:
        The exit status: 0, or 2 where a branch has failed, the losses can show nothing, or it is not known whether the
        script uses what it is given.

    Raises:
        ValueError: for options that cannot be used; when the first branch has failed; for a placeholder that the script
            ignores; and at the end, where the script's log has another unit than was given. The result is written
            without --noise then.
        KeyboardInterrupt: after Ctrl-C, SIGTERM and SIGHUP; branches that have ended are kept.
    """
    plan, measured = plan_of(options, command), [proxy for text in options.noise for proxy in _proxies_of(text)]
    given = _the_unit(options.unit, *(unit_of([Path(text)]) for text in options.noise))
    asked, console = plan.asked(), _console()
    twins = Twins(asked, plan.source)
    ended = _trained(asked, plan, options, twins)
    references = [each.folder for each in ended if each.batch == plan.reference and not each.changed]
    own = unit_of(references)
    is_one_unit = len({own, given} - {""}) < 2
    found = Branches(
        own or given or "units",
        plan.reference,
        plan.units,
        options.tolerance,
        plan.rule,
        joined(ended),
        (*noise_scales(references), *(measured if is_one_unit else ())),
        plan.source.name if plan.source.pattern is None else "the printed loss",
        noise_of(*(ended[each] for each in asked[:2])),
        twins.check(ended),
    )
    file, page, why_none = plan.out / RESULT, plan.out / "report.html", ""
    file.write_text(json.dumps(found.as_json(), allow_nan=False))
    _the_unit(own, given)
    try:
        write_page(page, lambda: branch_page(found))
    except ImportError as error:
        why_none = f"{error}, then run: sonde report {plan.out}"
    if options.json:
        print_json(result_of_all(found) | {"result": str(file), "report": None if why_none else str(page)})
    else:
        print_result(found, console)
        console.print(f"\nresult  {file}\nreport  {why_none or f'{page}  (open it in a browser)'}")
    is_whole = all(branch.state == "finished" for branch in found.branches)
    return 0 if is_whole and not found.mistake and not found.unverified else ERROR


def _the_unit(*named: str | None) -> str:
    """The unit that all name who name one, or an empty text."""
    units = [*dict.fromkeys(filter(None, named))]
    if len(units) > 1:
        raise ValueError(
            f"the script's log, --noise and --unit must have the same unit, got {' and '.join(units)}: leave out "
            f"--noise or --unit, or measure in {units[0]}"
        )
    return "".join(units)


def _console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def plan_of(options: BranchOptions, command: Sequence[str]) -> Plan:
    """What is asked for, checked before anything starts.

    Raises:
        ValueError: for the first thing that cannot be used, with what to do.
    """
    batches, units, launcher = _numbers(options.batches), options.units, options.launcher
    reference = batches[0] if options.reference is None else options.reference
    names = ("checkpoint", *ADAM, "weight_decay")
    base: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    used, least = used_placeholders(command), 2 * batches[-1]
    has_program = launcher != LOCAL or command[0].endswith(".py") or shutil.which(command[0]) is not None
    is_told = bool({"units", "steps"} & used)
    is_there = options.checkpoint is None or options.checkpoint.exists()
    is_apart = options.checkpoint is None or not options.out.resolve().is_relative_to(options.checkpoint.resolve())
    is_printed = options.first_step is None or options.loss_regex is not None
    must_hold = {
        f"--reference must be one of {options.batches}, got {reference:g}: add it to --batches": reference in batches,
        f"--units must be 2 steps of the largest batch, {least:g}, or more, got {units:g}": least <= units < math.inf,
        f"--seeds must be at least 1, got {options.seeds}: 3 give an interval": options.seeds >= 1,
        f"--jobs must be at least 1, got {options.jobs}": options.jobs >= 1,
        "--unit must be a name such as sequences, got none: leave it out to have that of the logs": options.unit != "",
        f"--patience must be above 0, got {options.patience:g}": options.patience > 0,
        f"--tolerance must be above 0, got {options.tolerance:g}": 0 < options.tolerance < math.inf,
        f"no checkpoint at {options.checkpoint}: pass --checkpoint a file or folder that is there": is_there,
        f"branches go to a folder, got the file {options.out}: pass another --out": not options.out.is_file(),
        f"--out must be outside the checkpoint, got {options.out}: branches would change where they begin": is_apart,
        "--first-step is of printed steps: pass --loss-regex too, or leave it out": is_printed,
        f"--launcher must be a command with {{command}}, got {launcher!r}": "{command}" in launcher,
        f"--launcher {launcher} cannot end a branch: write {{steps}} or {{units}} in the command": launcher == LOCAL
        or is_told,
        "--decay needs {steps} or {units} in the command, until which the rate falls": not options.decay or is_told,
        f"{command[0]!r} is no command that is installed: {USAGE}": has_program,
    }
    for message, holds in must_hold.items():
        if not holds:
            raise ValueError(message)
    rule, rates = rates_of(batches, reference, options.lr, options.lr_rule, used)
    check_command(command, base, options.lr_rule, options.seeds)
    if options.checkpoint is not None:
        base["checkpoint"] = str(options.checkpoint.absolute())
    source = LossSource(options.loss, options.loss_regex, options.first_step)
    words = (sys.executable, *command) if command[0].endswith(".py") else tuple(command)
    lengths = DECAYED if options.decay else (1.0,)
    rule += (WITH_DECAY if "weight_decay" in used else "") + (FALLING if options.decay else "")
    return Plan(words, batches, reference, units, lengths, options.seeds, source, options.out, rule, rates, base)


def _numbers(text: str) -> tuple[float, ...]:
    with contextlib.suppress(ValueError):
        numbers = sorted({float(word) for word in text.split(",")})
        if len(numbers) >= 2 and 0 < numbers[0] <= numbers[-1] < math.inf:
            return tuple(numbers)
    raise ValueError(f"--batches takes 2 sizes or more, such as 16,32,64,128, got {text!r}")


def _proxies_of(text: str) -> list[Proxy]:
    name, _, numbers = text.partition("=")
    with contextlib.suppress(ValueError):
        value, low, high = map(float, numbers.split(":"))
        if name and 0 < low <= value <= high < math.inf:
            return [Proxy(name, "", low, high, value)]
    if proxies := noise_scales([Path(text)]):
        return [replace(proxy, name=f"{proxy.name}, in {Path(text).resolve().name}") for proxy in proxies]
    raise ValueError(
        "--noise takes the folder of a log that has a noise scale, or NAME=VALUE:LOW:HIGH with LOW ≤ VALUE ≤ HIGH, got "
        f"{text!r}: pass the --log of sonde measure, or for example B_simple=120:90:160"
    )


def _trained(asked: Sequence[Asked], plan: Plan, options: BranchOptions, twins: Twins) -> Mapping[Asked, Branch]:
    """All runs in order: those that are finished, and the others after training them."""
    kept = {each: branch for each in asked if (branch := result_of(each)) and branch.state == "finished"}
    missing, ended = [each for each in asked if each not in kept], dict[Asked, Branch]()
    start, console = plan.start, _console(stderr=True)
    twins.check(kept)
    if kept:
        console.print(f"{len(kept)} of {len(asked)} runs are finished already.")
    bar = Progress(
        TextColumn("training"), BarColumn(), console=console, transient=True, disable=not console.is_terminal
    )
    task, begun = bar.add_task("", total=sum(each.units for each in missing)), time.monotonic()
    running = train(
        missing,
        plan.source,
        launcher=options.launcher,
        n_jobs=options.jobs,
        is_done=twins.is_done,
        patience=60 * options.patience,
        on_progress=lambda units: bar.update(task, completed=sum(each.units for each in ended) + units),
    )
    try:
        with terminated_as_interrupted(), bar, contextlib.closing(running):
            for each, branch in running:
                ended[each] = branch
                if plan.start != start:
                    raise ValueError(
                        f"the script writes to {options.checkpoint}, where other branches would begin: have it save to "
                        "{out}, and restore the checkpoint"
                    )
                n_left = len(missing) - len(ended)
                left = duration((time.monotonic() - begun) / len(ended) * n_left)
                console.print(f"{each.name}: {branch.state}" + (f"; about {left} left" if n_left else ""))
                if each == asked[0] and branch.state != "finished":
                    raise ValueError(f"{each.name} {branch.state}, so the others were not trained: {branch.message}")
                twins.check(kept | ended)
    except KeyboardInterrupt:
        n = len(kept) + sum(branch.state == "finished" for branch in ended.values())
        console.print(f"Stopped: {n} of {len(asked)} runs are finished. The same command trains the others.")
        raise
    return {each: (kept | ended)[each] for each in asked}


COMMAND = (BranchOptions, run_branch)

"""What a budget of 1 % costs, once a run has used up the allowance of seconds that measuring may take in any case.

    python -m benchmarks.budget [--device cuda] [--windows 600] [--setups 1 4] [--out benchmarks/results]

Four copies of a GPT of about 75, 750 or 7,500 parameter tensors train side by side, window by window in turn: in
windows of four pieces, of one piece that is read by examples, or over two ranks. They train without a probe, without
one again (the control), with a probe that measures no window, and with a probe at a budget of 1 % whose pace has
settled, as late in a long run. They change roles, until each has had each, since where the allocator puts a model makes
1 % of a window of 30 ms. The table has the share that the probe says it costs, and how much longer windows took than
without a probe: the median over blocks in three processes, with its bootstrap 95 % interval.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.contestants import Plain, Sonde
from benchmarks.device import add_option, seconds_of, stem
from benchmarks.gpt import GptShape, build, sequences
from benchmarks.launch import on_ranks
from benchmarks.machine import page
from benchmarks.timing import Cost, cost, in_words
from benchmarks.training import Run, Setup, draw_windows
from sonde.batch_size.pace import REVIEW
from sonde.batch_size.pace import Cost as MeasuringCost
from sonde.stats.sealed_state import sealed, unsealed

SMALL = GptShape(width=64, depth=6, heads=4, context=64)
SETUPS = (
    (Setup(1, 1, micro_batches=4, sequences=2, shape=SMALL), 1.0),
    (Setup(1, 1, micro_batches=4, sequences=2, shape=GptShape(width=16, depth=62, heads=4, context=32)), 0.5),
    (Setup(1, 1, micro_batches=4, sequences=2, shape=GptShape(width=8, depth=625, heads=4, context=16)), 0.2),
    (Setup(1, 1, micro_batches=1, sequences=8, shape=SMALL), 4.0),
    (Setup(2, 1, micro_batches=2, sequences=2, shape=SMALL), 1.0),
    (Setup(2, 1, micro_batches=2, sequences=2, shape=SMALL, cut="FSDP2"), 1.0),
)
"""Short windows of models of about 75, 750 and 7,500 parameter tensors, and the part of the windows to time."""
WARM_UP = 12
"""Windows after attach, of which the first is measured: its reading is written within `REPORTS` windows."""
WARM_UP_OF_RANKS = 48
"""Windows after attach until several ranks have seen that their options are the same: before that, all are measured."""
REPORTS = 10
PROCESSES = 3
STAYS = 400
"""A pace has settled when it has stayed for so many windows, or for the part of them that is timed."""
LATE = 10**6
"""Windows of the run before."""
MOST_SETTLING = 1000
"""Windows after which the cost is measured even if the pace still changes."""
PLAIN, CONTROL, IDLE, AT_BUDGET = "plain", "control", "idle", "at budget"
ROLES = (PLAIN, CONTROL, IDLE, AT_BUDGET)


@dataclass(frozen=True)
class CostOfSetup:
    """One set-up of the model.

    Attributes:
        pieces: how windows are cut, in words.
        n_tensors: parameter tensors.
        every: one window in so many was measured.
        share: cost over time, as the probe says; None where too few windows were measured to say it.
        error: its standard error.
        control: time that windows without a probe take longer than other windows without a probe.
        idle: time that a probe adds to a window, of which no window is measured.
        at_budget: time that a probe at its defaults adds to a window.
    """

    pieces: str
    n_tensors: int
    every: int
    share: float | None
    error: float | None
    control: Cost
    idle: Cost
    at_budget: Cost


def cost_of(setup: Setup, n_windows: int, processes: int = PROCESSES, *, stays: int = STAYS) -> CostOfSetup:
    """Settle the pace once; then time training with a probe beside training without one.

    Args:
        setup: model and windows.
        n_windows: windows in each process, about. They are timed in blocks: a stretch with one measured window each.
        processes: how many.
        stays: windows after which a pace that has stayed has settled.
    """
    (state, pace), *_ = on_ranks(setup, settle, stays, start="spawn")
    # The probe's clock takes windows of the other copies for its own, so N stays as it was when the pace had settled.
    block = min(pace.every, max(n_windows // len(ROLES), 1))
    n_blocks = max(round(n_windows / (block * len(ROLES))), 1)
    rounds = [
        on_ranks(setup, seconds_of_blocks, state, pace.every, block, n_blocks, seed, start="spawn")[0]
        for seed in range(processes)
    ]
    tensors = sum(1 for _ in build(setup.shape, torch.device("cpu")).parameters())
    costs = (cost([[(block[PLAIN], block[role]) for block in blocks] for blocks in rounds]) for role in ROLES[1:])
    return CostOfSetup(setup.pieces, tensors, pace.every, pace.share, pace.error, *costs)


def at_budget(run: Run, every: int | None = None) -> Sonde:
    """sonde at a budget of 1 %, or at the pace that it came to; pieces or examples; frequent reports."""
    return Sonde(run, every=every, allowance=0.0, per_example="auto", report_every=REPORTS)


def settle(setup: Setup, stays: int) -> tuple[dict[str, object], MeasuringCost]:
    """Train at the default budget until N has stayed for so many windows; the probe's state and its cost."""
    run = Run(setup)
    contestant = at_budget(run)
    # Early in a run, more is measured than the budget allows.
    begun = unsealed("state of the probe", contestant.probe.state_dict())
    contestant.probe.load_state_dict(sealed(begun | {"windows": LATE}))
    windows = draw_windows(setup, sequences(setup.shape), MOST_SETTLING, seed=0)
    since, every = 0, 0
    for k, window in enumerate(windows):
        run.train_window(contestant, window)
        if k % REVIEW == 0:
            now = contestant.probe.cost().every
            since, every = (k, now) if now != every else (since, every)
            if every > 1 and k - since >= stays:
                break
    return contestant.probe.state_dict(), contestant.probe.cost()


def seconds_of_blocks(
    setup: Setup, state: dict[str, object], every: int, block: int, n_blocks: int, seed: int
) -> list[dict[str, float]]:
    """Seconds per window in each role, for each block; a block has windows of each copy of the model in each role.

    Args:
        setup: model and windows.
        state: of a settled probe, which goes on wherever a copy takes that role.
        every: of how many windows one is measured.
        block: windows of each copy in each role, in one block.
        n_blocks: blocks.
        seed: of the windows.
    """
    runs = [Run(setup) for _ in ROLES]
    warm_up = WARM_UP if setup.ranks == 1 else WARM_UP_OF_RANKS
    drawn = draw_windows(setup, sequences(setup.shape), warm_up + block * n_blocks, seed=seed)
    blocks = [dict.fromkeys(ROLES, 0.0) for _ in range(n_blocks)]
    for shift in range(len(ROLES)):
        run_in = {role: runs[(i + shift) % len(runs)] for i, role in enumerate(ROLES)}
        trained = {role: in_role(role, run, state, every) for role, run in run_in.items()}
        for k, window in enumerate(drawn):
            seconds = _seconds_of_each(setup, run_in, trained, window, k)
            if k >= warm_up:
                took = blocks[(k - warm_up) // block]
                for role, each in seconds.items():
                    took[role] += each / (block * len(ROLES))
        for role, contestant in trained.items():
            if isinstance(contestant, Sonde):
                state = contestant.probe.state_dict() if role == AT_BUDGET else state
                contestant.probe.close()
    return blocks


def in_role(role: str, run: Run, state: dict[str, object], every: int) -> Plain:
    """The contestant of a role, attached to a run."""
    if role in (PLAIN, CONTROL):
        return Plain(run)
    contestant = at_budget(run, every) if role == AT_BUDGET else Sonde(run, every=10**6, per_example="auto")
    if role == AT_BUDGET:
        contestant.probe.load_state_dict(state)
    return contestant


def _seconds_of_each(
    setup: Setup, run_in: dict[str, Run], trained: dict[str, Plain], window: Tensor, k: int
) -> dict[str, float]:
    """Of one window in every role; the order changes from window to window, so that each follows each."""
    orders = list(itertools.permutations(ROLES))
    seconds = {}
    gc.collect(0)
    gc.disable()
    for role in orders[k % len(orders)]:
        work = functools.partial(run_in[role].train_window, trained[role], window)
        seconds[role] = seconds_of(work, setup.device)
    gc.enable()
    return seconds


def as_table(costs: Sequence[CostOfSetup]) -> str:
    """The table."""
    lines = [
        "| window | parameter tensors | measured | cost, as the probe says | added without a probe (control) "
        "| added, no window measured | added at the budget |",
        "|---|---|---|---|---|---|---|",
        *map(line, costs),
    ]
    return "\n".join(lines)


def line(cost: CostOfSetup) -> str:
    """A row of the table of costs."""
    added = " | ".join(map(in_words, (cost.control, cost.idle, cost.at_budget)))
    return f"| {cost.pieces} | {cost.n_tensors:,} | one in {cost.every} | {share_in_words(cost)} | {added} |"


def share_in_words(cost: CostOfSetup) -> str:
    """The probe's own figure with twice its standard error."""
    if cost.share is None or cost.error is None:
        return "not known"
    return f"{100 * cost.share:.2f} % ± {200 * cost.error:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_option(parser)
    parser.add_argument("--windows", type=int, default=600, help="to time in each of three processes")
    every_setup = range(1, len(SETUPS) + 1)
    parser.add_argument("--setups", type=int, nargs="+", choices=every_setup, default=[*every_setup], help="by number")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    costs: list[CostOfSetup] = []
    for i, number in enumerate(options.setups):  # written after each: a run that is cut off leaves these
        on_cpu, part = SETUPS[number - 1]
        setup = replace(on_cpu, device=options.device)
        sys.stderr.write(f"{setup} {setup.shape}\n")
        costs.append(cost_of(setup, round(part * options.windows), stays=round(min(part, 1.0) * STAYS)))
        sys.stderr.write(f"{line(costs[-1])}\n")
        _write(options, options.setups[: i + 1], costs)


def _write(options: argparse.Namespace, setups: list[int], costs: list[CostOfSetup]) -> None:
    """Write the page, with the command that measures these set-ups again, and all numbers."""
    asked = f"--device {options.device} --windows {options.windows}"
    command = f"python -m benchmarks.budget {asked} --setups {' '.join(map(str, setups))}"
    path = options.out / stem("budget", options.device)
    path.with_suffix(".md").write_text(page("Windows within a budget", command, as_table(costs), options.device))
    found = {"cost": [asdict(c) for c in costs]}
    path.with_suffix(".json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

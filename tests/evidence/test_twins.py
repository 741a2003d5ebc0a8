"""What twins show is the same whenever sonde looks, however late it ends a run, and how many run at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from sonde.evidence.branches import Branch
from sonde.evidence.shell_losses import LossSource, read_losses
from sonde.evidence.shell_plan import Asked, Plan
from sonde.evidence.stats.loss_curves import Curve
from sonde.evidence.twins import Twins

SOURCE = LossSource(pattern=r"step (?P<step>\d+) loss (?P<loss>\S+)")
COMMAND = tuple(f"{{{name}}}" for name in ("batch", "lr", "seed", "steps"))
RATES = {8.0: 1e-3, 16.0: 1.4e-3, 32.0: 2e-3}
SLOWED = "with 1e-09 in place of 0.001 its loss falls nearly as far"


def lines(
    asked: Asked,
    *,
    batch: Callable[[float], float] = float,
    rate: Callable[[float], float] = float,
    later: float | None = None,
    noise: float = 0.0,
    since: int = 0,
    ends: bool = True,
) -> list[str]:
    """What a script prints, whose loss falls by its rate, root of the batch and seed.

    Args:
        asked: with the values that it is given.
        batch: that it trains with.
        rate: likewise.
        later: rate after the first step.
        noise: other in each run.
        since: evaluations without noise.
        ends: when it is told to.
    """
    given, lr, seed, steps = map(float, asked.command)
    printed = []
    for k, step in enumerate(range(0, (int(steps) if ends else 80) + 1, max(int(32 / given), 1))):
        fallen = rate(lr) * step if later is None else rate(lr) * min(step, 1) + later * max(step - 1, 0)
        chance = zlib.crc32(f"{asked.folder.name} {step}".encode()) / 2**32 * noise * (k > since)
        printed.append(f"step {step} loss {3 - fallen * batch(given) ** 0.5 * (1 + seed / 10) + chance:.6f}\n")
    return printed


def outcome(asked: list[Asked], jobs: int, stride: int, late: int, script: Callable[[Asked], list[str]]) -> object:
    """What comes of runs that print so many lines from look to look, and so many more before they are ended."""
    twins, waiting, running, ended = Twins(asked, SOURCE), [*asked], dict[Asked, int](), dict[Asked, Branch]()
    unknown = dict[str, str]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running[waiting.pop(0)] = 0
            for each in [*running]:
                printed, n = script(each), running[each] + stride
                each.folder.mkdir(parents=True, exist_ok=True)
                (each.folder / "stdout.txt").write_text("".join(printed[:n]))
                running[each] = n
                if n >= len(printed) or twins.is_done(each, read_losses(each.folder, each.batch, SOURCE)):
                    (each.folder / "stdout.txt").write_text("".join(printed[: n + late]))
                    del running[each]
                    ended[each] = Branch(each.batch, each.seed, each.rate, Curve((), ()))
                    unknown = twins.check(ended)
    except ValueError as error:
        return str(error)
    return unknown


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"noise": 6e-5}, {}),
        ({"noise": 6e-5, "since": 5}, {}),
        ({"rate": lambda _: 1e-3}, "ignores {lr}: with 1e-09 in place of 0.001 its losses are the same"),
        ({"rate": lambda lr: min(lr, 1.8e-3)}, "ignores {lr}: with 0.004 in place of 0.002 its losses"),
        ({"batch": lambda _: 8}, "ignores {batch}: with 16 in place of 8 its losses are the same"),
        ({"batch": lambda n: max(n, 16)}, "ignores {batch}: with 16 in place of 8 its losses are the same"),
        ({"batch": lambda n: min(n, 16)}, "ignores {batch}: with 16 in place of 32 its losses are the same"),
        ({"batch": lambda n: n // 3 * 3}, "ignores {batch}: with 7 in place of 8 its losses are the same"),
        ({"ends": False}, "ignores {steps}: with 10 in place of 40 it should end after 80 units, and trains on for 96"),
        ({"later": 1e-3}, {"lr": SLOWED}),
        ({"rate": lambda _: 1e-3, "noise": 6e-5}, {"lr": SLOWED}),
        ({"rate": lambda _: 1e-3, "noise": 6e-5, "since": 5}, {"lr": SLOWED}),
        (
            {"noise": 1.0},
            {"lr": "as two equal runs do", "batch": "as two equal runs do", "seed": "as two equal runs do"},
        ),
    ],
)
def test_what_twins_show(values: dict[str, object], expected: str | dict[str, str], tmp_path: Path) -> None:
    plan = Plan(COMMAND, (8.0, 16.0, 32.0), 8.0, 320, (1.0,), 2, SOURCE, tmp_path, "", RATES, {})
    looks = [(1, 1, 0), (1, 3, 0), (1, 1, 9), (1, 99, 0), (4, 1, 0), (4, 2, 5), (99, 1, 3)]
    found = [outcome(plan.asked(), *look, lambda asked: lines(asked, **values)) for look in looks]  # type: ignore[arg-type]
    assert found == [found[0]] * len(looks)
    if isinstance(found[0], dict) and isinstance(expected, dict):
        assert found[0].keys() == expected.keys()
        assert all(why in found[0][name] for name, why in expected.items())
    else:
        assert str(expected) in str(found[0])

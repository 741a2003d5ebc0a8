"""What is known of a training when its batch size is judged: by its probe, or by its log."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sonde.decision.law import FEWEST_STEPS, Range, as_weighed
from sonde.decision.proxy import Factor, critical_range, factor_for
from sonde.decision.time_curve import TimeCurve, nearly_whole
from sonde.stats.intervals import RatioInterval, logged_interval, unresolved
from sonde.wording import percent

RUN_LIKE_THIS, FROM_HERE_ON = "for a run like this one", "from here on"
"""What a decision is about."""
_OF_PLAY = ("steps", "timesteps", "transitions", "frames")
"""Units of losses over an agent's play, such as PPO's."""
STEPS = 1000
"""From here on, costs are those of what so many steps with the present batch would learn."""
_NOTHING = unresolved("")
_LEAST_COVERED = 0.8
"""Part of |F|² below which the rest of the gradient may say anything of the batch."""


@dataclass(frozen=True)
class Scope:
    """What a decision is about: a run like this one, or from here on.

    Attributes:
        known: the noise scale, in units that are counted as the batch is.
        factor: the critical batch size over it; None where that was measured by branches.
        critical: the critical batch size.
        steps: of the training that costs are for.
    """

    known: RatioInterval
    factor: Factor | None
    critical: Range
    steps: float


@dataclass(frozen=True)
class Reached:
    """What a run needed to come down to the loss that all runs beside it reached.

    Attributes:
        loss: its value.
        steps: optimizer steps.
        units: of these steps.
        seconds: of training; None where that is not known.
    """

    loss: float
    steps: float
    units: float
    seconds: float | None

    @property
    def cost(self) -> float:
        """Seconds; where they are not known, units."""
        return self.units if self.seconds is None else self.seconds


@dataclass(frozen=True)
class Facts:
    """What is known of a training.

    Attributes:
        unit: plural name of the unit.
        batch: units of one optimizer step, on average; None where it is not known.
        now: the noise scale now.
        average: of the run so far; unresolved at fixed weights.
        effective: effective number of units of the batch (Kish); None where units weigh alike.
        covered: part of |F|² that the noise scale speaks of.
        n_steps: steps of training that the noise scales stand for; None at fixed weights.
        first_step: the first of them.
        warms_up: whether the learning rate is still rising.
        batch_changed: whether the batch was another one before, so that nothing is said of the whole run.
        optimizer: as `kind_of` names it; empty where it is not known, or its options were changed.
        settings: of each group of its parameters, as `settings_of` lists them.
        metric: of the noise scale.
        ranks: data-parallel ranks.
        pieces: micro-batches of one step on all ranks.
        curve: the time of a step, in seconds; None where it is not known.
        reason: why the noise scale now is not resolved.
        wait: what would make the noise scale known better; empty where nothing is needed.
        needs_batch: why the loss of a unit depends on the others of its micro-batch; empty where it is not known to.
        name: of the run.
        is_of_several: whether several runs were joined, so that the run that is gone on from has to be named.
        trainer: its name; empty for a loop.
        tokens: of one unit; None where they were not counted.
        completions: to each prompt, in RL.
        completions_share: the part of a step's noise that comes from completions.
        model: what tells one model from another, in words.
        reached: beside other runs; None without.
        branched: the critical batch size from here on, as `sonde branch` has measured it; None without.
        notes: what was noticed when several runs were joined.
    """

    unit: str
    batch: float | None
    now: RatioInterval
    average: RatioInterval = _NOTHING
    effective: float | None = None
    covered: float = 1.0
    n_steps: int | None = None
    first_step: int = 1
    warms_up: bool = False
    batch_changed: bool = False
    optimizer: str = ""
    settings: Sequence[Mapping[str, Any]] = ()
    metric: str = "euclidean"
    ranks: int = 1
    pieces: float = 1.0
    curve: TimeCurve | None = None
    reason: str = ""
    wait: str = ""
    needs_batch: str = ""
    name: str = ""
    is_of_several: bool = False
    trainer: str = ""
    tokens: float | None = None
    completions: float | None = None
    completions_share: float | None = None
    model: str = ""
    reached: Reached | None = None
    branched: Range | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch", "effective", "ranks", "pieces"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value:g}")
        if self.ranks != int(self.ranks):
            raise ValueError(f"ranks must be a whole number, got {self.ranks:g}")
        for known in (self.now, self.average):
            ends = [0.0, *(end for end in (known.low, known.ratio, known.high) if end is not None)]
            if known.low == math.inf or not all(low <= high for low, high in itertools.pairwise(ends)):
                raise ValueError(f"a noise scale must be 0 or more, and between its ends, got {known.in_words}")

    @property
    def micro_batch(self) -> float:
        """Units of one backward on one rank, as it was set: short windows lower an average a little."""
        return nearly_whole((self.batch or 1.0) / max(self.pieces, self.ranks))

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank takes one after the other in a step."""
        return max(round(self.pieces / self.ranks), 1)

    @property
    def why_none(self) -> str:
        """Why nothing can be decided yet, in a sentence without its end; empty where something can."""
        if self.batch is None:
            return self.reason or "no batch size was given to judge"
        if self.n_steps is not None and self.n_steps < FEWEST_STEPS:
            step = self.first_step - 1 + FEWEST_STEPS
            return f"the noise scale grows fast in the first steps, so no batch is judged before step {step:,}"
        if self.warms_up:
            return "the learning rate is still rising, and the noise scale with it"
        if self.covered < _LEAST_COVERED:
            left_out = percent(1 - self.covered)
            return f"the noise scale leaves out {left_out} of |F|²: accumulate over 2 micro-batches or more"
        if not self.scopes:
            return self.reason or "the noise scale is not known yet"
        if self.now.high == 0:
            return "all pieces had the same gradient, so check that they hold different data"
        return ""

    @property
    def scopes(self) -> dict[str, Scope]:
        """What is known of B_crit: for a run like this one first, where its average says something of that."""
        found: dict[str, Scope] = {}
        batch = self.batch or 1.0
        counted, _ = as_weighed(batch, self.effective, self.unit)
        of_run = self.average if self.n_steps and not self.batch_changed else _NOTHING
        for name, known, steps in ((RUN_LIKE_THIS, of_run, self.n_steps), (FROM_HERE_ON, self.now, STEPS)):
            if name == FROM_HERE_ON and self.branched is not None:
                found[name] = Scope(known, None, self.branched, STEPS)
                continue
            if known.low is None:
                continue
            known = known.times(batch / counted)
            factor = factor_for(self.unit, self.optimizer, self.metric, from_here_on=name == FROM_HERE_ON)
            found[name] = Scope(known, factor, critical_range(known, factor), float(steps or STEPS))
        return found


def facts_of(
    metrics: Mapping[str, float | None],
    setup: Mapping[str, Any],
    *,
    unit: str,
    now: RatioInterval,
    window: int,
    pieces: float | None,
    optimizer_changed: bool,
    **more: Any,
) -> Facts:
    """The facts of a reading of the noise scale, by the names of a log: a probe and its log give the same.

    Args:
        metrics: of the reading.
        unit: plural name of the unit.
        setup: of the probe.
        now: the noise scale now.
        window: optimizer steps so far.
        pieces: micro-batches of a step on all ranks.
        optimizer_changed: whether the optimizers are of another kind than the set-up says.
        **more: further fields.
    """
    trains, batch = not setup.get("fixed_weights"), metrics.get("gns/units_per_window") or None
    first_step = round(metrics.get("gns/first_step") or 1)
    tokens = metrics.get("gns/units_per_window_tokens")
    batch_norms = (
        "batch normalisation shares its statistics among the rows of one, and another size would change the loss itself"
    )
    advantages = "advantages are mostly normalised over the batch of one, and another size would change the loss itself"
    return Facts(
        unit,
        batch,
        now=now,
        average=logged_interval(metrics, "gns/b_simple_average") if trains else _NOTHING,
        effective=metrics.get("gns/effective_units"),
        covered=1.0 if (covered := metrics.get("gns/covered")) is None else covered,
        n_steps=window - first_step + 1 if trains else None,
        first_step=first_step,
        warms_up=bool(metrics.get("gns/warms_up")),
        optimizer="" if optimizer_changed else str(setup.get("optimizer_kind") or ""),
        settings=tuple(setup.get("optimizer_settings") or ()),
        metric=str(setup.get("metric") or "euclidean").split(", ")[0],
        ranks=int(setup.get("ranks") or 1),
        pieces=float(pieces or 1) if trains else 1.0,  # windows at fixed weights are no batches
        needs_batch=batch_norms if setup.get("batch_norms") else advantages if unit in _OF_PLAY else "",
        trainer=str(setup.get("trainer") or ""),
        tokens=tokens / batch if tokens and batch else None,
        model="" if setup.get("parameters") is None else f"{int(setup['parameters']):,} parameters",
        **more,
    )

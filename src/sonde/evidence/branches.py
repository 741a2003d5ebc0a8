"""What branches from one checkpoint showed: each one's loss over units, and the critical batch size that follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

from sonde.evidence.stats.branched_batch import UnitsRatio, critical_batch, from_base, units_ratios
from sonde.evidence.stats.loss_curves import Curve, log_units_ratio
from sonde.log.values import filled
from sonde.record_values import as_json
from sonde.stats.intervals import RatioInterval, unresolved

SCHEMA = 2
State = Literal["finished", "failed", "cut off"]
"""How a branch ended: as asked; by an error; or by the user, before its end."""


@dataclass(frozen=True)
class Branch:
    """One short training from the checkpoint.

    Attributes:
        batch: units of one optimizer step.
        seed: of its data: branches of the same seed are paired.
        rate: learning rate.
        curve: held-out loss over units since the checkpoint.
        state: how it ended.
        message: why it failed, in words; empty if it did not.
    """

    batch: float
    seed: int
    rate: float | None
    curve: Curve
    state: State = "finished"
    message: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"batch {self.batch:g}, seed {self.seed}"


@dataclass(frozen=True)
class Proxy:
    """A noise scale that stands beside the measured critical batch.

    Attributes:
        name: such as "B_simple, average".
        metric: of the gradients: "euclidean", "adam", "sign" or "spectral".
        low: lower end of its interval; 0 for an upper bound.
        high: upper end; None for a lower bound.
        value: the estimate; None unless both ends are known.
    """

    name: str
    metric: str
    low: float
    high: float | None
    value: float | None


@dataclass(frozen=True)
class Branches:
    """All branches from one checkpoint.

    Attributes:
        unit: plural name of the unit.
        reference: batch size that the others are compared with.
        units: that each branch trains on.
        tolerance: part of the units that a batch may need more and still be below the critical batch.
        rule: how the rate followed the batch, in words.
        branches: every one, in the order in which they were planned.
        proxies: noise scales at the checkpoint, or over the reference's branches.
        loss: what the losses are: the name in the log or in the output.
        noise: part of the units by which two runs of one branch differ: 0 where they are the same bit for bit, None
            where they are not, and cannot be compared.
        unverified: placeholders of which it is not known that the script uses them, and why.
    """

    unit: str
    reference: float
    units: float
    tolerance: float
    rule: str
    branches: tuple[Branch, ...]
    proxies: tuple[Proxy, ...] = ()
    loss: str = "eval_loss"
    noise: float | None = 0.0
    unverified: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def ratios(self) -> list[UnitsRatio]:
        """Of each batch above the reference: units that it needs over those that the reference needs."""
        references = {b.seed: b for b in self.branches if self._is_reference(b)}
        logs: dict[float, list[float]] = {b.batch: [] for b in self.branches if b.batch != self.reference}
        n_diverged = dict.fromkeys(logs, 0)
        for branch in self.branches:
            base = references.get(branch.seed)
            if branch.batch == self.reference or branch.state != "finished" or base is None:
                continue
            found = log_units_ratio(branch.curve, base.curve)
            if found is not None:
                logs[branch.batch].append(found)
                n_diverged[branch.batch] += branch.curve.has_diverged
        return [replace(ratio, n_diverged=n_diverged[ratio.batch]) for ratio in units_ratios([*logs.items()])]

    @cached_property
    def critical(self) -> RatioInterval:
        """The critical batch size, at which the ratio of units passes 1 + tolerance."""
        if self.mistake:
            return unresolved(self.mistake)
        return critical_batch(self.ratios, self.reference, self.tolerance)

    @cached_property
    def law_critical(self) -> RatioInterval:
        """B_crit of the law 1 + B/B_crit, which noise scales predict, from the critical batch size.

        Unresolved, with a reason, where nothing is known or the ratio rises faster than the law allows.
        """
        found = self.critical
        if found.low is None or found.high is None:
            return found
        low, high = (max(from_base(end, self.reference, self.tolerance), 0.0) for end in (found.low, found.high))
        if high == 0:
            return unresolved("the ratio of units rises faster than the law allows")
        if math.isinf(high):
            return RatioInterval("lower_bound", low, high, found.reason) if low else unresolved(found.reason)
        if low == 0 or found.ratio is None:
            return RatioInterval("upper_bound", 0.0, high)
        return RatioInterval("resolved", low, high, ratio=from_base(found.ratio, self.reference, self.tolerance))

    @property
    def mistake(self) -> str:
        """Why these branches can show no critical batch, whatever their ratios are; empty if they can."""
        references = [b.curve for b in self.branches if self._is_reference(b)]
        is_stuck = bool(references) and all(curve.has_diverged or curve.is_flat for curve in references)
        return "the reference's loss does not fall" if is_stuck else ""

    def of_shorter(self, part: float = 0.5) -> Branches:
        """The same branches, as if they had ended after this part of their units: a check by a second length."""
        units = part * self.units
        return replace(self, units=units, branches=tuple(replace(b, curve=b.curve.until(units)) for b in self.branches))

    def _is_reference(self, branch: Branch) -> bool:
        return branch.batch == self.reference and branch.state == "finished"

    def as_json(self) -> dict[str, Any]:
        """For a file. A loss that is not finite becomes None, since JSON has no such numbers."""
        return {"schema": SCHEMA, **as_json(self)}

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> Self:
        """From a file.

        Raises:
            ValueError: for another schema.
            KeyError: when something is missing.
            TypeError: when something is of another kind.
        """
        if known.get("schema") != SCHEMA:
            raise ValueError(f"these branches were written by another version of sonde (schema {known.get('schema')})")
        return filled(cls, known)

"""Whether a script uses what it is given: a run with one placeholder at another value, its twin, must differ.

Two witnesses: held-out losses, and the header of the script's own log, which lists the settings of its optimizer.
Losses that are equal bit for bit show that a placeholder is ignored. Where two runs of the same command differ, losses
can only show that a placeholder is used: by differing far more than these two. The log is asked where losses cannot
tell, and no earlier: sonde may have been attached before the script loaded its checkpoint, which replaces settings.

Whatever is found of a twin is found from its first losses, beside whole curves of the other runs: how many losses it
had shown when it was looked at, or ended, changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sonde.evidence.branches import Branch
from sonde.evidence.shell_losses import Losses, LossSource, check_starts, read_losses
from sonde.evidence.shell_plan import AGAIN, LENGTHS, Asked, below
from sonde.evidence.shell_run import forget, whole
from sonde.evidence.stats.loss_curves import log_units_ratio
from sonde.wording import count, number

_NOISE = 100.0
"""A twin's loss is another one if it differs by so many times what two equal runs have differed by until there."""
_ENOUGH = 4
"""Different losses, equal in a run and its twin, that show without its end that a placeholder is ignored. Printed
losses may be so short that the first few are equal by rounding."""
_SLOW = 0.5
"""A run at hardly any rate whose loss falls by this part of its branch's learns at another rate. It is compared where
the branch's loss has come down by this part of its way."""
_OTHER_BATCH, _OTHER_RATE = 0.05, 0.01
"""Parts by which a batch and a rate in a log may differ from the table's. A last batch of an epoch is shorter."""
_SET_AFTER = "have it set the value after it has loaded the checkpoint, whose optimizer and scheduler bring their own"
_REMEDIES = {
    "batch": "have its data loader draw so many units for each step, or ask for sizes that it does not round",
    "seed": "have it draw its data by the seed, also after it has loaded the checkpoint",
    **dict.fromkeys(LENGTHS, "have it end there, also where it counts on from a checkpoint or trains whole epochs"),
}


class Twins:
    """The runs of a plan that show what its script uses: a twin, the branch that it is a twin of, and a second run.

    Further seeds of the reference are twins of the first.

    Args:
        asked: all runs of the plan.
        source: of their losses.
    """

    def __init__(self, asked: Sequence[Asked], source: LossSource) -> None:
        self._first, self._again, *_ = asked
        self._source, self._seen = source, dict[Asked, Losses]()
        branches = [each for each in asked if not each.changed]
        first_of = {each.batch: each for each in reversed(branches)}
        self._branch_of = {
            each: first_of[(each.instead_of or 0.0) if each.changed == "batch" else each.batch]
            for each in asked
            if each.changed not in ("", AGAIN)
        }
        size = (self._first.batch, self._first.units)
        seeds = [each for each in branches if (each.batch, each.units) == size and each.seed > 1]
        self._branch_of |= dict.fromkeys(seeds, self._first)

    def is_done(self, asked: Asked, seen: Losses) -> bool:
        """Whether a run that goes on has shown all that it is for."""
        if asked.changed and self._is_comparable(asked):
            is_slow = _is_slowed(asked) and len(self._pairs(asked, seen)) == self._n_beside(asked)
            if is_slow or self._is_used(asked, seen, has_ended=False) is not None:
                return True
        return asked.changed not in LENGTHS and whole(seen.curve, asked.units) is not None

    def check(self, ended: Mapping[Asked, Branch]) -> dict[str, str]:
        """Compare runs that have ended with what they were given.

        Args:
            ended: runs that have ended so far. Where the script has to change, the next command trains them again.

        Returns:
            By placeholder, why it could not be verified.

        Raises:
            ValueError: for a placeholder that the script ignores, and a value that it changes.
        """
        for each in ended:
            if each not in self._seen:
                losses = read_losses(each.folder, each.batch, self._source)
                curve = None if each.changed in LENGTHS else whole(losses.curve, each.units)
                self._seen[each] = replace(losses, curve=curve or losses.curve)
        self._check_batches(ended)
        try:
            if self._first in ended:
                check_starts([self._seen[each] for each in (self._first, *ended)])
                self._check_settings(ended)
            return self._unknown(ended)
        except ValueError:
            forget(ended)
            raise

    def _is_comparable(self, twin: Asked) -> bool:
        return twin in self._branch_of and self._seen.keys() >= {self._first, self._again, self._branch_of[twin]}

    def _n_beside(self, twin: Asked) -> int:
        """Losses of its branch that count: all, or those until they have come down by a part, at hardly any rate."""
        of = self._seen[self._branch_of[twin]].curve.losses
        down = (n for n, loss in enumerate(of, 1) if of[0] - loss >= _SLOW * (of[0] - of[-1]) > 0)
        return next(down, len(of)) if _is_slowed(twin) else len(of)

    def _pairs(self, twin: Asked, seen: Losses) -> list[tuple[float, float]]:
        """Losses of a twin and its branch after as many steps: a script may evaluate more often at another batch."""
        of = self._branch_of[twin]
        at = dict([*_by_steps(of, self._seen[of])][: self._n_beside(twin)])
        return [(loss, at[step]) for step, loss in _by_steps(twin, seen) if step in at]

    def _unknown(self, ended: Mapping[Asked, Branch]) -> dict[str, str]:
        unknown = dict[str, str]()
        for twin, of in self._branch_of.items():
            if twin in ended and self._is_comparable(twin):
                has_ended = "failed" not in (ended[twin].state, ended[of].state)
                is_used = self._is_used(twin, self._seen[twin], has_ended=has_ended)
                if is_used is False:
                    raise ValueError(self._ignored(twin))
                is_needed = twin.changed != "batch" or twin.value != below(of.batch)  # the script may refuse that
                if is_used is None and ended[of].state != "failed" and is_needed:
                    unknown.setdefault(twin.changed or "seed", self._why_unknown(twin, ended))
        return unknown

    def _is_used(self, twin: Asked, seen: Losses, *, has_ended: bool) -> bool | None:
        """Whether a script uses the value that its twin has; None where that is not known, or not yet."""
        pairs = self._pairs(twin, seen)
        noise = [*map(_gap, self._seen[self._again].curve.losses, self._seen[self._first].curve.losses)]
        if twin.changed in LENGTHS:
            # A script that is told when to end does so, or has its rate fall until there, and sonde ends it.
            if seen.curve.units[-1:] <= (twin.units + twin.batch,):
                return has_ended or None
            n = len(seen.curve.until(twin.units).losses)
            return bool(_are_others(pairs[: max(n - 1, 0)], noise, has_ended=True))
        are_others = _are_others(pairs, noise, has_ended=has_ended)
        is_early = len(pairs) < self._n_beside(twin) and not has_ended
        if are_others is not False and _is_slowed(twin) and (is_early or _learns(pairs)):
            return None
        logged = [seen.trained_batch or 0.0] if twin.changed == "batch" else seen.settings.get(twin.changed, ())
        is_logged = any(math.isclose(value, twin.value or 0.0, rel_tol=1e-6) for value in logged)
        return True if are_others is None and has_ended and is_logged else are_others

    def _check_batches(self, ended: Mapping[Asked, Branch]) -> None:
        """Refuse a batch that the script rounds, by its log. A twin may end after a batch that is shorter."""
        for each in ended:
            trained = None if each.changed else self._seen[each].trained_batch
            if trained and not math.isclose(trained, each.batch, rel_tol=_OTHER_BATCH):
                raise ValueError(
                    f"the script changes {{batch}}: its steps have {number(trained, 4)} units where {{batch}} is "
                    f"{each.batch:g}: ask for batches that it takes, and give --batches and --units in the unit of its "
                    "log"
                )

    def _check_settings(self, ended: Mapping[Asked, Branch]) -> None:
        """Refuse a setting of the optimizer that the script scales, or limits, by its log."""
        first = self._seen[self._first].settings
        for each, (name, asked) in ((run, setting) for run in ended for setting in run.settings):
            logged, base = (found.get(name, (None,))[0] for found in (self._seen[each].settings, first))
            if not (logged and base) or logged == base:
                continue  # a log has the rate that a scheduler starts from, which may be that of the checkpoint
            same = [logged, base, asked, dict(self._first.settings)[name]]
            if name.startswith("beta"):
                same = [1 - value for value in same]
            if all(same) and not math.isclose(same[0] / same[1], same[2] / same[3], rel_tol=_OTHER_RATE):
                by_batch = ", or pass --lr-rule none if it scales the rate by its batch" if name == "lr" else ""
                raise ValueError(
                    f"the script changes {{{name}}}: its log has {logged:.4g} where {{{name}}} is {asked:.4g}, at "
                    f"batch {each.batch:g}: have it take the value as it is{by_batch}"
                )

    def _ignored(self, twin: Asked) -> str:
        name, of = twin.changed or "seed", self._branch_of[twin]
        remedy = _REMEDIES.get(name, _SET_AFTER)
        said = f"its losses are the same, bit for bit ({twin.folder})"
        if name in LENGTHS:
            beyond = next(units for units in self._seen[twin].curve.units if units > twin.units + twin.batch)
            said = f"it should end after {count(twin.units)} units, and trains on for {count(beyond)} or more"
        if of.batch != self._first.batch:
            remedy = f"at batch {of.batch:g} it seems to have a limit, or to round, so have it use the value as it is"
        leave = "" if name in ("batch", "seed") else f", or leave {{{name}}} out"
        return f"the script ignores {{{name}}}: {_change(twin)} {said}: {remedy}{leave}"

    def _why_unknown(self, twin: Asked, ended: Mapping[Asked, Branch]) -> str:
        """Why a twin shows nothing."""
        pairs, said = self._pairs(twin, self._seen[twin]), "its losses differ as two equal runs do"
        if ended[twin].state == "failed":
            said = f"the script failed: {ended[twin].message}"
        elif len(pairs) < 2:
            said = f"it shows {len(pairs)} losses after as many steps: evaluate more often"
        elif _is_slowed(twin) and _learns(pairs):
            said = "its loss falls nearly as far, as if another rate held, at least after the first steps"
        return f"{_change(twin)} {said}"


def _change(twin: Asked) -> str:
    value, of = (twin.value, twin.instead_of) if twin.changed else (twin.seed, 1)
    return f"with {value:.4g} in place of {of:.4g}"


def _is_slowed(twin: Asked) -> bool:
    """Whether a twin has hardly any rate."""
    return twin.changed == "lr" and (twin.value or 0.0) < (twin.instead_of or 0.0)


def _by_steps(asked: Asked, seen: Losses) -> Iterator[tuple[int, float]]:
    per_step = seen.trained_batch or asked.batch
    return ((round(units / per_step), loss) for units, loss in zip(seen.curve.units, seen.curve.losses, strict=True))


def _learns(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether losses at hardly any rate fall nearly as far as those of the branch."""
    falls = [first - last for first, last in zip(pairs[0], pairs[-1], strict=True)] if pairs else [0.0, 0.0]
    return falls[0] >= _SLOW * falls[1] > 0


def _are_others(pairs: Sequence[tuple[float, float]], noise: Sequence[float], *, has_ended: bool) -> bool | None:
    """Whether losses differ from those of a branch, by more than two equal runs do: `noise`, loss by loss.

    Where these differ at all, they are taken to differ from the start. Their first losses may be equal by rounding.
    """
    so_far, different = min(filter(None, noise), default=0.0), set[float]()
    for (loss, of), now in zip(pairs, itertools.chain(noise, itertools.repeat(0.0)), strict=False):
        so_far = max(so_far, now)
        if _gap(loss, of) > _NOISE * so_far:
            return True
        different |= {of} if math.isfinite(of) else set()
        if not so_far and len(different) >= _ENOUGH:
            return False
    return False if has_ended and not so_far and len(different) > 1 else None


def _gap(loss: float, other: float) -> float:
    if loss == other or (math.isnan(loss) and math.isnan(other)):
        return 0.0
    return abs(loss - other) if math.isfinite(loss - other) else math.inf


def noise_of(first: Branch, again: Branch) -> float | None:
    """Part of the units by which two runs of one branch differ, as `Branches.noise`."""
    if repr(first.curve) == repr(again.curve):  # by their texts: NaN is not equal to itself
        return 0.0
    log = log_units_ratio(again.curve, first.curve)
    return None if log is None or math.isinf(log) else math.expm1(abs(log))

"""Whether a script uses what it is given: a run with one placeholder at another value, its twin, must differ.

Two witnesses: held-out losses, and the header of the script's own log, which lists the settings of its optimizer.
Losses that are equal bit for bit show that a placeholder is ignored. Where two runs of the same command differ, losses
can only show that a placeholder is used: by differing far more than these two. The log is asked where losses cannot
tell, and no earlier: sonde may have been attached before the script loaded its checkpoint, which replaces settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from sonde.evidence.branches import Branch
from sonde.evidence.shell_losses import Losses, LossSource, check_starts, read_losses
from sonde.evidence.shell_plan import AGAIN, LENGTHS, Asked
from sonde.evidence.shell_run import forget, has_trained_enough
from sonde.evidence.stats.loss_curves import log_units_ratio
from sonde.wording import count, number

_NOISE = 100.0
"""A twin's loss is another one if it differs by so many times what two equal runs have differed by until there."""
_ENOUGH = 4
"""Different losses, equal in a run and its twin, that show without its end that a placeholder is ignored. Printed
losses may be so short that the first few are equal by rounding."""
_OTHER_BATCH, _OTHER_RATE = 0.05, 0.01
"""Parts by which a batch and a rate in a log may differ from the table's. A last batch of an epoch is shorter."""
_SET_AFTER = "have it set the value after it has loaded the checkpoint, whose optimizer and scheduler bring their own"
_REMEDIES = {
    "batch": "have its data loader draw so many units for each step",
    "seed": "have it draw its data by the seed, also after it has loaded the checkpoint",
    **dict.fromkeys(LENGTHS, "have it end there, also where it counts on from a checkpoint or trains whole epochs"),
}


class Twins:
    """The first branch of a plan, its second run, and its runs with another value of one placeholder.

    Args:
        asked: all runs of the plan.
        source: of their losses.
    """

    def __init__(self, asked: Sequence[Asked], source: LossSource) -> None:
        self._first, self._again, *_ = asked
        self._twins = [each for each in asked if each.changed not in ("", AGAIN)]
        self._source, self._seen = source, dict[Asked, Losses]()

    def is_done(self, asked: Asked, seen: Losses) -> bool:
        """Whether a run that goes on has shown all that it is for."""
        if asked not in self._twins:
            return has_trained_enough(seen, asked.units)
        first, again = self._losses(self._first), self._losses(self._again)
        if _is_used(asked, seen, first, again, has_ended=False) is not None:
            return True
        shared = first.curve.losses[: min(len(each.curve.losses) for each in (first, again, seen))]
        is_noisy = len(set(shared)) >= _ENOUGH  # otherwise these would have been equal
        return asked.changed not in LENGTHS and (is_noisy or has_trained_enough(seen, asked.units))

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
            self._seen.setdefault(each, self._losses(each))
        self._check_batches(ended)
        try:
            check_starts(self._seen[each] for each in ended)
            self._check_rates(ended)
            return self._check_twins(ended)
        except ValueError:
            forget(ended)
            raise

    def _losses(self, asked: Asked) -> Losses:
        return self._seen.get(asked) or read_losses(asked.folder, asked.batch, self._source)

    def _check_twins(self, ended: Mapping[Asked, Branch]) -> dict[str, str]:
        if self._first not in ended or self._again not in ended:
            return {}
        first, again, unknown = self._losses(self._first), self._losses(self._again), dict[str, str]()
        for twin in self._twins:
            if twin in ended:
                seen, has_ended = self._losses(twin), ended[twin].state != "failed"
                is_used = _is_used(twin, seen, first, again, has_ended=has_ended)
                if is_used is False:
                    raise ValueError(_ignored(twin, seen))
                if is_used is None:
                    unknown[twin.changed] = _why_unknown(twin, ended[twin], seen)
        return unknown

    def _check_batches(self, ended: Iterable[Asked]) -> None:
        """Refuse a batch that the script rounds, by its log."""
        for each in ended:
            trained = self._losses(each).trained_batch
            if trained and not math.isclose(trained, each.batch, rel_tol=_OTHER_BATCH):
                raise ValueError(
                    f"the script changes {{batch}}: its steps have {number(trained, 4)} units where {{batch}} is "
                    f"{each.batch:g}: ask for batches that it takes, and give --batches and --units in the unit of its "
                    "log"
                )

    def _check_rates(self, ended: Iterable[Asked]) -> None:
        """Refuse a rate that the script scales once more, by its log."""
        of_first = self._losses(self._first).settings.get("lr", ())
        for each in ended:
            rates = self._losses(each).settings.get("lr", ())
            if not (rates and of_first and each.rate and self._first.rate) or rates[0] == of_first[0]:
                continue  # a log has the rate that a scheduler starts from, which may be that of the checkpoint
            if not math.isclose(rates[0] / each.rate, of_first[0] / self._first.rate, rel_tol=_OTHER_RATE):
                raise ValueError(
                    f"the script changes {{lr}}: its log has {rates[0]:.4g} where {{lr}} is {each.rate:.4g}, at batch "
                    f"{each.batch:g}: have it take the rate as it is, or pass --lr-rule none if it scales the rate by "
                    "its batch"
                )


def _is_used(twin: Asked, seen: Losses, first: Losses, again: Losses, *, has_ended: bool) -> bool | None:
    """Whether a script uses the value that its twin has; None where that is not known, or not yet."""
    losses, of_first, of_again = (each.curve.losses for each in (seen, first, again))
    if twin.changed not in LENGTHS:
        are_others = _are_others(losses, of_first, of_again, has_ended=has_ended)
        logged = [seen.trained_batch or 0.0] if twin.changed == "batch" else seen.settings.get(twin.changed, ())
        is_logged = any(math.isclose(value, twin.value or 0.0, rel_tol=1e-6) for value in logged)
        return True if are_others is None and has_ended and is_logged else are_others
    # A script that is told when to end does so, or has its rate fall until there, and sonde ends it.
    until = seen.curve.until(twin.units)
    if seen.curve.units[-1:] <= (twin.units + twin.batch,):
        return has_ended or None
    return bool(_are_others(until.losses[:-1], of_first, of_again, has_ended=True))


def _are_others(
    losses: Sequence[float], first: Sequence[float], again: Sequence[float], *, has_ended: bool
) -> bool | None:
    """Whether losses differ from the first run's, by more than those of its second run do."""
    noise = 0.0
    for loss, of_first, of_again in zip(losses, first, again, strict=False):
        noise = max(noise, _gap(of_again, of_first))
        if _gap(loss, of_first) > _NOISE * noise:
            return True
    n_different = len(set(first[: min(len(losses), len(again))]))
    is_shown = n_different >= _ENOUGH or (has_ended and n_different > 1)
    return False if is_shown and not noise else None


def _gap(loss: float, other: float) -> float:
    if loss == other or (math.isnan(loss) and math.isnan(other)):
        return 0.0
    return abs(loss - other) if math.isfinite(loss - other) else math.inf


def _ignored(twin: Asked, seen: Losses) -> str:
    name = twin.changed
    said = f"the script ignores {{{name}}}: with {twin.value:.4g} in place of {twin.instead_of:.4g} "
    if name in LENGTHS:
        said += (
            f"it should end after {count(twin.units)} units, and trains on for {count(seen.curve.units[-1])} or more"
        )
    else:
        said += f"its losses are the same, bit for bit ({twin.folder})"
    leave = "" if name in ("batch", "seed") else f", or leave {{{name}}} out"
    return f"{said}: {_REMEDIES.get(name, _SET_AFTER)}{leave}"


def _why_unknown(twin: Asked, branch: Branch, seen: Losses) -> str:
    """Why a twin shows nothing."""
    if branch.state == "failed":
        return f"with {twin.value:.4g} the script failed: {branch.message}"
    if len(seen.curve.losses) < 2:
        return f"with {twin.value:.4g} it shows {len(seen.curve.losses)} losses: evaluate more often"
    return f"with {twin.value:.4g} its losses differ as two equal runs do"


def noise_of(first: Branch, again: Branch) -> float | None:
    """Part of the units by which two runs of one branch differ, as `Branches.noise`."""
    if repr(first.curve) == repr(again.curve):  # by their texts: NaN is not equal to itself
        return 0.0
    log = log_units_ratio(again.curve, first.curve)
    return None if log is None or math.isinf(log) else math.expm1(abs(log))

"""What branches show beside their answer: mistakes of a script, too little data, and what to do about each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from sonde.evidence.branches import Branch, Branches
from sonde.evidence.stats.loss_curves import FEWEST, falling, units_at
from sonde.wording import count, number, percent

_COMPARED = 0.5
"""A batch whose last loss the reference reaches within this part of the units is hardly compared."""


def notices(found: Branches) -> list[str]:
    """All that deserves a sentence, in the order of what to see to first.

    Args:
        found: branches, of which some may have failed.
    """
    each = (_failed, _few_losses, _unverified, _resumes, _diverged, _hardly_compared, _flat, _too_few)
    return [sentence for look in each for sentence in look(found)]


def _finished(found: Branches) -> list[Branch]:
    return [branch for branch in found.branches if branch.state == "finished"]


def _failed(found: Branches) -> Iterator[str]:
    for branch in found.branches:
        if branch.state != "finished":
            yield f"{branch.name.capitalize()} {branch.state}: {branch.message or 'it was ended'}."


def _few_losses(found: Branches) -> Iterator[str]:
    for branch in _finished(found):
        if (n := len(branch.curve.losses)) < FEWEST and not branch.curve.has_diverged:
            yield f"{branch.name.capitalize()} has {n} of {FEWEST} losses that a comparison needs: evaluate more often."
            return


def _unverified(found: Branches) -> Iterator[str]:
    for name, why in found.unverified.items():
        yield f"Whether the script uses {{{name}}} is not known: {why}."


def _resumes(found: Branches) -> Iterator[str]:
    """Whether the second run of the reference is the first."""
    if found.noise != 0:
        size = "" if found.noise is None else f": they differ by {percent(found.noise)} of the units"
        yield (
            f"Two runs of one branch are not the same bit for bit{size}. The checkpoint leaves something out, or the "
            "computation is not deterministic. This noise is in the intervals, as part of the seeds' scatter."
        )


def _diverged(found: Branches) -> Iterator[str]:
    for batch in dict.fromkeys(branch.batch for branch in _finished(found)):
        diverged = [branch.curve.has_diverged for branch in _finished(found) if branch.batch == batch]
        if any(diverged):
            where = ", the reference, so these seeds show nothing" if batch == found.reference else ""
            yield f"Batch {batch:g} diverged with {sum(diverged)} of {len(diverged)} seeds{where}: try a lower rate."


def _hardly_compared(found: Branches) -> Iterator[str]:
    """Batches that never come near the reference's loss."""
    steady = [branch for branch in _finished(found) if not branch.curve.has_diverged]
    references = {branch.seed: falling(branch.curve) for branch in steady if branch.batch == found.reference}
    parts: dict[float, list[float]] = {}
    for branch in steady:
        base = references.get(branch.seed)
        if base is not None and branch.batch != found.reference:
            lowest = falling(branch.curve).losses[-1]
            reached = 1.0 if lowest <= base.losses[-1] else (units_at(base, lowest) or 0.0) / found.units
            parts.setdefault(branch.batch, []).append(reached)
    early = {batch: fmean(values) for batch, values in parts.items() if fmean(values) < _COMPARED}
    if early:
        said = ", ".join(f"batch {batch:g} (after {percent(part)})" for batch, part in early.items())
        yield (
            f"Within half of the units, the reference has the last loss of {said}. Such a ratio is that of the first "
            "units, and says little of later ones: train longer to compare these."
        )


def _flat(found: Branches) -> Iterator[str]:
    """A loss whose progress is lost in its scatter."""
    for curve in (branch.curve for branch in _finished(found) if branch.batch == found.reference):
        if curve.has_diverged or curve.scatter is None:
            continue
        if (progress := falling(curve).progress) <= 2 * curve.scatter:
            yield (
                f"The reference's loss falls by {number(progress)} in all, and scatters by {number(curve.scatter)} "
                f"from one evaluation to the next: train on more {found.unit}, or evaluate on more data."
            )
            return


def _too_few(found: Branches) -> Iterator[str]:
    known = [(r.high / r.ratio, len(r.logs)) for r in found.ratios if r.ratio and r.high and math.isfinite(r.ratio)]
    widest, n = max(((math.log(reach), n) for reach, n in known), default=(0.0, 0))
    times = widest / math.log1p(found.tolerance)
    if times > 1:
        yield (
            f"Seeds leave ± {percent(math.expm1(widest))} of the units open, more than the tolerance of "
            f"{percent(found.tolerance)}: use about {math.ceil(n * times**2)} seeds, or about "
            f"{count(found.units * times)} {found.unit} if the loss falls on as it does."
        )

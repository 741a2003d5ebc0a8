"""`allow_biased=True`: whether windows of a single piece are compared with their neighbours, a biased last resort."""

from __future__ import annotations

from dataclasses import replace

from sonde.batch_size.found_model import FoundModel
from sonde.batch_size.setup import NoiseScaleOptions
from sonde.batch_size.stats.step_pairs import ALERT, StepProducts
from sonde.batch_size.stats.window_row import Drop, WindowRow
from sonde.batch_size.taps.gradient_sketch import GradientSketch
from sonde.batch_size.taps.step_sketches import StepSketches
from sonde.wording import percent

_IN_A_ROW = 3
"""Windows in a row that must say the same before pairs begin or end, once windows have been seen."""
_REMEDY = "Accumulate gradients over 2 or more micro-batches for a noise scale without bias"


class ConsecutiveSteps:
    """Decides, window by window, whether pairs of consecutive steps are all that shows noise.

    Windows with two or more pieces are better, and so are windows whose single examples are read: pairs begin only
    where neither is at hand, and end where windows have pieces again.

    Args:
        sketches: of the gradients of consecutive windows; None if pairs were not allowed, or have no use here.
        in_words: what pairs are for in this set-up; None if they were not allowed.
    """

    def __init__(self, sketches: StepSketches | None, in_words: str | None) -> None:
        self.sketches = sketches
        """As passed."""
        self.in_words = in_words
        """As passed."""
        self.is_on = False
        """Whether windows are solved in pairs now."""
        self._is_undecided = sketches is not None
        self._n_single = self._n_several = 0
        self._news: list[tuple[str, str]] = []

    def measures_pairs(self, *, may_read_examples: bool) -> bool:
        """Whether the windows that are measured should be neighbours: in pairs, or where pairs are to be expected.

        Args:
            may_read_examples: whether single examples are read, or may yet be.
        """
        return self.is_on or (self._is_undecided and not may_read_examples)

    def take_news(self) -> list[tuple[str, str]]:
        """What has changed since the last call: the name of an alert, or nothing, and a message."""
        news, self._news = self._news, []
        return news

    def resume(self, *, may_read_examples: bool) -> None:
        """Go on in pairs, as the run that saved a state did; examples that may be read come first."""
        if self.sketches is not None and not may_read_examples:
            self.is_on, self._is_undecided = True, False

    def note(self, row: WindowRow, step: StepProducts | None, *, may_read_examples: bool, why_not: str) -> None:
        """Note a window's pieces, and begin or end the pairs.

        Args:
            row: of the window.
            step: products of its sketch; None if it was not sketched.
            may_read_examples: whether single examples are read, or may yet be.
            why_not: why they are not read, for people.
        """
        if self.sketches is None or row.n_pieces == 0:
            return
        is_single = row.n_pieces == 1
        self._n_single = self._n_single + 1 if is_single else 0
        is_paired = step is not None and step.with_first is not None
        self._n_several = 0 if is_paired else self._n_several + (not is_single)
        if self._is_undecided and not (is_single and may_read_examples):
            self._is_undecided = False
            if is_single:
                self._begin(why_not)
            else:
                self._tell(
                    "", f"allow_biased=True has no effect: a window has {row.n_pieces} pieces, which are compared"
                )
        elif self.is_on and (may_read_examples or self._n_several >= _IN_A_ROW):
            self.is_on = False
            self._tell("", "windows have several pieces again, which are compared in place of consecutive steps")
        elif not (self.is_on or self._is_undecided or may_read_examples) and self._n_single >= _IN_A_ROW:
            self._begin(why_not)
        self.sketches.is_wanted = self.is_on or self._is_undecided

    def _begin(self, why_not: str) -> None:
        self.is_on, self._n_several = True, 0
        why = f"its examples cannot be told apart: {why_not}" if why_not else "single examples are not read"
        self._tell("", f"consecutive steps are compared, since a window is a single piece, and {why}")
        self._tell("biased", ALERT)

    def _tell(self, alert: str, message: str) -> None:
        self._news.append((alert, message))

    def explained(self, row: WindowRow) -> WindowRow:
        """The row of a window that cannot be paired while the others are, with the reason."""
        if row.problems or row.n_pieces == 0:
            return row
        if row.n_pieces > 1:
            message = (
                f"the window held {row.n_pieces} pieces among windows of one, and noise scales with and without bias "
                "are not averaged together"
            )
            return replace(row, problems=[Drop("other_pieces", message)])
        why = (self.sketches.why_not if self.sketches is not None else "") or "it came before pairs were compared"
        message = f"the window held a single piece, and could not be compared with its neighbour: {why}. {_REMEDY}"
        return replace(row, problems=[Drop("single_piece", message)])


def consecutive_steps(options: NoiseScaleOptions, found: FoundModel) -> ConsecutiveSteps:
    """What compares consecutive steps, as `allow_biased` asks for.

    Args:
        options: of the probe.
        found: the model.

    Raises:
        ValueError: for a model that is cut over several ranks, none of which has data of its own; on all ranks.
    """
    if not options.allow_biased:
        return ConsecutiveSteps(None, None)
    wrapper = found.wrapper
    if wrapper.n_ranks > 1:
        each = f"each of {wrapper.n_ranks} data-parallel ranks has a piece in every window"
        return ConsecutiveSteps(None, f"allow_biased=True has no effect: {each}")
    # On a mesh of one rank, such as FSDP2's there, this rank's parts are whole gradients.
    if (wrapper.mesh is not None and wrapper.mesh.size() > 1) or wrapper.experts is not None:
        raise ValueError(
            f"allow_biased=True compares whole gradients, and a model of kind {wrapper.name} holds a part of them on "
            "each rank: leave it out, and accumulate gradients over 2 or more micro-batches"
        )
    place = {name: i for i, name in enumerate(dict.fromkeys(found.group_names))}
    sketch = GradientSketch(
        found.parameters,
        [place[name] for name in found.group_names],
        n_groups=len(place),
        staging_bytes=int(options.staging_mib * 2**20),
        device=wrapper.leaves[0].device,
    )
    error = "exactly" if sketch.is_exact else f"with an error of about {percent(sketch.error)} in tr Σ of a pair"
    return ConsecutiveSteps(
        StepSketches(sketch),
        f"consecutive steps are compared, {error}, if a window is a single piece whose examples cannot be read",
    )

"""Chooses what a window is solved from: its pieces, its single examples, or, if allowed, the step before."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from sonde.batch_size.consecutive_steps import ConsecutiveSteps
from sonde.batch_size.log import MeasuredWindow
from sonde.batch_size.per_example.window import NOTHING_COVERED, SEVERAL_BACKWARDS, ExampleTimes, ExampleWindow
from sonde.batch_size.setup import NoiseScaleOptions
from sonde.batch_size.stats.example_sums import CoveredPart
from sonde.batch_size.stats.mechanism_trial import MechanismTrial
from sonde.batch_size.stats.solved_window import solve_window
from sonde.batch_size.stats.window_row import WITHOUT_EXAMPLES, Drop, WindowRow
from sonde.batch_size.window_clock import WindowClock, marks_of
from sonde.parallel.wrappers import Wrapper

_IN_A_ROW = 3
"""Windows in a row that must say the same before the mechanism changes."""
_LONGEST_TRIAL = 64
"""Measured windows after which a comparison is given up."""
_WORTH_IT = 1.05
"""Times as wide as the other mechanism's interval that the pieces' must be, before examples are read for good."""
_MOST_NAMED = 3
"""Parameters that one message names."""

_State = Literal["first", "trial", "examples", "pieces"]


class Mechanism:
    """Has single examples read in some windows, and decides from which of the two a window is solved.

    A window of a single piece shows noise by its examples alone. Examples are read in the first window, which shows how
    many pieces there are. With two or more, they are read in every other window until the two mechanisms have been
    compared. Then the one with the narrower interval for the same time stays.

    All ranks decide by numbers that were summed over ranks. A rank that decides some windows later than its peers reads
    examples where they do not, or the other way round; such windows are solved from their pieces.

    Args:
        model: as the user calls it.
        wrapper: of the model.
        options: of the probe.
        steps: compares consecutive steps where windows show no noise otherwise.

    Raises:
        ValueError: if examples are asked for and cannot be read.
    """

    def __init__(self, model: nn.Module, wrapper: Wrapper, options: NoiseScaleOptions, steps: ConsecutiveSteps) -> None:
        self._steps = steps
        self._names, self._n_ranks = list(wrapper.parameters), wrapper.n_ranks
        self._is_on_host = wrapper.leaves[0].device.type == "cpu"
        self._is_asked = options.per_example == "always"
        self.examples: ExampleWindow | None = None
        """Reads the examples; None where that is not possible, or not wanted."""
        self.why_not = ""
        """Why examples are not read, for people; empty where they may be."""
        if options.per_example != "never":
            self.examples, self.why_not = _made(model, wrapper, options)
            if self.examples is not None and not _all_can(wrapper, can=True):
                self.examples, self.why_not = None, "another rank cannot read them"
            elif self.examples is None:
                _all_can(wrapper, can=False)
        else:
            self.why_not = "per_example='never' leaves them out"
        if self._is_asked and self.examples is None:
            raise ValueError(f"per_example='always' needs the gradients of single examples, but {self.why_not}")
        self._state: _State = "pieces" if self.examples is None else "examples" if self._is_asked else "first"
        self.choice: tuple[str, int] | None = None
        """"pieces" or "examples", and the pieces of the windows that it was chosen for; None while it is open."""
        self._resumed_for: int | None = None
        self._trial = MechanismTrial(options.budget if options.every is None else None, options.every or 1)
        self._covered = CoveredPart(len(self._names))
        self._new_clock = functools.partial(WindowClock, marks_of(wrapper.leaves[0].device))
        self._clock = self._new_clock()
        self._was_measured = False
        self._n_measured = self._n_failures = self._n_single = self._n_tried = 0
        self._news: list[tuple[str, str]] = []
        self._said_of: tuple[bool, ...] = ()

    @property
    def keeps_leaf_hooks(self) -> bool:
        """Whether leaf hooks must read the pieces, since examples are read besides."""
        return self._state != "pieces"

    @property
    def covered(self) -> CoveredPart:
        """What the covered parameters are of the whole model, where windows are solved from examples."""
        return self._covered

    def take_news(self) -> list[tuple[str, str]]:
        """What has changed since the last call: the name of an alert, or nothing, and a message."""
        news, self._news = self._news, []
        return news + self._steps.take_news()

    @property
    def _may_read_examples(self) -> bool:
        """Whether single examples are read where a window is a single piece, or may yet be."""
        return self.examples is not None and not self.why_not

    @property
    def reads(self) -> str:
        """What is read in measured windows besides pieces: windows that read alike cost alike."""
        if self._steps.is_on:
            return "consecutive steps"
        return {"pieces": "", "trial": "some examples"}.get(self._state, "examples")

    @property
    def measures_pairs(self) -> bool:
        """Whether windows should be measured in pairs of neighbours."""
        return self._steps.measures_pairs(may_read_examples=self._may_read_examples)

    def resume_pairs(self) -> None:
        """Go on in pairs of consecutive steps, as the run that saved a state did, if they are allowed here too."""
        self._steps.resume(may_read_examples=self._may_read_examples)

    def resume(self, choice: tuple[str, int]) -> None:
        """Go on with what a run has chosen that saved a state, if windows turn out to have as many pieces again."""
        if self.examples is None or self._state != "first":
            return
        self.choice, (reads, self._resumed_for) = choice, choice
        self._state = "examples" if reads == "examples" else "pieces"
        if self._state == "pieces":
            self.close()

    # While windows are trained.

    def begin_window(self, *, is_measured: bool) -> None:
        """Read examples in the window that begins, or do not.

        Args:
            is_measured: whether anything is read in that window.
        """
        if self.examples is None:
            return
        if self._state == "trial":
            self._time_window()
        self._was_measured = is_measured
        self._n_measured += is_measured
        is_turn = self._state != "trial" or self._n_measured % 2 == 1
        if not (is_measured and is_turn and self._state != "pieces"):
            self.close()
            return
        try:
            self.examples.open()
        except ValueError as error:  # the model has changed since attach
            self._give_up(str(error))

    def _time_window(self) -> None:
        """Time the window that ends, unless it was not measured: then the next one begins to be timed."""
        assert self.examples is not None
        if not self._was_measured:
            self._clock = self._new_clock()
        self._clock.window_ended(was_measured=self.examples.is_open)
        new, old = self._clock.take(), self.examples.times
        self.examples.times = ExampleTimes(
            with_examples=old.with_examples + new.measured,
            n_with=old.n_with + new.n_measured,
            without=old.without + new.idle,
            n_without=old.n_without + new.n_idle,
        )

    def close(self) -> None:
        """Remove every hook."""
        if self.examples is not None and self.examples.is_open:
            self.examples.close()

    # Once their numbers are on the host.

    def row_of(self, window: MeasuredWindow) -> WindowRow:
        """The row of a window, with its examples if it is to be solved from them."""
        row, found = window.row, window.examples
        self._steps.note(row, window.step, may_read_examples=self._may_read_examples, why_not=self.why_not)
        if self._steps.is_on:
            return self._steps.explained(row) if window.step is None else replace(row, step=window.step)
        if found is None or self.examples is None:
            return _explained(row, self.why_not)
        self._note_pieces(row, has_examples=found.sums is not None)
        if found.sums is not None and (self._state == "examples" or row.n_pieces < 2):
            return replace(row, examples=found.sums)
        if self._state != "examples" and row.n_pieces >= 2:
            return row
        if not self._is_asked and self._covered.coverage is None and row.n_pieces >= 2:
            return row  # both mechanisms speak of the whole model
        why = self._in_words(found.why_not) if found.why_not else self.why_not
        if row.n_pieces < 2:
            return _explained(row, why)
        message = f"the window's single examples could not be used: {why or 'they were not read on all ranks'}"
        return row if row.problems else replace(row, problems=[Drop("no_examples", message)])

    def saw(self, window: MeasuredWindow, *, is_sound: bool, scale: float | None) -> None:
        """Note a window that was solved or dropped; compare the mechanisms where it allows both.

        Args:
            window: its numbers.
            is_sound: whether it was averaged.
            scale: κ of the last sound window.
        """
        found, row = window.examples, window.row
        if found is None or self.examples is None or self._state == "pieces":
            return
        if self._state == "trial":
            self._note_costs(window)
            if self._n_tried >= _LONGEST_TRIAL and not self._is_asked:
                self._give_up(f"{_LONGEST_TRIAL} windows did not allow a comparison with pieces")
        if found.sums is None:
            # A window that another problem spoils says nothing about its examples.
            self._n_failures += bool(found.why_not) and not row.problems
            if self._n_failures >= _IN_A_ROW and not self._is_asked:
                self._give_up(self._in_words(found.why_not))
            return
        self._n_failures = 0
        if not is_sound or scale is None:
            return
        self._covered.update(found.sums, row.pieces(sum(row.sq_norm_over_weight)), sum(row.sq_norm_big), scale=scale)
        self._say_coverage(found.covered)
        if self._state == "trial" and row.n_pieces >= 2:
            of_pieces = solve_window(row, scale=scale, n_ranks=self._n_ranks).total
            examples = solve_window(replace(row, examples=found.sums), scale=scale, n_ranks=self._n_ranks).total
            self._trial.of_pieces.append(of_pieces)
            self._trial.of_examples.append(examples)
            self._choose(row.n_pieces)

    def _note_pieces(self, row: WindowRow, *, has_examples: bool) -> None:
        """Begin the trial where windows have several pieces, and go back to examples where they no longer do."""
        if self._resumed_for is not None and row.n_pieces:
            if row.n_pieces != self._resumed_for:
                self._state, self.choice = "first", None
            self._resumed_for = None
        self._n_single = self._n_single + 1 if row.n_pieces == 1 else 0
        if self._state == "first" and row.n_pieces == 1 and has_examples:
            self._state, self.choice = "examples", ("examples", 1)
            self._tell("a window is a single piece, so the gradient of each of its examples is read")
        elif self._state == "first" and row.n_pieces >= 2:
            self._state = "trial"
        elif self._state in ("trial", "pieces") and self._n_single >= _IN_A_ROW and not self.why_not:
            self._state, self.choice = "examples", ("examples", 1)
            self._tell("windows are single pieces now, so the gradient of each of their examples is read")

    def _note_costs(self, window: MeasuredWindow) -> None:
        assert window.examples is not None
        times = window.examples.times
        self._n_tried += 1
        self._trial.seconds.append(max(window.costs.seconds - window.costs.idle_seconds - times.seconds, 0.0))
        longer = 0.0  # on a device that the host runs ahead of, its own time counts
        if times.n_with and times.n_without and not self._is_on_host:
            longer = (times.with_examples / times.n_with - times.without / times.n_without) * self._n_ranks
        if times.seconds > 0:
            self._trial.example_seconds.append(max(times.seconds, longer))
        if times.n_without:
            self._trial.durations.append(times.without / times.n_without * self._n_ranks)

    def _choose(self, n_pieces: int) -> None:
        if self._covered.coverage is not None:
            self._give_up(
                "they do not cover all parameters, and pieces do",
                "pieces are read from now on: single examples do not cover all parameters",
            )
            return
        if not self._trial.is_complete:
            return
        factor = self._trial.narrower_by()
        if factor > _WORTH_IT:
            self._state, self.choice = "examples", ("examples", n_pieces)
            self._tell(
                f"single examples are read from now on: the pieces' interval is {factor:.2g} times as wide at "
                "the same cost"
            )
        else:
            self._state, self.choice = "pieces", ("pieces", n_pieces)
            wide = f"{1 / factor:.2g} times as wide" if 0 < factor < 1 / _WORTH_IT else "no narrower"
            self._tell(f"pieces are read from now on: the interval of single examples is {wide} at the same cost")

    def _give_up(self, reason: str, said: str = "") -> None:
        # The hooks stay until the window ends: another thread may take in windows while backward runs.
        self._state, self.why_not, self.choice = "pieces", reason, None
        self._tell(said or f"single examples are not read: {reason}")

    def _tell(self, message: str) -> None:
        self._news.append(("", message))

    def _say_coverage(self, covered: Sequence[bool]) -> None:
        """Name the parameters that are not covered, once for each set of them."""
        mask = tuple(covered)
        if self._covered.coverage is None or mask == self._said_of or self._state == "trial":
            return
        self._said_of = mask
        missing = [name for name, is_covered in zip(self._names, mask, strict=True) if not is_covered]
        assert self.examples is not None
        named = [f"{name} ({self.examples.reasons.get(name, _UNSEEN)})" for name in missing]
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        message = f"the noise scale is {self._covered.coverage}; not covered: {', '.join(named[:_MOST_NAMED])}{more}"
        self._news.append(("not_covered", message))

    def _in_words(self, why_not: str) -> str:
        """Why the examples of a window cannot be used, with the first reason that the host knows of a parameter."""
        assert self.examples is not None
        if not (reason := next(iter(self.examples.reasons.values()), "")):
            return why_not
        return reason if why_not == NOTHING_COVERED else f"{why_not}: {reason}"


_UNSEEN = "it has a use that no rule has seen"


def _explained(row: WindowRow, why_not: str) -> WindowRow:
    """The row of a window; if it has a single piece, with the reason why its examples are not used."""
    if row.n_pieces != 1 or row.problems or not why_not:
        return row
    if why_not.endswith(SEVERAL_BACKWARDS):
        return replace(row, problems=[Drop("several_backwards", SEVERAL_BACKWARDS)])
    message = f"the window held a single piece, and its examples cannot be told apart: {why_not}. {WITHOUT_EXAMPLES}"
    return replace(row, problems=[Drop("single_piece", message)])


def _all_can(wrapper: Wrapper, *, can: bool) -> bool:
    """Whether all ranks can read examples: they must send vectors of one length."""
    if wrapper.group is None:
        return can
    answer = torch.tensor([float(can)], device="cpu").to(wrapper.leaves[0].device)
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=wrapper.group)
    return bool(answer.item())


def _made(model: nn.Module, wrapper: Wrapper, options: NoiseScaleOptions) -> tuple[ExampleWindow | None, str]:
    """What reads single examples; or None, and why they cannot be read."""
    if options.metrics != ("euclidean",):
        return None, f"metric={options.metric!r} needs whole gradients: use metric='euclidean'"
    if options.tap == "comm_hook":
        return None, "tap='comm_hook' reads whole windows: use tap='auto' or 'leaf'"
    shares_pieces = wrapper.data.n_sharing > 1 or wrapper.sequence_group is not None
    if wrapper.pp_mesh is not None or shares_pieces or wrapper.experts is not None:
        return None, f"a model cut by {wrapper.name} calls its layers with parts of examples or of parameters"
    try:
        window = ExampleWindow(
            model,
            wrapper.parameters,
            wrapper.leaves,
            staging_bytes=int(options.staging_mib * 2**20),
            rules=options.rules,
            is_sharded=wrapper.mesh is not None,
        )
        if len(window.without_rule) == len(wrapper.parameters):
            return None, "no layer of the model has a rule for them: pass rules= to attach, see sonde.PerExampleNorms"
        window.open()
        window.close()
    except ValueError as error:
        return None, str(error)
    return window, ""

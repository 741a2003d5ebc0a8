"""The noise scale of a model as it is now, at a checkpoint: windows without any update, until the interval is narrow.

The story of a measurement, from top to bottom: `measure` sees to it that nothing is changed; `_Measuring.run` goes from
window to window; `_Measuring._pieces` takes the pieces of one; the probe solves it, and the average of all windows
decides whether another one is needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.batch_size.batch_dim import units_in_batch
from sonde.batch_size.found_model import RanksOfModel
from sonde.batch_size.measured_model import MeasuredModel
from sonde.batch_size.probe import NoiseScaleProbe
from sonde.batch_size.setup import BATCH_NORM, Groups, NoiseScaleOptions, is_number, n_batch_norms
from sonde.batch_size.stats.averages import FixedWeights, window_lengths
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.console import tell
from sonde.parallel.process_groups import gather_objects
from sonde.parallel.refused_models import refuse_stage_alone
from sonde.parallel.wrappers import find_wrapper
from sonde.record_values import whole_number
from sonde.records import RunLog
from sonde.wording import duration, in_units, number, plural

LossOf = Callable[[Any, Any], Tensor]
"""Makes the mean loss of a batch, 0-dim with a graph, of the model and the batch."""
NumberOf = float | Callable[[Any], float]
"""A number that is the same for every batch, or a function of the batch."""
_FEWEST_WINDOWS = 12
"""Windows before a measurement may be precise enough: the scatter of fewer windows may be small by chance."""
_LONGEST_IN_16_BITS = 64
"""Pieces of a rank's window whose gradients are added up in 16 bits. Longer sums would round too much."""
_MOST_USELESS = 3
"""First windows that may all be unusable before that is an error."""
_SECONDS_BETWEEN_LINES = 5.0
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
Ending = Literal["precise", "data ended", "limit"]
"""Why a measurement ended: the interval is as narrow as was asked for, or there was no more to take."""


@dataclass(frozen=True)
class Measurement:
    """The noise scale of a model at fixed weights.

    Attributes:
        reading: the noise scale of the whole model and of each group, averaged over all windows.
        ended: why the measurement ended; None while it goes on.
        until: the precision that was asked for.
        n_units: units measured, on all ranks.
        n_batches: micro-batches measured, on all ranks.
        loss: mean loss over them, each with its weight; None before the first window.
        seconds: how long it took.
    """

    reading: NoiseScaleReading
    ended: Ending | None
    until: float
    n_units: float
    n_batches: int
    loss: float | None
    seconds: float

    @property
    def precision(self) -> float | None:
        """The distance of the interval's farther end from B_simple, over B_simple; None unless both ends are known."""
        return precision(self.reading.b_simple, self.reading.low, self.reading.high)

    def __str__(self) -> str:
        known, unit = self.reading, self.reading.unit
        text = f"B_simple not known ({known.reason})"
        if known.status != "unresolved":
            text = f"B_simple {in_units(known.b_simple, known.low, known.high, unit)}"
        if self.precision is not None:
            text += f", ± {100 * self.precision:.3g} %"
        return f"{text}, from {number(self.n_units)} {unit} in {duration(self.seconds)}{self._ending()}"

    def _ending(self) -> str:
        if self.ended is None or (self.ended == "precise" and self.precision is not None):
            return ""
        why = {"data ended": "the data ended", "limit": "the limit was reached", "precise": "the numbers are in doubt"}
        # The reason of a reading in doubt is its advice already.
        advice = f": {self.reading.advice}" if self.reading.advice else ""
        return f"; {why[self.ended]} before ± {100 * self.until:.3g} %{advice}"


def precision(b_simple: float | None, low: float | None, high: float | None) -> float | None:
    """The distance of an interval's farther end from B_simple, over B_simple; None unless both ends are known."""
    if not b_simple or low is None or high is None or math.isinf(high):
        return None
    return max(high / b_simple - 1.0, 1.0 - low / b_simple)


def measure(
    model: nn.Module,
    loss: LossOf,
    batches: Any,
    *,
    unit: str = "examples",
    units: NumberOf | None = None,
    weight: NumberOf | None = None,
    until: float = 0.1,
    most_batches: int | None = None,
    batch: float | None = None,
    groups: Groups = "blocks",
    process_group: dist.ProcessGroup | None = None,
    log: RunLog | None = None,
    on_window: Callable[[Measurement], object] | None = None,
    verbose: bool = True,
) -> Measurement:
    """Measure the gradient noise scale of a model as it is, without any update.

    Each micro-batch is a piece. The weights do not move, so all windows are averaged, and no drift widens the interval.
    A micro-batch should be small, down to one example, where that is not slower: tr Σ is known the
    better the more pieces there are, and |G|² does not depend on it.

    Windows hold 2, 4, 6, 8, … micro-batches, on all ranks together. |G|² comes from comparing each unit with the others
    of its window, so long windows know it better. The interval comes from the scatter of the windows, so it needs a
    dozen of them or more. Growing windows have both, however many units it takes, and need fewer of them than windows
    of one length.

    Nothing is changed: weights, `.grad` (which may hold accumulated gradients), buffers such as running statistics,
    random state, train or evaluation mode and `requires_grad` are bit for bit as before, also after an error. What is
    measured is the model in the mode that it is in: in train mode, dropout adds noise. While it is measured, the model
    needs memory for one more set of gradients and a copy of its buffers.

    Args:
        model: plain, compiled, wrapped in DDP, or cut by FSDP2 or tensor parallelism, with its final `requires_grad`.
            All ranks of a cut model call this together.
        loss: `loss(model, batch)` makes the mean loss of a batch, a tensor of no dims. Under DDP, `model` is the module
            inside, so that one function serves both.
        batches: micro-batches in random order: a DataLoader or another iterable. On several ranks each rank passes its
            own part, as a DistributedSampler deals it. Ranks may have different numbers of batches, of different sizes.
            A rank may have none. If the model itself communicates in every pass (FSDP2, SyncBatchNorm), all ranks
            stop with the first whose data end. Ranks that share a micro-batch by tensor
            parallelism pass the same batches.
        unit: plural name of the independent sample; results are in it.
        units: units in a batch, a number or a function of the batch; by default the rows of its tensors.
        weight: how much a batch counts in the average of the losses, likewise; by default its units. Pass the number of
            loss tokens where training divides the loss by the tokens of the whole step.
        until: stop when both ends of the 95 % interval are within this part of B_simple: 0.1 for ± 10 %.
        most_batches: stop after so many batches on each rank; None for all of them.
        batch: a batch size in units to judge: `sonde report` and the log show the verdict on it.
        groups: "blocks", "kinds", "parameters", None or a function from a parameter's name to its group's, as for
            `sonde.attach`.
        process_group: ranks that measure a plain model together, each with its own data.
        log: gets readings and alerts.
        on_window: called after each window with the measurement so far.
        verbose: print progress on standard error, on the first rank.

    Returns:
        The measurement. `reading` has the noise scale, its interval and its groups, and `ended` why it stopped.

    Raises:
        ValueError: for an argument out of its range; a model without trainable parameters; a loss that is not a tensor
            of no dims with a graph; fewer than two batches; gradients that cannot be used; ranks
            that were called differently. An error on one rank alone, as in its data, leaves its peers waiting, as in
            training.
        RuntimeError: when the loss changes the weights.

    Reference:
        McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> data = [(x, x[:, :1] + torch.randn(2, 1)) for x in torch.randn(2000, 2, 4)]
        >>> def loss(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().mean()
        >>> measurement = measure(model, loss, data, until=0.25, verbose=False)
        >>> measurement.ended, measurement.reading.status
        ('precise', 'resolved')
    """
    wrapper = find_wrapper(model, process_group)
    refuse_stage_alone(
        model, "sonde.measure takes whole models, so attach a probe with pp_mesh= while the pipeline trains"
    )
    if wrapper.experts is not None:
        raise ValueError(
            "sonde.measure does not read experts that are spread over ranks yet: attach a probe while the model "
            "trains, or measure with all experts on each rank"
        )
    target = MeasuredModel(model, wrapper)
    log = RunLog() if log is None else log
    options = partial(NoiseScaleOptions, unit, None, groups, per_example="never", every=1)

    def checked() -> dict[str, object]:
        """What must be the same on all ranks."""
        _check_arguments(loss, batches)
        check_limits(until, most_batches, batch)
        options()
        return {"unit": unit, "until": until, "most_batches": most_batches, "batch": batch}

    with target.left_as_it_is():
        of_ranks = gather_objects(wrapper.group, checked)
        if any(theirs != of_ranks[0] for theirs in of_ranks):
            raise ValueError(
                f"ranks must measure alike, got {of_ranks}: pass the same arguments on every rank, but for the data"
            )
        fixed, says, ranks = FixedWeights(batch), verbose and log.is_first_rank, RanksOfModel(target.group)
        counts_of = partial(_counts_of, units=units, weight=weight)
        with NoiseScaleProbe(
            target.module,
            None,
            options(),
            ranks=ranks,
            log=log,
            verbose=False,
            fixed_weights=fixed,
        ) as probe:
            for line in _beginning(model, target.parameters, n_ranks=target.n_ranks, unit=unit) if says else ():
                tell(line)
            own = islice(batches, most_batches)
            measuring = _Measuring(target, probe, fixed, loss, own, counts_of, until, target.written())
            told = [] if on_window is None else [on_window]
            measurement = measuring.run(most_batches, [*told, some_seconds_apart(tell)] if says else told)
            if says:
                tell(str(measurement))
            return measurement


def some_seconds_apart(say: Callable[[str], object]) -> Callable[[Measurement], None]:
    """A function for `on_window` that says the measurement so far, some seconds apart.

    Args:
        say: takes the words.
    """
    last = time.monotonic()

    def on_window(so_far: Measurement) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            say(str(so_far))

    return on_window


def _beginning(model: nn.Module, parameters: Sequence[Tensor], *, n_ranks: int, unit: str) -> Iterator[str]:
    """What is measured, line by line, for people.

    Args:
        model: as the user passed it.
        parameters: that are measured.
        n_ranks: that measure together.
        unit: plural name of the unit.
    """
    n_parameters = plural(sum(p.numel() for p in parameters), "trainable parameter")
    on_ranks = f", {n_ranks} ranks" if n_ranks > 1 else ""
    yield f"measuring {n_parameters} on {parameters[0].device}{on_ranks}, in {unit}"
    if n := sum(m.training and m.p > 0 for m in model.modules() if isinstance(m, _DROPOUTS)):
        layers = plural(n, "dropout layer")
        yield f"{layers} in train mode: this adds noise, as in training. model.eval() turns dropout off"
    if n := n_batch_norms(model):
        yield f"{plural(n, 'layer')}: {BATCH_NORM}"


def _check_arguments(loss: object, batches: object) -> None:
    if not callable(loss):
        raise ValueError(f"loss must be a function of the model and a batch, got {loss!r:.60}: lambda model, batch: …")
    if isinstance(batches, (str, bytes, Tensor)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches must be an iterable of micro-batches, got {type(batches).__name__}: pass a DataLoader or a "
            "list of batches"
        )


def check_limits(until: object, most_batches: object, batch: object) -> None:
    """Refuse arguments of `measure` that are out of their range.

    Raises:
        ValueError: naming the first.
    """
    if not (is_number(until) and 0 < until < 1):
        raise ValueError(f"until must be a part of B_simple between 0 and 1, got {until!r}: use 0.1 for ± 10 %")
    if most_batches is not None:
        whole_number("most_batches must be a whole number", most_batches, ": leave it out for all")
    if batch is not None and not (is_number(batch) and 0 < batch < math.inf):
        raise ValueError(f"batch must be a positive number of units, got {batch!r}: leave it out for no verdict")


def _counts_of(data: Any, *, units: NumberOf | None, weight: NumberOf | None) -> tuple[float, float]:
    """Units in a batch, and how much it counts in the average of the losses."""
    n_units = units(data) if callable(units) else units
    if n_units is None:
        n_units = units_in_batch(
            data, "pass units= a number, or a function of a batch that returns its number of units"
        )
    counts = weight(data) if callable(weight) else weight
    return n_units, n_units if counts is None else counts


def _loss_with_graph(loss_of: LossOf, module: nn.Module, data: Any) -> Tensor:
    """The loss of a batch.

    Raises:
        ValueError: when it is no mean that backward can begin at.
    """
    loss = loss_of(module, data)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point() or not loss.requires_grad:
        got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss(model, batch) must return a real tensor of no dims with a graph, got {got}: return the mean "
            "over the batch, such as output.loss, without torch.no_grad() and detach()"
        )
    return loss


@dataclass
class _Measuring:
    """One measurement.

    Attributes:
        target: what is measured.
        probe: attached to it.
        fixed: the averages that the probe adds to.
        loss: of a batch.
        batches: of this rank.
        counts_of: units and weight of a batch.
        until: the precision that is wanted.
        n_written: how often the weights had been written to.
        start: when it began.
        n_taken: micro-batches of this rank so far.
        n_windows: windows so far.
        sums: micro-batches, units, losses times weights, and weights, on all ranks.
    """

    target: MeasuredModel
    probe: NoiseScaleProbe
    fixed: FixedWeights
    loss: LossOf
    batches: Iterator[Any]
    counts_of: Callable[[Any], tuple[float, float]]
    until: float
    n_written: int
    start: float = field(default_factory=time.perf_counter)
    n_taken: int = 0
    n_windows: int = 0
    sums: Sequence[float] = (0.0, 0.0, 0.0, 0.0)

    def run(self, most_batches: int | None, told: Sequence[Callable[[Measurement], object]]) -> Measurement:
        """Measure windows until the interval is narrow, or nothing is left to measure.

        Args:
            most_batches: of this rank; None for all.
            told: called with the measurement after each window.
        """
        in_16_bits = any(p.dtype.itemsize == 2 for p in self.target.parameters)
        longest = _LONGEST_IN_16_BITS if in_16_bits else math.inf
        for length in window_lengths(self.target.n_data_ranks, longest=longest):
            n_pieces, *_ = sums = self.target.summed(self._pieces(length))
            if n_pieces < 2:  # what is left cannot be compared with anything
                break
            self.target.reduce_gradients()
            self._end_window(sums)
            if told:
                so_far = self._so_far(None)
                for each in told:
                    each(so_far)
            if self.target.on_all_ranks(here=self._is_precise()):
                return self._so_far("precise")
        if not self.n_windows:
            raise ValueError(
                f"a noise scale compares batches, and there was {'only one' if n_pieces else 'none'}: pass two or "
                "more, such as smaller batches of the same data, or a new iterator if this one was used before"
            )
        at_limit = self.target.on_all_ranks(here=self.n_taken == most_batches)
        return self._so_far("limit" if at_limit else "data ended")

    def _pieces(self, length: int) -> list[float]:
        """Take this rank's pieces of a window.

        Returns:
            What they add to the sums; zeros on a rank whose pieces another one counts.
        """
        rows, losses = [], []
        for _ in range(length):
            found = list(islice(self.batches, 1))
            if not self.target.in_step(here=bool(found)):
                break
            n_units, weight = self.counts_of(found[0])
            losses.append(self._piece(found.pop(), n_units, weight))  # so that its memory is freed
            rows.append((float(n_units), float(weight)))
        self.n_taken += len(rows)
        self.target.check_unwritten(self.n_written)
        if not rows or not self.target.counts_pieces:
            return [0.0] * len(self.sums)
        weighted = sum(float(loss) * weight for loss, (_, weight) in zip(losses, rows, strict=True))
        return [float(len(rows)), sum(n for n, _ in rows), weighted, sum(weight for _, weight in rows)]

    def _piece(self, data: Any, n_units: float, weight: float) -> Tensor:
        """Run one batch forward and backward; returns its loss, without a graph."""
        loss = _loss_with_graph(self.loss, self.target.module, data)
        # Rounded to the loss's dtype as backward rounds it, so that the piece counts exactly as its gradient does.
        rounded = torch.tensor(float(weight), dtype=loss.dtype, device="cpu").item()
        with self.probe.piece(units=n_units, weight=rounded):
            loss.backward(gradient=torch.full_like(loss, rounded))
        return loss.detach()

    def _end_window(self, sums: Sequence[float]) -> None:
        _, _, weighted, weights = sums
        self.sums = [before + more for before, more in zip(self.sums, sums, strict=True)]
        self.probe.log(loss=weighted / weights)
        self.probe.step()
        self.target.zero_grad()
        solved = self.probe.window()
        self.n_windows += 1
        if solved is None and self.n_windows == _MOST_USELESS and not self.fixed.n_windows:
            dropped = self.probe.reading().dropped
            raise ValueError(f"no window can be measured: {max(dropped, key=dropped.__getitem__)}")

    def _is_precise(self) -> bool:
        total = self.fixed.total()
        reached = precision(total.b_simple, total.low, total.high)
        return self.fixed.n_windows >= _FEWEST_WINDOWS and reached is not None and reached <= self.until

    def _so_far(self, ended: Ending | None) -> Measurement:
        n_batches, n_units, weighted, weights = self.sums
        return Measurement(
            reading=self.probe.reading(),
            ended=ended,
            until=self.until,
            n_units=n_units,
            n_batches=round(n_batches),
            loss=weighted / weights if weights else None,
            seconds=time.perf_counter() - self.start,
        )

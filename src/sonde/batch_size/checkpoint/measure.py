"""The noise scale of a model as it is now, at a checkpoint: windows without any update, until the interval is narrow.

The story of a measurement, from top to bottom: `measure` sees to it that nothing is changed; `_Measuring.run` goes from
window to window; `_Measuring.window` takes the pieces of one; the ranks agree, the probe solves it, and the average of
all windows decides whether another one is needed.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.batch_size.checkpoint.batches import (
    CountedBatch,
    LossOf,
    MeasuredBatches,
    NumberOf,
    check_finite,
    checked_loss,
)
from sonde.batch_size.checkpoint.measurement import Ending, Measurement, Progress, precision
from sonde.batch_size.checkpoint.model import MeasuredModel
from sonde.batch_size.checkpoint.ranks import WindowTotals
from sonde.batch_size.parameter_groups import Groups, group_names
from sonde.batch_size.probe import NoiseScaleProbe
from sonde.batch_size.setup import NoiseScaleOptions, is_number
from sonde.batch_size.stats.fixed_weights import FixedWeights, window_lengths
from sonde.parallel.parameter_roles import parameter_roles
from sonde.parallel.refused_models import refuse_stage_alone
from sonde.parallel.stages import model_parameters
from sonde.parallel.wrappers import Wrapper, find_wrapper
from sonde.record_values import whole_number
from sonde.records import RunLog

_FEWEST_WINDOWS = 12
"""Windows before a measurement may be precise enough: the scatter of fewer windows may be small by chance."""
_LONGEST_IN_16_BITS = 64
"""Pieces of a rank's window whose gradients are added up in 16 bits. Longer sums would round too much."""
_MOST_USELESS = 3
"""First windows that may all be unusable before that is an error."""


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
            A rank may have none. If the model itself communicates in every pass (FSDP2, SyncBatchNorm, DDP inside
            another module), all ranks stop with the first whose data end. Ranks that share a micro-batch by tensor
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
        ValueError: for an argument out of its range; a model without trainable parameters; a loss
            that is not a finite tensor of no dims with a graph; fewer than two batches; gradients that cannot be used;
            ranks that were called differently.
        RuntimeError: when the loss changes the weights; when another rank failed.

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
    with target.left_as_it_is():
        failure: Exception | None = None
        facts: dict[str, object] = {"unit": unit, "until": until, "most_batches": most_batches, "batch": batch}
        weight_of_first = 0.0
        try:
            _check_options(loss, until, most_batches, batch)
            options = NoiseScaleOptions(
                unit=unit, units_per_piece=None, groups=groups, tap="leaf", per_example="never", every=1
            )
            facts["digest of the names of parameters and groups"] = _digest(model, wrapper, groups)
            source = MeasuredBatches(batches, units=units, weight=weight, most=most_batches)
            if (first := source.peek()) is not None:
                weight_of_first = first.weight
        except Exception as error:  # raised on all ranks together
            failure = error
        weights = target.ranks.compare(facts, weight_of_first, failure)
        if not any(weights):
            raise ValueError(
                "batches gave no batch: pass data, or a new iterator if this one was used before, such as the "
                "DataLoader itself"
            )
        fixed = FixedWeights(batch)
        with NoiseScaleProbe(
            target.module, None, options, process_group=target.group, log=log, verbose=False, fixed_weights=fixed
        ) as probe:
            says = verbose and log.is_first_rank
            progress = Progress(model, target.parameters, n_ranks=target.ranks.n, says=says, unit=unit)
            return _Measuring(target, probe, fixed, loss, source, until, max(weights)).run(progress, on_window)


def _digest(model: nn.Module, wrapper: Wrapper, groups: Groups) -> str:
    whole = model_parameters(wrapper.parameters, parameter_roles(model, wrapper.parameters), None)
    names = [*whole.names, *group_names(groups, whole)]
    return hashlib.sha256(repr(names).encode()).hexdigest()[:12]


def _check_options(loss: object, until: object, most_batches: object, batch: object) -> None:
    if not callable(loss):
        raise ValueError(f"loss must be a function of the model and a batch, got {loss!r:.60}: lambda model, batch: …")
    if not (is_number(until) and 0 < until < 1):
        raise ValueError(f"until must be a part of B_simple between 0 and 1, got {until!r}: use 0.1 for ± 10 %")
    if most_batches is not None:
        whole_number("most_batches must be a whole number", most_batches, ": leave it out for all")
    if batch is not None and not (is_number(batch) and 0 < batch < math.inf):
        raise ValueError(f"batch must be a positive number of units, got {batch!r}: leave it out for no verdict")


class _Measuring:
    """One measurement.

    Args:
        target: what is measured.
        probe: attached to it.
        fixed: the averages that the probe adds to.
        loss: of a batch.
        source: this rank's batches.
        until: the precision that is wanted.
        usual_weight: that weights are divided by, so that losses keep their size; the same on all ranks.
    """

    def __init__(
        self,
        target: MeasuredModel,
        probe: NoiseScaleProbe,
        fixed: FixedWeights,
        loss: LossOf,
        source: MeasuredBatches,
        until: float,
        usual_weight: float,
    ) -> None:
        self._target, self._ranks, self._probe, self._fixed = target, target.ranks, probe, fixed
        self._loss, self._source, self._until, self._usual_weight = loss, source, until, usual_weight
        self._start = time.perf_counter()
        self._n_written = target.written()
        self._n_windows = self._n_batches = 0
        self._n_units = self._sum_of_losses = self._sum_of_weights = 0.0

    def run(self, progress: Progress, on_window: Callable[[Measurement], object] | None) -> Measurement:
        """Measure windows until the interval is narrow, or nothing is left to measure."""
        progress.begin()
        in_16_bits = any(p.dtype.itemsize == 2 for p in self._target.parameters)
        for length in window_lengths(
            self._target.n_data_ranks, longest=_LONGEST_IN_16_BITS if in_16_bits else math.inf
        ):
            totals = self._window(length)
            if totals.n_pieces < 2:  # what is left cannot be compared with anything
                return self._finish(self._ending_without_data(), progress)
            self._end_window(totals)
            if on_window is not None or progress.is_due():
                so_far = self._so_far(None)
                progress.window(so_far)
                if on_window is not None:
                    on_window(so_far)
            if self._ranks.agree(on_all=self._is_precise()):
                return self._finish("precise", progress)
        raise AssertionError("window lengths never end")

    def _window(self, length: int) -> WindowTotals:
        """Take the pieces of a window. If a rank fails, all raise."""
        failure: Exception | None = None
        losses: list[tuple[CountedBatch, Tensor]] = []
        try:
            while len(losses) < length and (batch := self._take()) is not None:
                losses.append((replace(batch, data=None), self._piece(batch)))  # so that its memory is freed
            check_finite(losses)
            self._ranks.check_gradients()
            if not self._target.in_step and self._target.written() != self._n_written:
                raise RuntimeError(
                    "the weights changed while they were measured: leave optimizer steps and other updates out of "
                    "loss() and of hooks"
                )
        except Exception as error:
            failure = error
        numbers = [0.0, 0.0, 0.0]
        if failure is None and losses:
            weighted = [float(loss) * batch.weight for batch, loss in losses]
            weights, n_units = [batch.weight for batch, _ in losses], [batch.n_units for batch, _ in losses]
            numbers = [math.fsum(n_units), math.fsum(weighted), math.fsum(weights)]
        totals = self._ranks.end_window(len(losses), numbers, failed=failure is not None)
        if failure is not None:
            raise failure
        if totals.n_failed:
            raise RuntimeError(f"{totals.n_failed} other ranks failed while measuring: see their errors")
        return totals

    def _take(self) -> CountedBatch | None:
        """The next batch of this rank; None where none is left or, if ranks go in step, where any rank has none."""
        if not self._target.in_step:
            return self._source.take()
        has_one = False
        try:
            has_one = self._source.peek() is not None
        finally:  # a rank whose data fail takes part too
            all_have_one = self._ranks.agree(on_all=has_one)
        return self._source.take() if all_have_one else None

    def _piece(self, batch: CountedBatch) -> Tensor:
        """Run one batch forward and backward.

        Returns:
            Its loss, without a graph.
        """
        loss = self._loss_of(batch)
        # Rounded to the loss's dtype as backward rounds it, so that the piece counts exactly as its gradient does.
        weight = torch.tensor(batch.weight / self._usual_weight, dtype=loss.dtype, device="cpu").item()
        with self._probe.piece(units=batch.n_units, weight=weight):
            if weight == 1.0:
                loss.backward()
            else:
                loss.backward(gradient=torch.full_like(loss, weight))
        return loss.detach()

    def _loss_of(self, batch: CountedBatch) -> Tensor:
        """The loss of a batch. Where backward communicates, it begins only if all ranks have one."""
        if not self._target.in_step:
            return checked_loss(self._loss(self._target.module, batch.data), batch)
        loss = None
        try:
            loss = checked_loss(self._loss(self._target.module, batch.data), batch)
        finally:  # a rank whose loss fails takes part too
            all_have_one = self._ranks.agree(on_all=loss is not None)
        if not all_have_one:
            raise RuntimeError("another rank failed while measuring: see its error")
        return loss

    def _end_window(self, totals: WindowTotals) -> None:
        self._ranks.sum_gradients(totals)
        self._target.check_reduced(totals.has_gradient)
        n_units, weighted, weights = totals.sums
        self._n_units += n_units
        self._n_batches += totals.n_pieces
        self._sum_of_losses += weighted
        self._sum_of_weights += weights
        self._probe.log(loss=weighted / weights)
        self._probe.step()
        self._target.zero_grad()
        solved = self._probe.window()
        self._n_windows += 1
        if solved is None and self._n_windows == _MOST_USELESS and not self._fixed.n_windows:
            dropped = self._probe.reading().dropped
            raise ValueError(f"no window can be measured: {max(dropped, key=dropped.__getitem__)}")

    def _is_precise(self) -> bool:
        total = self._fixed.total()
        reached = precision(total.b_simple, total.low, total.high)
        return self._fixed.n_windows >= _FEWEST_WINDOWS and reached is not None and reached <= self._until

    def _ending_without_data(self) -> Ending:
        if self._n_windows == 0:
            raise ValueError(
                "a noise scale compares batches, and there was only one: pass two or more, such as smaller batches of "
                "the same data"
            )
        return "limit" if self._ranks.agree(on_all=self._source.reached_most) else "data ended"

    def _finish(self, ended: Ending, progress: Progress) -> Measurement:
        measurement = self._so_far(ended)
        progress.end(measurement)
        return measurement

    def _so_far(self, ended: Ending | None) -> Measurement:
        return Measurement(
            reading=self._probe.reading(),
            ended=ended,
            until=self._until,
            n_units=self._n_units,
            n_batches=self._n_batches,
            loss=self._sum_of_losses / self._sum_of_weights if self._sum_of_weights else None,
            seconds=time.perf_counter() - self._start,
        )

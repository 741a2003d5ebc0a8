"""A noise-scale probe that a trainer's events drive, and that is never the reason why a training stops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from sonde.batch_size.attach import attach
from sonde.batch_size.probe import NoiseScaleProbe
from sonde.batch_size.setup import NoiseScaleOptions
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.batch_size.units import unit_names
from sonde.console import tell
from sonde.integrations.on_error import OnError, checked_on_error
from sonde.parallel.optimizers import Optimizers
from sonde.records import LogOrPlaces, log_of, logger

_PARTNERS = ("comm_hook", "comm_state", "cp_mesh", "expert_mesh", "mesh", "pp_mesh", "process_group")
"""Arguments of `sonde.attach` that are not in `NoiseScaleOptions`."""
_NO_PROPER_END = "the log of the noise scale has no proper end"
_Pieces = Callable[[NoiseScaleProbe, Mapping[str, Any]], AbstractContextManager[None]]
"""Given the probe and counts, it returns the context of a piece or of several."""
_NOT_MEASURED = "a micro-batch is not measured, so its window is left out"
_WINDOW_NOT_MEASURED = "a window is not measured"
LOGGED = (
    "gns/b_simple",
    "gns/b_simple_low",
    "gns/b_simple_high",
    "gns/b_simple_average",
    "gns/grad_sq",
    "gns/trace_cov",
    "gns/units_per_window",
)
"""What trainers' own logs get, which many print whole. The log of the run has all metrics."""


class Counts(TypedDict, total=False):
    """The arguments of `NoiseScaleProbe.piece`."""

    units: float | Tensor | Mapping[str, float | Tensor]
    weight: float | Tensor
    unit_weights: Tensor


def as_counts(units: Any, weight: float | Tensor | None = None) -> Counts:
    """The counts of a piece by what a user's function has returned.

    Args:
        units: a number or 0-dim tensor, one for each name, or the weight of each unit, [units].
        weight: of the piece in the loss; None where all weigh the same.

    Raises:
        ValueError: for a function that has returned nothing.
    """
    if units is None:
        raise ValueError("units= has returned None for a batch: it must return the number of its units")
    counts: Counts = {"unit_weights": units} if isinstance(units, Tensor) and units.dim() else {"units": units}
    if weight is not None:
        counts["weight"] = weight
    return counts


class TrainerProbe:
    """A `NoiseScaleProbe` for as long as a trainer trains.

    An error of the probe is logged, and the training goes on without the probe, or without that window.

    Args:
        options: of `sonde.attach`, by name; `unit` is one of them.
        units: the user's function that counts the units, if there is one.
        weight: the user's function that weighs a micro-batch, if there is one.
        log: of the run, or what `RunLog` takes; None for none. One that is given ends with the first training.
        backward: the method that runs each backward of a piece, as the user calls it; None if the trainer calls it.
        on_error: "warn" logs errors of the probe; "raise" raises them.
        verbose: print the set-up that was found, and the reading when training ends, on rank 0.

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for an option outside its range, or a `log` that takes no records.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        units: Callable[..., Any] | None = None,
        weight: Callable[..., Any] | None = None,
        log: LogOrPlaces = None,
        backward: str | None = None,
        on_error: OnError = "warn",
        verbose: bool = True,
    ) -> None:
        if units is not None and not callable(units):
            raise ValueError(f"units must be a function of a batch, got {units!r:.60}: as units=lambda batch: 8")
        if weight is not None and not callable(weight):
            raise ValueError(f"weight must be a function of a batch, got {weight!r:.60}: as weight=lambda batch: 2.0")
        of_options = {name: value for name, value in options.items() if name not in _PARTNERS}
        names = unit_names(NoiseScaleOptions(**of_options, units_per_piece=None).unit)  # each piece is counted here
        if len(names) > 1 and units is None:
            raise ValueError(
                f"a batch is counted in one unit, got unit={names}: pass units=, a function that returns a number for "
                "each of them by name"
            )
        self.probe: NoiseScaleProbe | None = None
        self._options, self._log, self._run_log = dict(options), log, log_of(log)
        self._last: NoiseScaleReading | None = None
        self._final_state: dict[str, Any] | None = None
        self._unused: Counts = {"units": 1 if len(names) == 1 else dict.fromkeys(names, 1)}
        """The counts of a piece in windows that are not measured."""
        self._n_entered = 0
        """Pieces that have begun in the present window."""
        self.backward = backward
        self._why_none: str | None = None
        """Why windows could not be ended so far, if none was."""
        self._on_error, self._verbose = checked_on_error(on_error), verbose
        self._said: set[str] = set()

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        state: Mapping[str, Any] | None = None,
        refused: str | None = None,
    ) -> None:
        """Attach the probe to the model as the trainer calls it. All ranks call this together.

        Args:
            model: in its wrapper.
            optimizer: of the model; or several in a list.
            grad_scaler: in use.
            state: of a checkpoint, to continue from.
            refused: why this trainer cannot be measured, the same on all ranks; None if it can.
        """
        self.end("training began again")
        with self.forgiven("this training is not measured"):
            if refused is not None:
                raise ValueError(refused)
            self._run_log = log_of(self._log)
            self.probe = attach(
                model,
                optimizer,
                **self._options,
                units_per_piece=None,
                grad_scaler=grad_scaler,
                log=self._run_log,
                verbose=self._verbose,
            )
        if state is not None:
            self.resume(state)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with the averages of a checkpoint."""
        if self.probe is not None:
            with self.forgiven("the averages of the checkpoint are not used, and begin anew"):
                self.probe.load_state_dict(state)

    def piece(self, count: Callable[[], Counts]) -> AbstractContextManager[None]:
        """A context around the backward of one micro-batch.

        Args:
            count: called in measured windows only, it returns the piece's units and weights.
        """
        return self._around(lambda probe, counts: probe.piece(**counts), count)

    def pieces(self, n: int, count: Callable[[], Mapping[str, Any]]) -> AbstractContextManager[None]:
        """A context around the step of a pipeline schedule.

        Args:
            n: the schedule's micro-batches.
            count: called in measured windows only, it returns their units and weights, as `NoiseScaleProbe.pieces`
                takes them.
        """
        return self._around(lambda probe, counts: probe.pieces(n, **counts), count, n)

    @contextlib.contextmanager
    def _around(self, pieces: _Pieces, count: Callable[[], Mapping[str, Any]], n: int | None = None) -> Iterator[None]:
        entered = None if self.probe is None else self._entered(self.probe, pieces, count, n)
        try:
            yield
        except BaseException as error:  # of the training
            if entered is not None:
                with self.forgiven(_NOT_MEASURED):
                    entered.__exit__(type(error), error, error.__traceback__)
            raise
        if entered is not None:
            with self.forgiven(_NOT_MEASURED):
                entered.__exit__(None, None, None)

    def _entered(
        self, probe: NoiseScaleProbe, pieces: _Pieces, count: Callable[[], Mapping[str, Any]], n: int | None
    ) -> AbstractContextManager[None] | None:
        """The context of a piece, entered; None if the probe refuses it."""
        self._n_entered += 1
        with self.forgiven(_NOT_MEASURED):
            context = pieces(probe, count() if probe.measures_now else self._unused)
            context.__enter__()
            return context
        with self.forgiven(_NOT_MEASURED):
            context = probe.uncounted(n)
            context.__enter__()
            return context
        return None

    def end_window(self) -> None:
        """The optimizer is about to step."""
        if (probe := self.probe) is not None:
            with self.forgiven(_WINDOW_NOT_MEASURED), self._ending(probe):
                probe.step()

    def zeroed(self) -> None:
        """Gradients are zeroed. Where no step came first, the pieces before do not count."""
        if (probe := self.probe) is not None and self._n_entered:
            self._n_entered = 0
            with self.forgiven(_WINDOW_NOT_MEASURED):
                probe.discard()

    def clip(
        self,
        clip_alone: Callable[[], Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip and end the window in one collective. The other arguments are those of torch's function.

        Args:
            clip_alone: clips in the same way, where nothing is measured or the probe raises an error.

        Raises:
            RuntimeError: if the norm is not finite and `error_if_nonfinite` is set.
        """
        if (probe := self.probe) is not None:
            with self.forgiven(_WINDOW_NOT_MEASURED), self._ending(probe):
                return probe.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        return clip_alone()

    def log(self, **scalars: float | Tensor) -> None:
        """Give scalars of the present window to the log of the run: see `NoiseScaleProbe.log`."""
        if self.probe is not None:
            with self.forgiven("the log of the run lacks what the trainer logs"):
                self.probe.log(**scalars)

    def metrics(self) -> Mapping[str, float]:
        """Those of `LOGGED` that are known now, for the trainer's own logs. Waits for the device."""
        if self.probe is not None:
            with self.forgiven("the trainer's log lacks the noise scale"):
                known = self.probe.metrics(known_only=True)
                return {name: known[name] for name in LOGGED if name in known}
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """The averages so far, for a checkpoint, also after training; None if nothing is measured."""
        if self.probe is None:
            return self._final_state
        with self.forgiven("the checkpoint lacks the averages of the noise scale"):
            return self.probe.state_dict()
        return None

    def reading(self) -> NoiseScaleReading | None:
        """The present reading, or the last one of a training that has ended. Waits for the device."""
        return self._last if self.probe is None else self._read(self.probe)

    def end(self, reason: str) -> None:
        """Close the probe, and print its last reading."""
        probe, self.probe = self.probe, None
        if probe is None:
            return
        with self.forgiven(_NO_PROPER_END):
            self.keep(probe)
            probe.close(reason)

    def fail(self, error: BaseException) -> None:
        """Close the probe after an error of the training, Ctrl-C among them, and print its last reading.

        Ranks that may be gone are not waited for.
        """
        probe, self.probe = self.probe, None
        if probe is not None:
            with self.forgiven(_NO_PROPER_END):
                probe.__exit__(type(error), error, error.__traceback__)
                self.keep(probe)

    def keep(self, probe: NoiseScaleProbe) -> None:
        """Keep the last reading and state of a probe whose training has ended, and print the reading."""
        self._last, self._final_state = self._read(probe), probe.state_dict()
        if self._verbose and self._run_log.is_first_rank:
            tell(str(self._last))

    def _read(self, probe: NoiseScaleProbe) -> NoiseScaleReading:
        """The probe's reading; where no window could be ended, with the reason."""
        reading = probe.reading()
        if self._why_none is not None and not reading.windows:
            return replace(reading, reason=self._why_none)
        return reading

    def say_once(self, text: str) -> None:
        """Print a sentence about what was found, on rank 0."""
        if self._verbose and self._run_log.is_first_rank and text not in self._said:
            self._said.add(text)
            tell(text)

    @contextlib.contextmanager
    def _ending(self, probe: NoiseScaleProbe) -> Iterator[None]:
        """Forget the window if ending it fails: the next one begins anew."""
        is_bare = probe.measures_now and self._n_entered == 0 and self.backward is not None
        self._n_entered = 0
        # The probe's own words are those of its loop. Where other ranks would wait, it drops the window instead.
        no_backward = f"no backward of the window went through {self.backward}: use it for each backward"
        try:
            yield
        except Exception as error:
            probe.discard()
            self._why_none = str(error)
            if is_bare and isinstance(error, RuntimeError):
                self._why_none = no_backward
                raise RuntimeError(no_backward) from error
            raise
        if is_bare:
            self._log_once(f"{_WINDOW_NOT_MEASURED}: {no_backward}")

    @contextlib.contextmanager
    def forgiven(self, consequence: str) -> Iterator[None]:
        """Log an error once, unless errors are to be raised."""
        try:
            yield
        except Exception as error:
            if self._on_error == "raise":
                raise
            self._log_once(f"{consequence}: {type(error).__name__}: {error}")

    def _log_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.error("sonde: %s", text)

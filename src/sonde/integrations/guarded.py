"""What all trainers share: a probe that never stops a training, methods that are wrapped, and tested versions."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from sonde.batch_size.attach import attach
from sonde.batch_size.last_words import said_at_end
from sonde.batch_size.probe import NoiseScaleProbe
from sonde.batch_size.setup import NoiseScaleOptions
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.batch_size.units import unit_names
from sonde.console import tell
from sonde.gradient_norm.clip import clip_grad_norm_
from sonde.integrations.own_norms import FUNCTIONS
from sonde.parallel.placements import is_partial
from sonde.parallel.unwrap import Optimizers
from sonde.record_values import known
from sonde.records import LogOrPlaces, log_of, logger
from sonde.version import is_within

OnError = Literal["warn", "raise"]
"""What becomes of an error of the probe, once it is attached."""
Counts = dict[str, Any]
"""The arguments of `NoiseScaleProbe.piece`."""
T = TypeVar("T")
_Context = contextlib.AbstractContextManager[None]

_PARTNERS = ("cp_mesh", "expert_mesh", "mesh", "pp_mesh", "process_group", "trainer")
"""Arguments of `sonde.attach` that are not in `NoiseScaleOptions`."""
_NOT_MEASURED = "a micro-batch is not measured, so its window is left out"
_WINDOW_NOT_MEASURED = "a window is not measured"
_NAMES = ("b_simple", "b_simple_low", "b_simple_high", "b_simple_average", "grad_sq", "trace_cov", "units_per_window")
LOGGED = tuple(f"gns/{name}" for name in _NAMES)
"""What trainers' own logs get, which many print whole. The log of the run has all metrics."""

_MARK = "is_wrapped_by_sonde"
"""Attribute of a wrapper."""


def as_counts(units: Any) -> Counts:
    """The counts of a piece by what a user's function has returned.

    Args:
        units: a number or 0-dim tensor, one for each name, or the weight of each unit, [units].

    Raises:
        ValueError: for a function that has returned nothing.
    """
    if units is None:
        raise ValueError("units= has returned None for a batch: it must return the number of its units")
    return {"unit_weights" if isinstance(units, Tensor) and units.dim() else "units": units}


class GuardedProbe:
    """A trainer's probe: a `NoiseScaleProbe` for as long as the trainer trains.

    An error of the probe is logged, and the training goes on without the probe, or without that window. A subclass for
    each trainer knows when a training begins and ends, and how its batches are counted.

    Args:
        options: of `sonde.attach`, by name; `unit` is one of them.
        units: the user's function that counts the units, if there is one.
        weight: the user's function that weighs a micro-batch, if there is one.
        log: of the run, or what `RunLog` takes; None for none. One that is given ends with the first training.
        on_error: "warn" logs errors of the probe; "raise" raises them.
        verbose: print the set-up that was found, and the reading when training ends, on rank 0.

    Attributes:
        probe: while it measures.
        reads_parts: whether the trainer logs its own rank's part of a norm that is still to be summed over ranks.
        backward: the method that must run each backward of a piece, as the user calls it; None if the trainer calls it.
        undo: leaves the trainer as it was.

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
        on_error: OnError = "warn",
        verbose: bool = True,
    ) -> None:
        of_options = {name: value for name, value in options.items() if name not in _PARTNERS}
        names = unit_names(NoiseScaleOptions(**of_options, units_per_piece=None).unit)
        if len(names) > 1 and units is None:
            raise ValueError(
                f"a batch is counted in one unit, got unit={names}: pass units=, a function that returns a number for "
                "each of them by name"
            )
        self.probe: NoiseScaleProbe | None = None
        self.units, self.weight = units, weight
        self.reads_parts = False
        self.backward: str | None = None
        self.undo = contextlib.ExitStack()
        self._options = {"units_per_piece": None, "verbose": verbose, **options}
        self._places, self._run_log = log, log_of(log)
        self._on_error, self._verbose = checked_on_error(on_error), verbose
        self._last: NoiseScaleReading | None = None
        self.said_at_end: Sequence[str] = ()
        """See `last_words.said_at_end`; of a training that has ended."""
        self._final_state: dict[str, Any] | None = None
        self._n_windows = 0
        self._is_open = self._has_pieces = self._is_clipped = False
        """Whether a piece goes on; whether the present window has pieces; whether a clip has ended it."""
        self._why_none: str | None = None
        """Why windows could not be ended so far, if none was."""
        self._said: set[str] = set()

    def begin(
        self, model: nn.Module, optimizer: Optimizers, *, state: Any = None, refused: str = "", **more: Any
    ) -> None:
        """Attach the probe to the model as the trainer calls it. All ranks call this together.

        Args:
            model: in its wrapper.
            optimizer: of the model; or several in a list.
            state: of a checkpoint, to continue from; None without one.
            refused: why this trainer cannot be measured, the same on all ranks; empty if it can.
            **more: arguments of `sonde.attach`, such as `units_per_piece` where backwards are no `piece`.
        """
        self.end("training began again")
        with self.forgiven("this training is not measured"):
            if refused:
                raise ValueError(refused)
            self._run_log = log_of(self._places)
            self.probe = attach(model, optimizer, log=self._run_log, **(self._options | more))
        if state is not None:
            self.resume(state)

    def counts(self, by_default: Callable[..., Any], *batch: Any, **named: Any) -> Counts:
        """The counts of a micro-batch by the user's functions, which are called with the other arguments.

        Args:
            by_default: counts the units where the user does not.
            *batch: the micro-batch, or what the model is called with.
            **named: likewise.

        Raises:
            ValueError: for a function that has returned nothing.
        """
        counts = as_counts((self.units or by_default)(*batch, **named))
        return counts if self.weight is None else {**counts, "weight": self.weight(*batch, **named)}

    @contextlib.contextmanager
    def piece(self, count: Callable[[], Counts], n: int | None = None) -> Iterator[None]:
        """A context around the backwards of one micro-batch; inside another one it does nothing.

        Args:
            count: called in measured windows only, it returns the piece's units and weights.
            n: for a step of a pipeline schedule, its micro-batches. `count` then returns what `NoiseScaleProbe.pieces`
                takes.
        """
        if self.probe is None or self._is_open:
            yield
            return
        self._has_pieces, self._is_clipped = True, False
        entered, error = self._entered(self.probe, count, n), None
        self._is_open = True
        try:
            yield
        except BaseException as of_training:
            error = of_training
            raise
        finally:
            self._is_open = False
            with self.forgiven(_NOT_MEASURED):
                entered.__exit__(type(error) if error else None, error, None)

    def _entered(self, probe: NoiseScaleProbe, count: Callable[[], Counts], n: int | None) -> _Context:
        """The context of a piece, entered."""
        with self.forgiven(_NOT_MEASURED):
            if probe.measures_now:
                counts = count()
                piece = probe.piece(**counts) if n is None else probe.pieces(n, **counts)
                piece.__enter__()
                return piece
        with self.forgiven(_NOT_MEASURED):
            piece = probe.uncounted(n)
            piece.__enter__()
            return piece
        return contextlib.nullcontext()

    def step(self) -> None:
        """End the window, before or right after the optimizer's step, unless the step or the clip has ended it.

        A GradScaler may leave out a step, where gradients are cut over ranks on some ranks alone, and all ranks must
        end the same windows.
        """
        is_clipped, self._is_clipped = self._is_clipped, False
        if not is_clipped:
            self._end_window(lambda probe: probe.step())

    def clip(self, parameters: Any, max_norm: float, norm_type: float = 2, **options: Any) -> Tensor:
        """Clip by sonde's norm. Where a window is measured, the same collective ends it.

        Args:
            parameters: all that the optimizer holds, as for `sonde.clip_grad_norm_`, as are the others.
            max_norm: likewise.
            norm_type: likewise.
            **options: likewise.

        Raises:
            RuntimeError: if the norm is not finite and `error_if_nonfinite` is set.
        """
        norm, is_first, self._is_clipped = None, not self._is_clipped, True
        if is_first:
            raises = options.get("error_if_nonfinite", False)
            norm = self._end_window(lambda probe: probe.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=raises))
        return clip_grad_norm_(parameters, max_norm, norm_type, **options) if norm is None else norm

    def watch_norms(self) -> contextlib.AbstractContextManager[object]:
        """A context in which norms that the trainer takes of all gradients, by torch's functions, are noted."""
        if self.probe is None or not self.probe.measures_now:
            return contextlib.nullcontext()
        wrappers = {name: functools.partial(calls, self.note_norm) for name, calls in FUNCTIONS.items()}
        return WrappedMethods(torch.nn.utils, **wrappers)

    def watched(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps a method of a trainer that clips: see `watch_norms`."""
        with self.watch_norms():
            return original(*args, **kwargs)

    def note_norm(self, tensors: Sequence[Tensor], norm: Tensor, max_norm: float | None) -> bool:
        """Note the norm of these parameters or gradients, and a clip by it. Returns whether they are all there are.

        A norm that is partial may still be summed over ranks by the trainer, unless it `reads_parts`.
        """

        def note(probe: NoiseScaleProbe) -> bool:
            is_whole = probe.takes_all(tensors)
            if is_whole and (self.reads_parts or not is_partial(norm)):
                probe.note_clip(norm, max_norm)
            return is_whole

        return bool(self._try("the trainer's own norm is not in the log", note))

    def zeroed(self) -> None:
        """Gradients are zeroed. Where no step came first, the pieces before do not count."""
        self._has_pieces = self._is_clipped = False
        self._try(_WINDOW_NOT_MEASURED, lambda probe: probe.discard())

    def _end_window(self, end: Callable[[NoiseScaleProbe], T]) -> T | None:
        if self.backward and not self._has_pieces and self.probe is not None and self.probe.measures_now:
            self._why_none = f"no backward of the window went through {self.backward}: use it for each backward"
            with self.forgiven(_WINDOW_NOT_MEASURED):
                raise RuntimeError(self._why_none)
            self.probe.discard()  # or the probe names the backwards that it saw, in words of its own loop
        self._has_pieces = False
        return self._try(_WINDOW_NOT_MEASURED, end)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with the averages of a checkpoint."""
        begin_anew = "the averages of the checkpoint are not used, and begin anew"
        self._try(begin_anew, lambda probe: probe.load_state_dict(state))

    def log_also(self, **scalars: float | Tensor) -> None:
        """Give scalars of the present window to the log of the run: see `NoiseScaleProbe.log`."""
        self._try("the log of the run lacks what the trainer logs", lambda probe: probe.log(**scalars))

    def metrics(self) -> Mapping[str, float]:
        """Those of `LOGGED` that are known now, for the trainer's own logs. Waits for the device."""
        found = self._try("the trainer's log lacks the noise scale", lambda probe: known(probe.metrics())) or {}
        return {name: found[name] for name in LOGGED if name in found}

    def averages(self) -> dict[str, Any] | None:
        """The averages so far, for a checkpoint, also after training; None if nothing is measured."""
        if self.probe is None:
            return self._final_state
        return self._try("the checkpoint lacks the averages of the noise scale", lambda probe: probe.state_dict())

    def reading(self) -> NoiseScaleReading | None:
        """The present reading, or that of the end of training. Waits for the device.

        None before training, or if nothing is measured.
        """
        return self._last if self.probe is None else self._read(self.probe)

    @property
    def n_windows(self) -> int:
        """Windows that have ended in this training, or in the last one, measured or not."""
        return self._n_windows if self.probe is None else self.probe.n_windows

    def _read(self, probe: NoiseScaleProbe) -> NoiseScaleReading:
        """The probe's reading; where no window could be ended, with the reason."""
        reading = probe.reading()
        return reading if reading.windows or self._why_none is None else replace(reading, reason=self._why_none)

    def end(self, reason: str, *, patience: float = math.inf) -> None:
        """Close the probe, and print its last reading.

        Args:
            reason: how the run ended, for its log.
            patience: seconds to wait for other ranks: none after an error of the training, Ctrl-C among them, since
                they may be gone.
        """
        probe, self.probe = self.probe, None
        if probe is not None:
            with self.forgiven("the log of the noise scale has no proper end"):
                try:
                    probe.close(reason, patience=patience)
                finally:
                    self.keep(probe)

    def close(self, reason: str = "closed") -> None:
        """End the log, and leave the trainer as it was."""
        self.end(reason)
        self.undo.close()

    def fail(self, error: BaseException) -> None:
        """End after an error of the training."""
        self.end(f"stopped by {type(error).__name__}", patience=0.0)

    def train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wraps the training of a trainer that has no event for one that raises."""
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            self.fail(error)
            raise

    def keep(self, probe: NoiseScaleProbe) -> None:
        """Keep the last reading and state of a probe that is closed, and print the reading."""
        self._n_windows = probe.n_windows
        self._last, self._final_state = self._read(probe), probe.state_dict()
        self.said_at_end = said_at_end(probe, self._last)
        if self._verbose and self._run_log.is_first_rank:
            for text in self.said_at_end:
                tell(text)

    def say_once(self, text: str) -> None:
        """Print a sentence about what was found, on rank 0."""
        if self._verbose and self._run_log.is_first_rank and text not in self._said:
            self._said.add(text)
            tell(text)

    def _try(self, consequence: str, use: Callable[[NoiseScaleProbe], T]) -> T | None:
        """What this returns; None if nothing is measured, or after an error."""
        if self.probe is not None:
            with self.forgiven(consequence):
                return use(self.probe)
        return None

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


def warn_if_untested(
    package: str,
    version: str,
    tested: tuple[str, str],
    check: str = "compare the pieces and units per window that sonde prints with your own",
) -> None:
    """Log a warning for a version outside the tested range, since a trainer's hooks may have moved.

    Args:
        package: its name.
        version: installed.
        tested: the first version that the tests ran with, and the first one above it that they did not.
        check: how one sees that all is well.
    """
    if not is_within(version, *tested):
        logger.warning(
            f"sonde: {package} {version} is not a version that sonde was tested with, which are those from {tested[0]} "
            f"to below {tested[1]}: {check}"
        )


def checked_on_error(on_error: OnError) -> OnError:
    """The option, if it is one.

    Raises:
        ValueError: for another value.
    """
    if on_error not in ("warn", "raise"):
        raise ValueError(f"on_error must be 'warn' or 'raise', got {on_error!r}")
    return on_error


class WrappedMethods:
    """Methods of one object, each replaced by a wrapper until `restore`, or the end of a `with` block.

    Args:
        owner: the object, or a module. An object's class stays as it is, and so do other objects.
        **wrappers: by the method's name; called with the method as it was, then with the caller's own arguments.
    """

    def __init__(self, owner: object, **wrappers: Callable[..., Any]) -> None:
        self._owner = owner
        self._own = {name: vars(owner)[name] for name in wrappers if name in vars(owner)}  # wrapped before, say
        self._wrapped = {name: _wrapped(getattr(owner, name), wrapper) for name, wrapper in wrappers.items()}
        for name, wrapped in self._wrapped.items():
            setattr(owner, name, wrapped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the methods back. One that was wrapped again since keeps its newer wrapper."""
        for name, wrapped in self._wrapped.items():
            if vars(self._owner).get(name) is not wrapped:
                continue
            if name in self._own:
                setattr(self._owner, name, self._own[name])
            else:
                delattr(self._owner, name)
        self._wrapped = {}


def is_wrapped(owner: object, name: str) -> bool:
    """Whether `WrappedMethods` has replaced this method of the object, and nobody has replaced it since."""
    return hasattr(vars(owner).get(name), _MARK)


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(call, _MARK, True)
    return call

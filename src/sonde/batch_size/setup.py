"""The options of a noise-scale probe, checks of what it is given, and the messages that attach prints."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import nn
from typing_extensions import TypeIs

from sonde.batch_size.forward_units import (
    FIRST_DIM,
    UnitsPerPiece,
    is_of_forward,
)
from sonde.batch_size.pace import DEFAULT_ALLOWANCE, DEFAULT_BUDGET
from sonde.batch_size.per_example.rules import GradientsOf
from sonde.batch_size.taps.metric import MetricName
from sonde.batch_size.units import counted_in, unit_names
from sonde.log.sinks import TRIAL
from sonde.parallel.devices import default_staging_bytes
from sonde.parallel.unwrap import Optimizers, check_grad_scaler, given_optimizers
from sonde.parallel.wrappers import GroupOf
from sonde.record_values import whole_number
from sonde.wording import number, percent, plural

Groups = Literal["blocks", "kinds", "parameters"] | GroupOf | None
"""How parameters are grouped; see `NoiseScaleOptions`."""

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

BATCH_NORM = (
    "batch normalisation in train mode couples the samples of a piece, so B_simple depends on the piece's size: "
    "compare runs at the same piece size only"
)
_SYNC_BATCH_NORM = (
    "synchronised batch normalisation couples the samples of all pieces of a window: the noise between ranks is no "
    "longer that of independent data, however large the pieces are"
)


_NEVER = 10**9
"""One window in so many is measured in a trial."""


@dataclass(frozen=True)
class NoiseScaleOptions:
    """How a `NoiseScaleProbe` measures.

    Attributes:
        unit: plural name of the independent sample ("sequences", "images"); results are in it. Several names,
            ("sequences", "tokens"), count each piece in all of them: results are converted to those after the first.
        units_per_piece: units in a micro-batch, by name if there are several, unless `piece(units=...)` gives their
            number. Without `piece()`, each backward is one piece. Once `piece()` is used, only backwards inside
            `piece()` count. "first dim" counts the rows of each forward: dim 0 of the first tensor that the model is
            called with, if what it returns, its other tensors and its layers agree. It counts nothing in a pipeline,
            in a model of torch.jit, and where there are several units. A function is called as the model is, and
            returns the number of units. With None, only `piece()` says it.
        groups: "blocks" for one group per top-level block; "kinds" for embeddings, attention, mlp, experts, norms,
            biases, head and the like; "parameters" for one group each; None for one group in all; or a function from a
            parameter's name to its group's.
        metric: "euclidean" for |g|²; "adam" for Σ g²/(√v̂ + ε) with the second moment of the optimizer's previous
            step, the noise scale that Adam's steps see; "sign" for (Σ|g|)², which steps of signs see; "spectral" for
            the squared sum of the singular values of all matrices, which Muon's steps see. Several, as a tuple, are
            measured together: the first is the headline, of which the budget, the verdict and `reading()` speak.
        staging_mib: limit of the memory for gradients that wait, in MiB; None for 8, or 128 on an accelerator.
        per_example: whether the gradient of each example is read besides those of pieces, layer by layer, so that a
            window of a single piece gives a number too. "auto" reads it where windows are single pieces, "always" in
            every measured window, "never" in none. Examples must be the units and the rows of what layers are called
            with; sequences of tokens are rows [examples, tokens, …].
        rules: rules for layers of your own, whose examples are to be read; see `PerExampleNorms`.
        budget: part of the run's time that measuring may cost, between 0 and 1; None to measure every window. One
            window in N is measured. N grows with the run, so that each doubling of its steps has about 150 measured
            windows until measuring has taken the `allowance`, and 16 in any case; where the budget allows more, N is
            smaller. It is a window at a random place in each stretch of N, so that no period in the data falls in step
            with it.
        allowance: seconds that measuring may take in any case, however short the run is.
        every: N itself, from the first window on; `budget` and `allowance` are not used then.
        log_groups: write each group's values to the log. None writes up to 256 groups, but none of "parameters".
            `reading().groups` has them in any case.

    Raises:
        ValueError: for an option outside its range.
    """

    unit: str | Sequence[str]
    units_per_piece: UnitsPerPiece = FIRST_DIM
    groups: Groups = "blocks"
    metric: MetricName | Sequence[MetricName] = "euclidean"
    staging_mib: float | None = None
    per_example: Literal["auto", "always", "never"] = "auto"
    rules: Mapping[type[nn.Module], GradientsOf] | None = None
    budget: float | None = DEFAULT_BUDGET
    allowance: float = DEFAULT_ALLOWANCE
    every: int | None = None
    log_groups: bool | None = None

    def __post_init__(self) -> None:
        def must_be(what: str, is_so: bool, name: str, remedy: str = "") -> None:
            if not is_so:
                raise ValueError(f"{name} must be {what}, got {getattr(self, name)!r:.80}{remedy}")

        names = self.units
        rows = f": {FIRST_DIM!r} counts the rows of what the model is called with"
        is_no_text = not isinstance(self.units_per_piece, str) or self.units_per_piece == FIRST_DIM
        must_be(f"a number, {FIRST_DIM!r} or a function", is_no_text, "units_per_piece", rows)
        if self.units_per_piece is not None and not is_of_forward(self.units_per_piece):
            first, further = counted_in(names, self.units_per_piece)
            are_positive = all(_is_finite(number) and number > 0 for number in (first, *further))
            must_be("positive and finite", are_positive, "units_per_piece", ": count a micro-batch's units")
        must_be("True, False or None", self.log_groups in (None, True, False), "log_groups")
        must_be("≥ 0 and finite", self.staging_mib is None or _is_finite(self.staging_mib), "staging_mib")
        must_be("'auto', 'always' or 'never'", self.per_example in ("auto", "always", "never"), "per_example")
        rules = self.rules if isinstance(self.rules, Mapping) else {None: self.rules}
        must_be(
            "a function for each type of layer",
            self.rules is None or all(_is_rule(*each) for each in rules.items()),
            "rules",
            ": pass {MyLayer: my_rule}, see sonde.PerExampleNorms",
        )
        must_be(
            "a part of the run's time between 0 and 1",
            self.budget is None or (is_number(self.budget) and 0 < self.budget < 1),
            "budget",
            ": use 0.01 for 1 %, or None to measure every window",
        )
        in_any_case = "seconds that measuring may take in any case, ≥ 0 and finite"
        must_be(in_any_case, _is_finite(self.allowance), "allowance")
        if self.every is not None:
            what, remedy = "every must be a whole number of windows", ": use 1 to measure every window"
            object.__setattr__(self, "every", whole_number(what, self.every, remedy))
        if TRIAL in os.environ:  # steps are timed, and a measured one takes longer
            object.__setattr__(self, "every", _NEVER)
        known, metrics = get_args(MetricName), self.metrics
        are_known = bool(metrics) and all(name in known for name in metrics)
        must_be(f"one or several of {', '.join(map(repr, known))}", are_known, "metric", ": use 'euclidean'")
        must_be("named once each", len(set(metrics)) == len(metrics), "metric", ": leave out the second")
        must_be(
            "'blocks', 'kinds', 'parameters', None or a function from a parameter's name",
            self.groups in ("blocks", "kinds", "parameters", None) or callable(self.groups),
            "groups",
            ": use 'blocks' for one group per top-level block",
        )

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the units, the independent sample first."""
        return unit_names(self.unit)

    @property
    def metrics(self) -> tuple[MetricName, ...]:
        """The metrics by name, the headline first."""
        names: Any = (self.metric,) if isinstance(self.metric, str) else self.metric
        return tuple(names) if isinstance(names, Sequence) else ()

    def staging_bytes(self, device: torch.device) -> int:
        """`staging_mib` in bytes, or what is usual on a device."""
        return default_staging_bytes(device) if self.staging_mib is None else int(self.staging_mib * 2**20)


def check_partners(options: NoiseScaleOptions, *, optimizer: Optimizers, grad_scaler: object) -> None:
    """Refuse objects of the wrong kind before the model is inspected.

    Raises:
        ValueError: with the argument, the object that was given and the kind that is needed; in inference mode, whose
            tensors no later backward may change.
    """
    if not isinstance(options, NoiseScaleOptions):
        raise ValueError(f"options must be a sonde.NoiseScaleOptions, got {options!r:.60}")
    if torch.is_inference_mode_enabled():
        raise ValueError("sonde cannot be attached inside torch.inference_mode(): attach outside of it")
    if "adam" in options.metrics and not given_optimizers(optimizer):
        raise ValueError("metric='adam' reads the optimizer's second moments, got no optimizer: pass optimizer=")
    if not all(hasattr(each, "register_step_pre_hook") for each in given_optimizers(optimizer)):
        raise ValueError(
            f"optimizer must be a torch.optim.Optimizer or a list of them, got {optimizer!r}: pass the optimizer that "
            "steps this model, or leave out optimizer= to find it by its steps"
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in given_optimizers(optimizer)):
        raise ValueError(
            "LBFGS evaluates its closure several times a step, so that a step has no single gradient: measure a run "
            "with another optimizer"
        )
    check_grad_scaler(grad_scaler)


def is_number(value: object) -> TypeIs[float]:
    """Whether it is a number that a float can hold, or infinite, or not a number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False
    return True


def _is_finite(value: object) -> TypeIs[float]:
    """Whether it is a number that is not negative, and finite."""
    return is_number(value) and 0 <= value < math.inf


def _is_rule(layer: object, rule: object) -> bool:
    return isinstance(layer, type) and issubclass(layer, nn.Module) and callable(rule)


def n_batch_norms(model: nn.Module, kinds: tuple[type[nn.Module], ...] = _BATCH_NORMS) -> int:
    """Batch-normalisation layers that use the statistics of their batch now."""
    return sum(m.training or not m.track_running_stats for m in model.modules() if isinstance(m, kinds))


def n_sync_batch_norms(model: nn.Module, n_ranks: int) -> int:
    """Those of them that share their statistics over ranks."""
    return n_batch_norms(model, (nn.SyncBatchNorm,)) if n_ranks > 1 else 0


def describe_context_axis(axis: str) -> str:
    """The alert about a mesh axis that is named after context parallelism while `cp_mesh` is not given."""
    return (
        f"parameters are cut over the mesh axis {axis!r}, which is named after context parallelism: if ranks hold "
        "parts of the same sequences, their parts count as pieces and the noise scale is wrong. Pass cp_mesh=, the "
        "axis of these ranks, also where it has a single rank; sonde.measure takes none: measure without such ranks"
    )


def describe(setup: Mapping[str, Any], unit: str, groups: Sequence[str]) -> str:
    """The message that attach prints."""
    shown = ", ".join(groups[:4]) + (f", … {groups[-1]}" if len(groups) > 5 else "".join(f", {g}" for g in groups[4:]))
    hook = f", communication hook {setup['comm_hook']}" if setup["comm_hook"] else ""
    n_trainable = plural(setup["parameters"], "trainable parameter")
    rows = {
        "model": f"{setup['wrapper']}, {n_trainable} on {setup['device']}{hook}",
        "ranks": plural(setup["ranks"], "data-parallel rank"),
        "pieces": f"read by {setup['tap']}; the first window shows how many there are",
        "unit": unit
        + (f": {how}" if (how := setup["units_by_forward"]) else "")
        + (f", also counted in {', '.join(further)}" if (further := setup["further_units"]) else ""),
        "windows": _windows_in_words(setup["budget"], setup["allowance"], setup["every"]),
        "groups": f"{len(groups)}: {shown}" + ("" if setup["groups"] else "; their values are not written to the log"),
        "steps": setup["optimizer"],
    }
    if setup["metric"] != "euclidean":
        rows["metric"] = setup["metric"]
    if setup["batch_norms"]:
        rows["note"] = f"{plural(setup['batch_norms'], 'layer')}: {BATCH_NORM}"
    if setup["sync_batch_norms"]:
        rows["ranks"] += f"; {_SYNC_BATCH_NORM} ({plural(setup['sync_batch_norms'], 'layer')})"
    return "noise scale attached\n" + "\n".join(f"  {name:<10}{text}" for name, text in rows.items())


def _windows_in_words(budget: float | None, allowance: float | None, every: int | None) -> str:
    if every is not None and every > 1:
        return f"one in {every} is measured"
    if every is not None or budget is None:
        return "all are measured"
    return f"as many are measured as {percent(budget)} of the time allows, or {number(allowance)} s if that is more"


def describe_window(n_pieces: int, n_units: Mapping[str, float], n_ranks: int, counted_in: str) -> str:
    """The message that the first window prints."""
    each = f" ({n_ranks} ranks × {n_pieces / n_ranks:g})" if n_ranks > 1 else ""
    counts = ", ".join(f"{number:g} {unit}" for unit, number in n_units.items())
    rows = f" ({counted_in})" if counted_in else ""
    return f"{plural(n_pieces, 'piece')} per window{each}, {counts} in all{rows}"

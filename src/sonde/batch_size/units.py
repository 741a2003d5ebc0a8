"""The units that pieces are counted in: the independent sample first, and others that only say the same batch again."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeVar

import torch
from torch import Tensor

from sonde.batch_size.stats.noise_scale import effective_units
from sonde.parallel.devices import is_at_hand, to_device, widened

Number = float | Tensor
"""A Python number, or a 0-dim tensor that is never read on the host."""

T = TypeVar("T", float, "float | Tensor", "float | Sequence[float]")

_FURTHER_NAME = re.compile(r"(?!(low|high|average)(_|$))[A-Za-z0-9_]+")
"""The name of a further unit becomes the end of names of metrics, where gns/b_simple_low has another meaning."""


def unit_names(unit: object) -> tuple[str, ...]:
    """The names of the units: the independent sample, then further ones.

    Args:
        unit: one name, or several.

    Raises:
        ValueError: when one of them is empty or no text, occurs twice, or could not be a part of a metric's name; when
            the independent sample is a token.
    """
    names = (unit,) if isinstance(unit, str) else tuple(unit) if isinstance(unit, Sequence) else ()
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError(
            f"unit must name the independent sample, got {unit!r}: use 'sequences', 'images' or 'prompts', or several, "
            "the independent sample first: ('sequences', 'tokens')"
        )
    if names[0].strip().lower() in ("token", "tokens"):
        raise ValueError(
            f"unit must name the independent sample, got {names[0]!r}, and the tokens of one sequence depend on each "
            "other: name the sequences, 'sequences', or count pieces in both, unit=('sequences', 'tokens') with "
            "piece(units={'sequences': 8, 'tokens': 4096})"
        )
    if wrong := next((name for name in names[1:] if not _FURTHER_NAME.fullmatch(name)), None):
        raise ValueError(
            f"a further unit's name may hold letters, digits and '_', and be neither 'low', 'high' nor 'average', got "
            f"{wrong!r}: rename it"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"each unit must have a name of its own, got {unit!r}")
    return names


def counted_in(names: Sequence[str], units: T | Mapping[str, T] | None) -> tuple[T | None, tuple[T, ...]]:
    """A piece's count in the first unit, None if it is not given, and in each of the further ones.

    Args:
        names: of all units, the first one first.
        units: a number, or one for each name. With several units, the first may be left out, as `unit_weights` has it.

    Raises:
        ValueError: when units are missing or unknown.
    """
    first, *further = names
    if not isinstance(units, Mapping):
        if not further:
            return units, ()
        raise ValueError(f"units must be counted in each of {', '.join(names)}, got {units!r:.60}: {_example(names)}")
    if set(units) - set(names) or not set(further) <= set(units):
        raise ValueError(
            f"units must be counted in {', '.join(names)}, got {', '.join(map(str, units))}: {_example(names)}"
        )
    return units.get(first), tuple(units[name] for name in further)


def _example(names: Sequence[str]) -> str:
    counts = ", ".join(f"{name!r}: …" for name in names)
    return f"pass {{{counts}}}"


@dataclass(frozen=True)
class PieceCounts:
    """A piece's weight w_k, its effective number of units n_k, its units as counted, and their own weights.

    Attributes:
        further: its size in each of the further units.
        dim: of what the model was called with, in which its units lie.
    """

    weight: Number
    effective_units: Number
    units: Number
    unit_weights: Sequence[float] | Tensor | None = None
    further: tuple[Number, ...] = ()
    dim: int = 0


def piece_counts(
    units: Number | None,
    weight: Number,
    unit_weights: Sequence[float] | Tensor | None,
    further: Sequence[Number] = (),
) -> PieceCounts:
    """Check the counts that a user gives for a piece, and complete them.

    Args:
        units: units in the piece; None for one unit per entry of `unit_weights`.
        weight: the piece's weight in the loss.
        unit_weights: weights of the units within the piece, [units].
        further: the piece's size in each of the further units.

    Raises:
        ValueError: for a number that is not positive and finite, or a tensor of the wrong shape.
    """
    effective: Number | None = None
    if isinstance(unit_weights, Tensor) and unit_weights.dim() == 1 and is_at_hand(unit_weights.device):
        unit_weights = unit_weights.tolist()
    if isinstance(unit_weights, Tensor):
        if unit_weights.dim() != 1 or not unit_weights.numel():
            raise ValueError(
                f"unit_weights must hold one weight for each unit, [units], got shape {tuple(unit_weights.shape)}"
            )
        weights = widened(unit_weights.detach())
        effective = weights.sum().square() / weights.square().sum()  # Kish
        effective = torch.where((weights >= 0).all(), effective, torch.nan)  # NaN drops the window later
    elif unit_weights is not None:
        effective = effective_units(unit_weights)
    if units is None:
        assert unit_weights is not None
        units = float(len(unit_weights))
    elif unit_weights is not None and not isinstance(units, Tensor) and units != len(unit_weights):
        raise ValueError(
            f"unit_weights must hold one weight for each unit, got {len(unit_weights)} weights for units={units}: "
            "leave out units="
        )
    units = _positive("units", units)
    others = tuple([_positive("units", number) for number in further]) if further else ()
    n_units = units if effective is None else effective
    return PieceCounts(_positive("weight", weight), n_units, units, unit_weights, others)


def check_counts(
    units: Number | None,
    weight: Number,
    unit_weights: Sequence[float] | Tensor | None,
    further: Sequence[Number] = (),
) -> None:
    """Check the counts of a piece that is not measured, as `piece_counts` does, without any work for a device.

    Raises:
        ValueError: for a number that is not positive and finite.
    """
    if not any(
        isinstance(value, Tensor) and not is_at_hand(value.device) for value in (units, weight, unit_weights, *further)
    ):
        piece_counts(units, weight, unit_weights, further)


def _positive(name: str, value: Number) -> Number:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a 0-dim tensor, got shape {tuple(value.shape)}")
        if not is_at_hand(value.device):
            return widened(value.detach().reshape(()))
        value = value.item()
    if type(value) not in (int, float) and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ValueError(f"{name} must be a number or a 0-dim tensor, got {value!r}")
    value = math.inf if value > sys.float_info.max else float(value)
    if not 0 < value < math.inf:
        raise ValueError(
            f"{name} must be positive and finite, got {value}: leave out a micro-batch that does not count"
        )
    return value


def as_vector(numbers: Sequence[Number], device: torch.device) -> Tensor:
    """Numbers as one vector on the device, without waiting for tensors that are there already; [numbers]."""
    values, on_device = [], []
    for i, n in enumerate(numbers):
        waits = isinstance(n, Tensor) and n.device.type == device.type
        values.append(0.0 if waits else float(n))
        if waits:
            on_device.append((i, n))
    # device="cpu" is explicit, since the user may have set another default device.
    vector = to_device(torch.tensor(values, dtype=torch.float64, device="cpu"), device)
    for i, n in on_device:
        vector[i] = n
    return vector

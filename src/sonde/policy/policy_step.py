"""The optimizer's step: forecast before it is taken, and recognised after it, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonde.parallel.placements import local_tensor
from sonde.parallel.process_groups import gather_from_all_ranks
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.entropy_checks import trainable
from sonde.policy.scoring.optimizer_step import (
    Direction,
    Part,
    each_step,
    has_second_moment,
    has_sparse_gradient,
    why_no_forecast,
)
from sonde.policy.scoring.precision import NARROW

_LARGEST_DEPARTURE = 0.01
"""Relative difference between the step that was taken and its forecast, above which they count as different steps; and
between gradients."""
_ANOTHER_STEP = 0.5
"""The same for parameters of 16 bits, whose step is rounded: a few elements are rounded to another neighbour."""
_SAMPLED = 256
"""Elements of each parameter that are compared."""
STEP_NOT_FINITE = "the step is not finite"
STEP_ROUNDED_AWAY = (
    "the step changes nothing, since parameters of 16 bits round it away as a whole: train parameters in fp32, or use "
    "a larger learning rate"
)
_NO_GRADIENT = (
    "all gradients were 0, as where the advantages of a whole batch are: the step in the block of around_step() "
    "changed nothing"
)
_STEP_SKIPPED = (
    "no parameter moved in the block of around_step(): the step was skipped, as a GradScaler does after gradients that "
    "are not finite, or it was not called, or its learning rate is 0, or it is too small for parameters of 16 bits"
)
_SPARSE = "the optimizer's answer is not known for a sparse gradient: build the layer with sparse=False"
_MOVED_OTHERS = (
    "parameters moved in the block of around_step() that are not in the probe's optimizer, or had no gradient, so what "
    "was forecast on entry leaves them out: pass an optimizer that holds all parameters of the model"
)
_OTHER_GRADIENTS = (
    "the gradients after the block of around_step() are not those on entry, and the step itself does not show whether "
    "it was taken with these, as with parameters of 16 bits or in Adam's first step: in the block, take the step "
    "alone, without a closure and zero_grad(); clip before the block, and pass applied_scale="
)


class PolicyStep:
    """The next step of a policy's optimizer. `.grad` holds its gradients.

    Args:
        model: the policy.
        optimizer: whose step it is.
        group: the ranks.
        gradient_scale: factor that gradients are still multiplied by before the step.
        loss_scale: factor of a GradScaler in the gradients.

    Attributes:
        parameters: the model's trainable parameters of now; the optimizer may hold others too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        group: dist.ProcessGroup | None,
        gradient_scale: float,
        loss_scale: float,
    ) -> None:
        self.model, self.optimizer, self._group = model, optimizer, group
        self.gradient_scale, self.loss_scale = gradient_scale, loss_scale
        self.parameters = trainable(model)
        self._narrow = [p for p in self.parameters if p.dtype in NARROW]
        self._samples: list[_Sample] = []
        self._shows_gradients = True

    def why_no_forecast(self) -> str:
        """Why the step cannot be forecast, on all ranks; empty if it can."""
        return why_no_forecast(self.optimizer) or (
            _SPARSE if self._on_any_rank(has_sparse_gradient(self.parameters)) else ""
        )

    def part(self, part: Part, along: Direction | None = None) -> Direction:
        """A part of the step of the model's parameters, as `each_step` gives it."""
        scale = self.gradient_scale
        return dict(each_step(self.optimizer, gradient_scale=scale, part=part, along=along, of=self.parameters))

    def forecast(self) -> Direction | None:
        """The whole step of the model's parameters; None if it is not finite on all ranks.

        Raises:
            RuntimeError: if no parameter has a gradient.
        """
        step = self.part("all")
        if not step:
            raise RuntimeError("no parameter has a gradient: call this after the backward and before zero_grad()")
        is_finite = all(bool(local_tensor(delta).isfinite().all()) for delta in step.values())
        return None if self._on_any_rank(not is_finite) else step

    @torch.no_grad()
    def watch(self, *, whole: bool) -> None:
        """Note a few hundred elements of each parameter, to be compared after the step.

        Args:
            whole: note the forecast of all parameters; otherwise of those of 16 bits alone, which may be rounded away.
        """
        of: Iterable[nn.Parameter] = self.parameters if whole else self._narrow
        deltas: dict[Tensor, Tensor] = {}
        if not why_no_forecast(self.optimizer):
            dense = [p for p in of if p.grad is not None and not p.grad.is_sparse]
            steps = each_step(self.optimizer, gradient_scale=self.gradient_scale, of=dense)  # one at a time
            deltas = {p: _elements(delta).clone() for p, delta in steps}
            self._shows_gradients = not self._on_any_rank(bool(self._narrow) or self._is_first_of_adam())
        self._samples = [
            _Sample(p, _elements(p).clone(), deltas.get(p), _elements(p.grad).clone() if p in deltas else None)  # type: ignore[arg-type]
            for p in self.parameters
        ]

    def was_skipped(self, *, is_unchanged: bool) -> bool:
        """Whether a step that was to move the policy has not.

        Args:
            is_unchanged: whether scores are those before. A step of other elements than the noted ones shows there.
        """
        groups = getattr(unwrap_optimizer(self.optimizer), "param_groups", ())
        # Without a learning rate, as a warm-up begins, nothing is to move.
        is_to_move = any(float(group.get("lr", 1.0)) != 0.0 for group in groups) or not groups
        return is_to_move and not self._on_any_rank(any(s.has_moved() for s in self._samples)) and is_unchanged

    def why_unmoved(self) -> str:
        """Why no parameter moved, by the gradients that are still there."""
        gradients = [local_tensor(p.grad) for p in self.parameters if p.grad is not None]
        is_zero = bool(gradients) and not any(bool(g.any()) for g in gradients)
        return _STEP_SKIPPED if self._on_any_rank(not is_zero) else _NO_GRADIENT

    def why_another(self) -> str:
        """How the step that was taken differs from its forecast; empty if it does not."""
        if self._on_any_rank(any(s.has_moved() for s in self._samples if s.delta is None)):
            return _MOVED_OTHERS
        if (departure := max(self._gather(self._departure()))) <= _LARGEST_DEPARTURE:
            return ""
        if self._narrow:
            return (
                f"rounding to 16 bits has moved the step that was taken by {departure:.0%} from that of the derivatives"
            )
        off = "far off" if departure > 10.0 else f"{departure:.0%} off"
        return f"derivatives are along another step, {off} the one taken: clip before the block"

    def why_another_answer(self) -> str:
        """Why the optimizer would answer more gradient otherwise than on entry; empty if it would not.

        Rounding to 16 bits does not matter.
        """
        another = self.why_another()
        departure = max(self._gather(self._departure()))
        if another and not (self._narrow and another != _MOVED_OTHERS and departure <= _ANOTHER_STEP):
            return another
        if not self._shows_gradients and self._on_any_rank(not self._has_same_gradients()):
            return _OTHER_GRADIENTS
        return ""

    def rounded_away(self) -> float | None:
        """The part of the step that parameters of 16 bits do not hold; 0 if there are none.

        None if it is unknown: if the step has no forecast, or was taken with other gradients than on entry.
        """
        if not self._narrow:
            return 0.0
        sums = torch.zeros(1, 4, dtype=torch.float64)
        for sample in self._samples:
            if sample.delta is not None and sample.parameter.dtype in NARROW:
                sums += sample.rounding()
        is_same = torch.tensor([self._has_same_gradients()])
        found = gather_from_all_ranks(self._group, lambda: {"of": sums, "is_same": is_same})
        lost, whole, other, moved = found["of"].sum(0).tolist()
        is_another = not bool(found["is_same"].all()) or other > _ANOTHER_STEP**2 * max(moved, other)
        return min(math.sqrt(lost / whole), 1.0) if whole and not is_another else None

    def _departure(self) -> float:
        """|taken − forecast|/|forecast| on this rank's elements; 0 if both are 0, ∞ if one of them is not finite."""
        parts = [s.departure() for s in self._samples if s.delta is not None]
        sq_error, sq_step = (math.fsum(part) for part in zip(*parts, strict=True)) if parts else (0.0, 0.0)
        if not sq_step:
            return math.inf if sq_error else 0.0
        departure = math.sqrt(sq_error / sq_step)
        return departure if math.isfinite(departure) else math.inf

    def _has_same_gradients(self) -> bool:
        """Whether `.grad` is what it was on entry. A fused optimizer leaves it scaled as in the step."""
        return all(s.has_same_gradient(self.gradient_scale) for s in self._samples if s.gradient is not None)

    def _is_first_of_adam(self) -> bool:
        """Whether this is Adam's first step for any parameter: it moves by the gradient's sign, whatever its size."""
        state = unwrap_optimizer(self.optimizer).state
        return has_second_moment(self.optimizer) and any(
            p.grad is not None and not state.get(p) for p in self.parameters
        )

    def _on_any_rank(self, is_so: bool) -> bool:
        return any(self._gather(float(is_so)))

    def _gather(self, value: float) -> list[float]:
        values: list[float] = gather_from_all_ranks(self._group, lambda: {"v": torch.tensor([value])})["v"].tolist()
        return values


@dataclass
class _Sample:
    """A few elements of a parameter before a step. Its methods wait for the device.

    Attributes:
        parameter: which one.
        before: elements of θ.
        delta: those of Δ, forecast; None if it is not.
        gradient: those of `.grad`; None without a forecast.
    """

    parameter: Tensor
    before: Tensor
    delta: Tensor | None
    gradient: Tensor | None

    def has_moved(self) -> bool:
        """Whether any of the elements has moved."""
        return not torch.equal(_elements(self.parameter), self.before)

    def departure(self) -> tuple[float, float]:
        """|taken − forecast|² and |forecast|². An optimizer of 32 bits may round twice: after weight decay too."""
        assert self.delta is not None
        after = (self.before.to(self.delta.dtype) + self.delta).to(self.before.dtype)
        error = (_elements(self.parameter).double() - after).abs()
        if after.dtype.itemsize >= 4:
            error = (error - 2.0 * torch.finfo(after.dtype).eps * after.double().abs()).clamp(min=0.0)
        return float(error.square().sum()), float((after.double() - self.before).square().sum())

    def rounding(self) -> Tensor:
        """Squared norms, [4]: of θ⁺ − θ − Δ; of Δ; of θ⁺ minus θ + Δ in 16 bits; and of θ + Δ in 16 bits minus θ."""
        assert self.delta is not None
        after, theta, step = _elements(self.parameter).double(), self.before.double(), self.delta.double()
        rounded = (theta + step).to(self.before.dtype).double()
        parts = (after - theta - step, step, after - rounded, rounded - theta)
        return torch.stack([part.square().sum() for part in parts]).cpu()

    def has_same_gradient(self, scale: float) -> bool:
        """Whether the gradient is there still, as it was or multiplied by the scale of the step."""
        if self.gradient is None or (grad := self.parameter.grad) is None or grad.is_sparse:
            return False
        now, before = _elements(grad).double(), self.gradient.double()
        # Spacing of the smallest numbers.
        numbers = torch.finfo(grad.dtype)
        spacing = numbers.smallest_normal * numbers.eps * math.sqrt(now.numel())
        expected = (before, scale * before)
        return any(bool((now - e).norm() <= _LARGEST_DEPARTURE * e.norm() + spacing) for e in expected)


def _elements(tensor: Tensor) -> Tensor:
    """A few hundred elements of this rank's part; views of the tensor."""
    flat = local_tensor(tensor.detach()).reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLED, 1)]

"""The classical forecast along the mean of the update prompts' preconditioned gradients, phase by phase.

1. X̄₁ and X̄₂, the means of the entropy's gradients over halves of the evaluation prompts, by micro-batched backwards.
2. Ȳ = P∇J over the update prompts, likewise; each is summed over ranks once.
3. X_n·Ȳ of each evaluation prompt: the derivative of its terms along Ȳ.
4. Y_p·X̄₁ and Y_p·X̄₂ of each update prompt, likewise.
5. δH₁ = η X̄·Ȳ with V_X + V_Y, and each prompt's part.
6. Beside it, the truths: E is scored along η Ȳ, or around the real step, with weights of responses (snis or clip).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.parallel.placements import local_tensor
from sonde.parallel.unwrap import unwrap_optimizer
from sonde.policy.entropy_measurement import EntropyMeasurement
from sonde.policy.scoring.optimizer_step import Direction, has_second_moment, widened
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.scoring.scorer import Batch
from sonde.policy.stats.attribution import Causes, causes_by_prompt, credit_by_sign
from sonde.policy.stats.entropy_change import change_by_gradients
from sonde.policy.stats.entropy_forecast import EntropyForecast, FixedPrefixes, with_change
from sonde.policy.stats.entropy_gradient import on_same_prefixes_coefficients


def along_mean_gradients(
    measurement: EntropyMeasurement, update: Rollouts, optimizer: Any, step_size: float
) -> tuple[EntropyForecast, Direction]:
    """The change along η Ȳ, the mean of the update prompts' preconditioned gradients times η.

    Returns:
        The change with its causes by prompt; and the step η Ȳ.
    """
    base, responses = measurement.base, measurement.base.responses
    learned, credit, _ = measurement.scorer.credited(update)
    n_update = learned.responses.n_prompts
    # Each prompt's gradient is a mean over its responses.
    on_update = credit * learned.responses.share[:, None]
    with measurement.cost.phase("gradients"):
        # X̄₁ and X̄₂, the means of X over halves of the evaluation prompts; then Ȳ.
        halves = [(half, measurement.entropy_gradient(half)) for half in responses.halves()]
        y, precondition = _update_gradient(measurement, update, learned, on_update, optimizer)
    with measurement.cost.phase("derivatives"):
        # X_n·Ȳ is the derivative of prompt n's terms along Ȳ; Y_p·X̄₁ is that of prompt p's terms along P X̄₁.
        along_y = measurement.derivatives(base, y)
        coefficients = measurement.coefficients
        x_along_y, sharpening, on_same_prefixes = along_y.along(
            [coefficients, coefficients.entropy_alone(), on_same_prefixes_coefficients(responses)]
        )
        y_along_halves, doubts = [], [along_y.doubt]
        rewarded, penalised = (torch.zeros(n_update, dtype=torch.float64) for _ in range(2))
        for half, direction in halves:
            precondition(direction)
            along_half = measurement.derivatives(learned, direction)
            doubts.append(along_half.doubt)
            up, down = along_half.along(credit_by_sign(on_update))
            y_along_halves.append(up + down)
            # X̄ is the mean of X̄₁ and X̄₂, weighted by their shares of the prompts.
            part = float(responses.share[half].sum()) / responses.n_prompts
            rewarded += part * up
            penalised += part * down
    change = change_by_gradients(
        x_along_y,
        (y_along_halves[0], y_along_halves[-1]),
        rewarded + penalised,
        step_size,
        sharpening=sharpening if bool(coefficients.on_entropy.any()) else None,
    )
    prompts = causes_by_prompt(rewarded, penalised, learned.responses, step_size / n_update)
    found = with_change(
        measurement.known,
        "first_order",
        change,
        responses,
        fixed_prefixes=FixedPrefixes(None, step_size * float(on_same_prefixes.mean())),
        bars_dot=change.delta / step_size,
        doubt=next(filter(None, doubts), ""),
        causes=Causes.of(change.delta, prompts),
    )
    for vector in y.values():
        vector.mul_(step_size)
    return found, y


def _update_gradient(
    measurement: EntropyMeasurement, update: Rollouts, learned: Batch, on_log_prob: Tensor, optimizer: Any
) -> tuple[Direction, Preconditioner]:
    """Ȳ = P∇J, the mean over all update prompts; and P."""
    responses = learned.responses
    # Adam's P needs the gradient by halves of the prompts; SGD's is 1.
    masks = responses.halves() if has_second_moment(optimizer) else [responses.mask.any(1)]
    halves, sizes = [], []
    for half in masks:
        sizes.append(float(responses.share[half].sum()))  # number of prompts
        halves.append(measurement.gradient(update, learned.own(on_log_prob) / sizes[-1], None, half[learned.rows]))
    precondition = Preconditioner(optimizer, halves)
    y, *others = halves
    for parameter, part in y.items():
        part.mul_(sizes[0] / responses.n_prompts)
        for other, n in zip(others, sizes[1:], strict=True):
            part.add_(other[parameter], alpha=n / responses.n_prompts)
    precondition(y)
    return y, precondition


class Preconditioner:
    """Multiplies vectors by P = 1/(√v̂ + ε). v̂ is the second moment of Adam's previous step; SGD's P is 1.

    An element that never had a gradient has no second moment: √v̂ ≤ ε. P would be 1/ε there, and its step about 10⁸
    times as large as any that Adam takes, since Adam adds the new gradient to the second moment first. So v̂ of such an
    element is what Adam's next step adds: (1 − β₂)/(1 − β₂ᵗ⁺¹) times the mean square of the update's gradient. Without
    a gradient in the update either, the element does not move, and P is 0.

    Args:
        optimizer: torch's SGD, Adam or AdamW; may be wrapped by Accelerate.
        parts: the update's mean gradient, measured on independent parts of its prompts. One part would do for a large
            batch. With two, an element whose gradient happens to cancel over the batch does not get a huge P.

    Raises:
        ValueError: for Adam before its first step, when no element has a second moment.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Any, parts: Sequence[Direction]) -> None:
        self._is_adam = has_second_moment(optimizer)
        optimizer = unwrap_optimizer(optimizer)
        self._groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._state: Mapping[Tensor, Mapping[str, Any]] = optimizer.state
        self._without_memory: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """Where a parameter's elements have no second moment, and P of these elements."""
        if not self._is_adam:
            return
        if not any("exp_avg_sq" in state for state in self._state.values()):
            raise ValueError(
                "the optimizer has no second moment of any parameter: take a step first, or load its state"
            )
        for parameter in parts[0]:
            if parameter in self._groups:
                self._add_without_memory(parameter, [local_tensor(part[parameter]) for part in parts])

    @torch.no_grad()
    def __call__(self, vector: Direction) -> None:
        """Multiply a vector in place. P is 0 for parameters that the optimizer does not hold: it does not move them."""
        for parameter, part in vector.items():
            if parameter not in self._groups:
                part.zero_()
            elif self._is_adam:
                local, root = local_tensor(part), self._root(parameter)
                if parameter in self._without_memory:
                    where, p = self._without_memory[parameter]
                    root[where] = 1.0
                    local[where] = (widened(local[where]) * p).to(local.dtype)
                local.div_(root)

    def _root(self, parameter: Tensor) -> Tensor:
        """√v̂ + ε of the previous step, of this rank's elements."""
        group, state = self._groups[parameter], self._state.get(parameter, {})
        if "exp_avg_sq" not in state:
            return torch.full_like(widened(local_tensor(parameter.detach())), group["eps"])
        v = widened(local_tensor(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]))
        corrected = v / (1.0 - group["betas"][1] ** float(state["step"]))
        root: Tensor = corrected.sqrt_().add_(group["eps"])
        return root

    def _add_without_memory(self, parameter: Tensor, gradients: Sequence[Tensor]) -> None:
        """Note the elements of a parameter that have no second moment, with their P."""
        group, root = self._groups[parameter], self._root(parameter)
        where = root <= 2.0 * group["eps"]  # √v̂ ≤ ε
        if not bool(where.any()):
            return
        beta2, n_steps = group["betas"][1], 1.0 + float(self._state.get(parameter, {}).get("step", 0.0))
        # A norm of the parts rather than their squares, which would vanish in fp32 for small gradients.
        size = torch.stack([widened(g[where]) for g in gradients]).norm(dim=0) / len(gradients) ** 0.5
        added = ((1.0 - beta2) / (1.0 - beta2**n_steps)) ** 0.5 * size
        updated = torch.maximum(root[where] - group["eps"], added) + group["eps"]
        self._without_memory[parameter] = where, torch.where(size > 0.0, 1.0 / updated, 0.0)

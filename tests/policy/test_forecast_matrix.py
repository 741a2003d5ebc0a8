"""Forecasts in each way, of each entropy and optimizer, beside loops over responses and prompts in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.contrib.hold_entropy import HoldEntropy
from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.stats.entropy_forecast import EntropyForecast
from tests.policy.entropy_scene import (
    N_E,
    N_U,
    Scene,
    assert_untouched,
    coefficients,
    gradient_per_prompt,
    held,
    stale,
)
from tests.small_policy import LONGEST, STATISTICS, real_step


@dataclass(frozen=True)
class Cell:
    """A forecast.

    Attributes:
        kind: of the optimizer.
        objective: as in the options.
        weights: as `sequence_weights` in the options.
        way: "forecast", or "around" the step that is taken; "around, no optimizer".
        factor: of the gradients: "clip" for half of them by `gradient_scale=`; that of a GradScaler, "scale", perhaps
            unscaled again; "others" for an optimizer that holds a critic too.
        is_stale: whether an older policy sampled the responses.
        clip_at: as in the options.
        dtype: of the model.
    """

    kind: str = "adamw"
    objective: str = "per_token"
    weights: Any = "one"
    way: str = "forecast"
    factor: str = ""
    is_stale: bool = False
    clip_at: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """For the test."""
        return "-".join(str(getattr(v, "__name__", v)) for v in vars(self).values() if v)

    @property
    def has_first_order(self) -> bool:
        """Whether derivatives are taken."""
        return self.kind != "rmsprop" and self.way != "around, no optimizer" and not self.is_stale


ENTROPIES = [("per_token", "one"), *(("sequence", w) for w in ("one", "length"))]
CELLS = [
    *(Cell(kind, *entropy) for kind in ("adamw", "momentum") for entropy in ENTROPIES),
    *(Cell("sgd", *entropy, dtype=torch.float64) for entropy in ENTROPIES),
    *(Cell(kind, way="around") for kind in ("adamw", "momentum", "rmsprop")),
    Cell(way="around, no optimizer"),
    *(Cell(kind, factor=f) for kind in ("momentum", "adamw") for f in ("clip", "scale, clip", "scale, unscaled")),
    *(Cell(kind, way="around", factor=f) for kind in ("momentum", "adamw") for f in ("scale", "scale, unscaled")),
    Cell("sgd", factor="others"),
    *(Cell(*c, is_stale=True) for c in (("adamw",), ("sgd", "sequence"), ("sgd", "sequence", "length"))),
    *(Cell("adamw", *entropy, clip_at=1.1) for entropy in ENTROPIES[:3]),
]


class Made:
    """The scene of a cell, the step that its optimizer will take, and a probe."""

    def __init__(self, cell: Cell) -> None:
        self.scene = scene = Scene(cell.kind, lr=2e-3, dtype=cell.dtype)
        if cell.is_stale:
            scene.E = stale(scene.model, N_E, 2)
        self.gradient_scale = 0.5 if "clip" in cell.factor else 1.0
        _scale(scene, self.gradient_scale)
        self.step = real_step(scene.model, scene.optimizer)
        _scale(scene, 1.0 / self.gradient_scale)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scale" in cell.factor)
        _scale(scene, float(self.scaler.scale(torch.ones(()))))
        if cell.factor == "scale, unscaled":
            self.scaler.unscale_(scene.optimizer)
        if cell.factor == "others":
            critic = nn.Linear(3, 1)
            critic(torch.ones(1, 3)).sum().backward()
            scene.optimizer.add_param_group({"params": list(critic.parameters())})
        self.probe = EntropyChangeProbe(
            scene.model,
            None if cell.way == "around, no optimizer" else scene.optimizer,
            EntropyChangeOptions(objective=cell.objective, sequence_weights=cell.weights, clip_at=cell.clip_at),  # type: ignore[arg-type]
            grad_scaler=self.scaler,
            beside=HoldEntropy() if cell.has_first_order else None,
        )

    def forecast(self, cell: Cell) -> EntropyForecast:
        scene, U = self.scene, self.scene.U if cell.has_first_order else None
        options: dict[str, Any] = {"gradient_scale": self.gradient_scale, "causes": cell.has_first_order}
        before = held(scene)
        if cell.way == "forecast":
            found = self.probe.forecast(scene.E, U, **options)
            assert_untouched(scene, before)
            return found
        with self.probe.around_step(scene.E, U, **options) as around:
            with pytest.raises(RuntimeError, match="known after the with block"):
                _ = around.forecast
            self.scaler.step(scene.optimizer)
        for p, old, delta in zip(scene.model.parameters(), before[0], self.step.values(), strict=True):
            assert torch.allclose(p.detach() - old, delta, atol=1e-7)
        return around.forecast


def _scale(scene: Scene, factor: float) -> None:
    for p in scene.model.parameters():
        p.grad.mul_(factor)  # type: ignore[union-attr]


def weights_of(cell: Cell, log_ratio: Tensor, prompt: Tensor) -> Tensor:
    """The weight of each token of each response, column by column as it is added up; clipped."""
    if cell.weights == "length":
        rho = log_ratio.sum(1).exp()[:, None].repeat(1, log_ratio.shape[1])
    else:
        rho = torch.cat([torch.zeros(len(prompt), 1), log_ratio.cumsum(1)[:, :-1]], 1).double().exp()
    if cell.clip_at is not None:  # the groups of all prompts are equally large
        cut = torch.minimum(rho, cell.clip_at * rho.mean(0))
        rho = cut * rho.mean(0) / cut.mean(0)
    return rho


def sums(made: Made, cell: Cell, model: nn.Module, reference: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each prompt, the weighted entropy and the weights that it is divided by, [positions] or [1]; by loops."""
    E = made.scene.E
    with torch.no_grad():
        s, h = (torch.where(E.mask, t.double(), 0.0) for t in STATISTICS(model, E))
    rho, found = weights_of(cell, torch.where(E.mask, s - reference, 0.0), E.prompt), []
    for p in E.prompt.unique():
        rows = (E.prompt == p).nonzero()[:, 0].tolist()
        value, weight = torch.zeros(LONGEST, dtype=torch.float64), torch.zeros(LONGEST, dtype=torch.float64)
        for i in rows:
            n = int(E.mask[i].sum())
            for k in range(LONGEST):
                w, term = (1.0, h[i, k]) if cell.weights == "one" else (1 / n, -s[i, k])
                value[k] += rho[i, k] * (1.0 if cell.objective == "per_token" else w) * term / len(rows)
                is_counted = k < n or cell.objective == "sequence"
                weight[k] += rho[i, k] * is_counted / len(rows)
        if cell.objective == "per_token":
            value, weight = value.sum()[None], weight.sum()[None]
        if cell.weights == "length":
            value, weight = value.sum()[None], weight[:1]
        found.append((value, weight))
    return found


def exact(made: Made, cell: Cell) -> tuple[float, float, float]:
    """The change by the real step, its standard error by leaving out each prompt, and that on the same prefixes."""
    scene = made.scene
    before = copy.deepcopy(scene.model).double()
    after = copy.deepcopy(scene.model).double()
    with torch.no_grad():
        for p, delta in zip(after.parameters(), made.step.values(), strict=True):
            p.copy_((p.to(cell.dtype) + delta).double())
        reference = scene.E.log_prob if cell.is_stale else STATISTICS(before, scene.E)[0]
    both = [sums(made, cell, model, reference) for model in (before, after)]  # type: ignore[arg-type]

    def change(left_out: int | None) -> float:
        rates = []
        for of in both:
            kept = [pair for n, pair in enumerate(of) if n != left_out]
            rates.append(float((sum(v for v, _ in kept) / sum(w for _, w in kept)).sum()))  # type: ignore[union-attr]
        return rates[1] - rates[0]

    without = torch.tensor([change(n) for n in range(N_E)], dtype=torch.float64)
    with torch.no_grad():
        (s, h), (_, now) = (STATISTICS(model, scene.E) for model in (before, after))
    rho = weights_of(Cell(), torch.where(scene.E.mask, s - reference, 0.0), scene.E.prompt) * scene.E.mask
    on_same_prefixes = float(((now - h) * rho).sum() / rho.sum())  # the groups of all prompts are equally large
    return change(None), float(((without - without.mean()).square().sum() * (N_E - 1) / N_E).sqrt()), on_same_prefixes


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.shows("entropy change", "one process")
def test_a_forecast_is_the_change_by_the_step_that_is_taken(cell: Cell) -> None:
    """Its scores are in fp32; its derivatives are central differences of these, which keep 2 to 3 digits."""
    made = Made(cell)
    scene, (delta, se, on_same_prefixes) = made.scene, exact(made, cell)
    x = gradient_per_prompt(scene, scene.E, coefficients(cell.objective, cell.weights, scene))
    forecast = made.forecast(cell)
    assert forecast.is_valid, forecast.reason
    assert forecast.delta == pytest.approx(delta, abs=2e-3 * se)
    assert forecast.se == pytest.approx(se, rel=2e-3)
    assert forecast.low < forecast.delta < forecast.high
    assert (forecast.n_evaluation, forecast.v_y, forecast.objective) == (N_E, 0.0, cell.objective)
    assert sum(share.change for share in forecast.shares) == pytest.approx(forecast.delta, rel=1e-6)
    assert forecast.fixed_prefixes.true == pytest.approx(on_same_prefixes, abs=2e-3 * se)
    if cell.weights == "length":  # both weigh whole responses
        assert forecast.importance.delta == pytest.approx(forecast.delta, rel=1e-9)
    assert (forecast.first_order is not None) == cell.has_first_order
    if not cell.has_first_order:
        return
    along = x @ torch.cat([d.flatten() for d in made.step.values()]).double()
    first, causes = forecast.first_order, forecast.causes
    assert first.delta == forecast.bars_dot == pytest.approx(float(along.mean()), abs=6e-3 * float(along.std()))
    if cell.objective == "sequence":
        assert first.se == pytest.approx(float(along.std()) / N_E**0.5, rel=6e-3)
    assert abs(forecast.fixed_prefixes.true - forecast.fixed_prefixes.linear) < 0.5 * first.se
    assert causes.momentum + causes.batch + causes.decay == pytest.approx(first.delta, rel=1e-6)
    assert causes.explained == pytest.approx(1.0, rel=2e-2)
    assert (len(causes.prompts), forecast.n_update, forecast.doubt) == (N_U, N_U, "")
    assert forecast.coefficient_to_hold.change_per_unit is not None
    if cell.factor.startswith("scale"):  # a GradScaler changes nothing
        plain = Cell(cell.kind, factor="clip" if "clip" in cell.factor else "")
        expected = Made(plain).forecast(plain)
        assert forecast.coefficient_to_hold.value == pytest.approx(expected.coefficient_to_hold.value, rel=2e-3)
        assert causes.batch == pytest.approx(expected.causes.batch, rel=1e-3)

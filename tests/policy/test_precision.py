"""Parameters of 16 bits: scores in 32 bits, steps that rounding takes away, and models that cannot be converted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.policy.entropy_change import EntropyChangeProbe
from sonde.policy.entropy_options import EntropyChangeOptions
from sonde.policy.scoring.precision import in_float32
from sonde.policy.scoring.rollouts import Rollouts
from sonde.policy.stats.forecast_point import forecast_point
from sonde.policy.stats.policy_alerts import find_policy_alerts
from tests.small_policy import SmallPolicy, drawn, loss, policy


class Layers(nn.Module):
    """Layers that read the weights of the modules inside them, and keep a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.register_buffer("shift", torch.full((8,), 0.3))
        self.out = nn.Linear(8, 7)
        self.seen: list[torch.dtype] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.token(input_ids)
        for layer in self.layers:
            self.seen.append(x.dtype)
            x = x + layer(x)
        logits: Tensor = self.out(x + self.shift)
        return logits


class ReadsDirectly(SmallPolicy):
    """Uses another module's weight by itself, so that its dtype is not that of the input."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(input_ids) @ self.out.weight, self.out.weight)


def test_parameters_are_converted_while_they_are_used_and_are_their_own_again() -> None:
    model = Layers().bfloat16()
    own = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()]}
    ids = torch.randint(7, (3, 5))
    exact = Layers().double()
    exact.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    with in_float32(model, "cpu"):
        logits = model(ids)
    assert logits.dtype == torch.float32
    assert set(model.seen) == {torch.float32}
    torch.testing.assert_close(logits.double(), exact(ids), rtol=1e-5, atol=1e-6)
    assert all(t is own[name] for name, t in [*model.named_parameters(), *model.named_buffers()])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_that_fails_has_its_own_parameters_again() -> None:
    model = Layers().bfloat16()
    own = dict(model.named_parameters())

    def fails(*_: Any) -> None:
        raise MemoryError("no memory left")

    handle = model.layers[1][1].register_forward_pre_hook(fails)  # inside a layer
    with pytest.raises(MemoryError), in_float32(model, "cpu"):
        model(torch.zeros(1, 2, dtype=torch.long))
    handle.remove()
    assert all(p is own[name] for name, p in model.named_parameters())
    assert model(torch.zeros(1, 2, dtype=torch.long)).dtype == torch.bfloat16


def test_a_conversion_that_fails_half_way_is_undone() -> None:
    model = Layers().bfloat16()
    own = dict(model.named_parameters())
    bias: Tensor = model.layers[0][0].bias  # type: ignore[index, assignment]
    with pytest.raises(RuntimeError), in_float32(model, "cpu", {bias: torch.zeros(3)}):  # of another shape
        model(torch.zeros(1, 2, dtype=torch.long))
    assert all(p is own[name] for name, p in model.named_parameters())


def scene(model: nn.Module, **options: Any) -> tuple[EntropyChangeProbe, torch.optim.Optimizer, Rollouts, Rollouts]:
    kind = torch.optim.AdamW if options.get("update", "step") == "step" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=options.pop("lr", 1e-3))
    E, U = drawn(policy(), 0, 24, seed=1), drawn(policy(), 200, 12, seed=2)
    loss(model, U).backward()
    return EntropyChangeProbe(model, optimizer, EntropyChangeOptions(**options)), optimizer, E, U


def test_a_model_that_cannot_be_converted_is_scored_as_it_computes() -> None:
    probe, _, E, _ = scene(ReadsDirectly().bfloat16())
    forecast = probe.forecast(E)
    assert forecast.precision == "model"
    assert "dtype" in forecast.why_precision
    assert forecast.delta is not None
    probe, _, E, _ = scene(policy(dtype=torch.bfloat16), precision="model")
    assert (probe.forecast(E).precision, probe.forecast(E).why_precision) == ("model", "")


def test_a_model_of_functions_is_scored_as_it_computes() -> None:
    """No module's forward uses the parameters, so none of them is converted."""

    class OfFunctions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            own = policy()
            self.parts = nn.ParameterDict({"token": own.token.weight, "out": own.out.weight[:, :12]})

        def forward(self, input_ids: Tensor) -> Tensor:
            hidden = nn.functional.embedding(input_ids, self.parts["token"])
            return nn.functional.linear(hidden, self.parts["out"])

    probe, _, E, _ = scene(OfFunctions().bfloat16())
    forecast = probe.forecast(E)
    assert forecast.precision == "model"
    assert "outside the forwards of the modules" in forecast.why_precision


def test_the_forecast_of_a_rounded_step_is_that_of_the_step_that_the_optimizer_takes() -> None:
    """At 1e-5 most elements of bf16 do not move, and the others move by far more than they should."""
    probe, optimizer, E, _ = scene(policy(dtype=torch.bfloat16), lr=1e-5)
    forecast = probe.forecast(E)
    with probe.around_step(E) as around:
        optimizer.step()
    assert forecast.rounded_away > 0.5
    assert around.forecast.rounded_away == pytest.approx(forecast.rounded_away, rel=0.05)  # of a sample of elements
    assert forecast.precision == "float32"
    # A few elements near the middle of two neighbours may be rounded to the other.
    assert forecast.delta == pytest.approx(around.forecast.delta, abs=0.05 * around.forecast.se)
    points = [forecast_point(k, around.forecast.metrics()) for k in range(3)]
    assert "round away" in find_policy_alerts(points)["steps_rounded_away"]
    assert "steps_rounded_away" not in find_policy_alerts(points[:2])


def test_adapters_of_32_bits_over_a_base_of_16_lose_nothing() -> None:
    class Adapted(SmallPolicy):
        def __init__(self) -> None:
            super().__init__()
            self.bfloat16().requires_grad_(False)
            self.adapter = nn.Embedding(7, 7)

        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids).float() + self.adapter(input_ids)

    probe, optimizer, E, _ = scene(Adapted())
    assert probe.forecast(E).rounded_away == 0.0
    with probe.around_step(E) as around:
        optimizer.step()
    assert around.forecast.rounded_away == 0.0


def test_a_step_that_is_rounded_away_as_a_whole_has_a_reason() -> None:
    model = policy(dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)  # so that no element is small enough to move
    probe, optimizer, E, _ = scene(model, lr=1e-7)
    forecast = probe.forecast(E)
    assert (forecast.delta, forecast.se, forecast.is_valid) == (None, None, False)
    assert forecast.reason.startswith("the step changes nothing, since parameters of 16 bits round it away as a whole")
    assert forecast.rounded_away > 0.9
    with probe.around_step(E) as around:
        optimizer.step()
    assert around.forecast.delta is None
    assert "it is too small for parameters of 16 bits" in around.forecast.reason


def test_a_step_that_no_optimizer_takes_is_not_rounded() -> None:
    """η times the mean gradient, far below the spacing of bf16: what the parameters do not hold is added."""
    probe, _, E, U = scene(policy(dtype=torch.bfloat16), update="gradient", step_size=1e-6)
    probe_32, _, _, _ = scene(policy(dtype=torch.bfloat16).float(), update="gradient", step_size=1e-6)
    forecast, exact = probe.forecast(E, U), probe_32.forecast(E, U)
    assert forecast.finite_step.delta == pytest.approx(exact.finite_step.delta, abs=0.02 * exact.se)
    assert abs(exact.delta) > 0.2 * exact.se
    assert forecast.rounded_away == 0.0
    # As the model computes, nothing adds what the parameters do not hold.
    probe, _, E, U = scene(policy(dtype=torch.bfloat16), update="gradient", step_size=1e-6, precision="model")
    with pytest.raises(ValueError, match=r"derivatives need scores in 32 bits, got parameters of torch\.bfloat16"):
        probe.forecast(E, U)

"""`sonde.measure(curvature=…)` against exact Hessians and covariances in float64; nothing is changed by it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

import sonde
from tests.batch_size.checkpoint.regression import Batch, batches, draw, endless, example_loss, loss, model_of
from tests.oracles import per_example_gradients, population

QUICK = {"sizes": (1, 4, 16), "draws": 8, "held_out": 8}


def reading(model: nn.Module, data: Any, loss: Any = loss, **options: Any) -> sonde.CurvatureReading:
    curvature = sonde.Curvature(**QUICK | options)
    found = sonde.measure(model, loss, data, unit="rows", verbose=False, most_batches=30, curvature=curvature)
    assert found.reading.dropped == {}  # no gradient of a draw was left behind
    assert found.curvature is not None
    return found.curvature


def holds(interval: sonde.RatioInterval, value: float) -> bool:
    return interval.low is not None and interval.high is not None and interval.low <= value <= interval.high


class Quadratic(nn.Module):
    """½ θᵀHθ + (G + √Σ x)ᵀθ at θ = 0: gradient, covariance and Hessian are G, Σ and H, all diagonal."""

    def __init__(self, hessian: list[float], gradient: list[float], n_each: int = 10) -> None:
        super().__init__()
        self.hessian, self.gradient = (
            torch.tensor(values, dtype=torch.float64).repeat_interleave(n_each) for values in (hessian, gradient)
        )
        self.theta = nn.Parameter(torch.zeros_like(self.gradient))

    def forward(self, x: Tensor) -> Tensor:
        return (self.hessian * self.theta.square()).sum() / 2 + ((self.gradient + x) @ self.theta).mean()


def noise(n_batches: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 20, generator=generator, dtype=torch.float64) for _ in range(n_batches)]


@pytest.mark.parametrize("p", [(1.0, 1.0), (0.02, 3.0)])
def test_a_quadratic_whose_two_noise_scales_are_far_apart(p: tuple[float, float]) -> None:
    """The gradient is along directions of little curvature, so that B_noise is 30 times B_simple or more."""
    model = Quadratic([1.0, 0.001], [0.1, 1.0])
    g, h = model.gradient, model.hessian
    preconditioner = torch.tensor(p, dtype=torch.float64).repeat_interleave(10)
    optimizer = None
    if p != (1.0, 1.0):  # Adam's second moment, so old that a single gradient does not change it
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.9, 1 - 1e-12), eps=0.0)
        second = preconditioner.pow(-2) * (1 - optimizer.defaults["betas"][1] ** 1001)
        optimizer.state[model.theta] = {"step": torch.tensor(1000.0), "exp_avg": 7 * g, "exp_avg_sq": second}
        preconditioner = 0.5 * preconditioner
    signal, noise_part = ((preconditioner * g) @ (h * preconditioner * g)).item(), (h * preconditioner**2).sum().item()
    fall = (g @ (preconditioner * g)).item()
    if optimizer is None:
        assert noise_part / signal > 30 * 20 / (g @ g).item()
    found = reading(model, noise(160), lambda m, x: m(x), optimizer=optimizer)
    assert holds(found.b_noise, noise_part / signal)
    assert found.doubt == ""
    assert [step.batch for step in found.steps] == pytest.approx([4, 16, 64])
    for step in found.steps:
        assert holds(step.size, fall / (signal + noise_part / step.batch))
        expected = fall**2 / (signal + noise_part / step.batch) / 2
        assert step.fall == pytest.approx(expected, abs=4 * (step.fall_error or 0.0))
    assert ("Adam's learning rate" in str(found)) == (optimizer is not None)


def exact(model: nn.Module, data: Batch) -> tuple[float, float]:
    """tr(HΣ) and GᵀHG of a finite data set, from the whole Hessian and every example's gradient."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in named.values()]

    def of_flat(flat: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(flat.split(sizes), named.values(), strict=True)]
        return loss(lambda x: functional_call(model, dict(zip(named, parts, strict=True)), (x,)), data)

    whole = jacrev(grad(of_flat))(torch.cat([p.flatten() for p in named.values()]))
    each = per_example_gradients(model, example_loss, *data)
    mean = each.mean(0)
    deviations = each - mean
    return float(((deviations @ whole) * deviations).sum(1).mean()), float(mean @ whole @ mean)


def test_a_network_with_its_exact_hessian() -> None:
    model = copy.deepcopy(model_of()).double()
    x, y = draw(400, torch.Generator().manual_seed(1))
    data = x.double() * torch.logspace(0.5, -0.5, 8, dtype=torch.float64), y.double()
    noise_part, signal = exact(model, data)
    found = reading(model, endless(data, 8, seed=2), draws=12, held_out=12, sizes=(1, 32))
    assert found.doubt == ""
    assert holds(found.b_noise, noise_part / signal)
    b_simple = population(per_example_gradients(model, example_loss, *data)).b_simple
    assert not holds(found.b_noise, b_simple)  # which is another quantity


def test_muon_is_read_by_the_law_of_the_fall() -> None:
    """Its step has one length whatever the gradient's, so its slope depends on the batch."""
    model = model_of()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(rest, lr=0.02, momentum=0.9)]
    found = reading(model, endless(draw(4000, torch.Generator().manual_seed(1)), 8, seed=2), optimizer=both, draws=12)
    assert found.direction == "Muon and SGD"
    assert found.largest_step is None  # no multiple of the best step at a finite batch
    sizes = [step.size.ratio for step in found.steps]
    assert None not in sizes
    assert sizes == sorted(sizes)  # type: ignore[type-var]


# Everything is as it was.


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    groups = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    grads = [p.grad for p in model.parameters()]
    tensors = [*model.parameters(), *model.buffers(), *grads, *state, torch.get_rng_state()]
    return [[None if t is None else t.detach().clone() for t in tensors], copy.deepcopy(groups)]


def in_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    for batch in batches([8, 8]):
        loss(model, batch).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("along", ["gradient", "optimizer"])
def test_everything_is_as_before(along: str, fails: bool) -> None:
    model, optimizer = in_training()
    before, n_looks = bits(model, optimizer), 0

    def counted(m: Any, batch: Batch) -> Tensor:
        nonlocal n_looks
        n_looks += not torch.is_grad_enabled()
        if fails and n_looks == 60:
            raise KeyboardInterrupt
        return loss(m, batch)

    options = {"optimizer": optimizer if along == "optimizer" else None, "batches": endless_rows()}
    if fails:
        with pytest.raises(KeyboardInterrupt):
            reading(model, batches([4] * 8), counted, **options)
    else:
        found = reading(model, batches([4] * 8), counted, **options)
        assert found.n_draws == 8
        assert found.b_noise.status != "unresolved"
    tensors, groups = bits(model, optimizer)
    assert groups == before[1]
    for now, then in zip(tensors, before[0], strict=True):
        assert (now is None and then is None) or torch.equal(now, then)


def test_a_graph_from_before_can_still_be_differentiated() -> None:
    """Backward refuses weights that count as written to."""
    model, batch = model_of(), batches([8], seed=5)[0]
    graph, expected = loss(model, batch), torch.autograd.grad(loss(model, batch), list(model.parameters()))
    reading(model, endless_rows())
    found = torch.autograd.grad(graph, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def endless_rows() -> Iterator[Batch]:
    return endless(draw(2000, torch.Generator().manual_seed(1)), 8, seed=2)


def test_looks_at_a_batch_have_the_same_dropout_and_draws_have_others() -> None:
    """With other masks at each look, the differences would be noise: a change of 1e-6 would change the loss by 0.1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    seen: dict[bool, list[float]] = {True: [], False: []}

    def seeing(m: Any, batch: Batch) -> Tensor:
        if isinstance(m, nn.Sequential):
            seen[torch.is_grad_enabled()].append(float(m[1](torch.ones(64)).sum()))
        return loss(m, batch)

    found = reading(model, batches([4] * 8), seeing, batches=endless_rows())
    assert found.steps[0].fall is not None
    looks = torch.tensor(seen[False]).view(-1, QUICK["held_out"])  # type: ignore[arg-type]
    assert (looks == looks[0]).all()
    assert len(set(looks[0].tolist())) > 4
    assert len(set(seen[True][: 9 * 16])) > 10


def test_a_loss_that_steps_the_optimizer_is_refused() -> None:
    model, optimizer = in_training()

    def stepping(m: Any, batch: Batch) -> Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                m[0].bias.add_(1e-3)
        return loss(m, batch)

    with pytest.raises(RuntimeError, match="the weights changed while they were measured"):
        reading(model, batches([4] * 200), stepping, optimizer=optimizer)


# Words, logs and refusals.


def test_words_and_a_log(tmp_path: Path) -> None:
    model = Quadratic([1.0, 0.001], [0.1, 1.0])
    log = sonde.RunLog(sonde.JsonlSink(tmp_path), every=1)
    options = sonde.Curvature(**QUICK)  # type: ignore[arg-type]
    data = noise(200)
    found = sonde.measure(model, lambda m, x: m(x), data, unit="rows", log=log, verbose=False, curvature=options)
    assert found.curvature is not None
    interval = found.curvature.b_noise
    ratio, b_simple = interval.ratio or 0.0, found.reading.b_simple or 0.0
    assert f"\nB_noise {ratio:.3g} rows [" in str(found)
    assert f"\nB_noise is {ratio / b_simple:.3g} × B_simple" in str(found)
    (logged,) = sonde.read_run(tmp_path).own
    written = {"gns/b_noise": ratio, "gns/b_noise_low": interval.low, "gns/b_noise_high": interval.high}
    assert logged.metrics == pytest.approx(written)
    pytest.importorskip("bokeh", reason="the report needs bokeh")
    assert "The noise scale with curvature" in sonde.write_report(tmp_path).read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draws": 3}, "draws must be a whole number from 4 up, got 3"),
        ({"held_out": 0}, "held_out must be a whole number from 1 up, got 0"),
        ({"sizes": (4,)}, "sizes must be two or more rising numbers of micro-batches, got (4,)"),
        ({"sizes": (1, 4, 4)}, "rising numbers"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "would not move the model"),
    ],
)
def test_refusals(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        reading(model_of(), batches([4] * 8), **options)
    assert says in str(raised.value)


def test_what_is_no_curvature_is_refused() -> None:
    with pytest.raises(ValueError, match=r"curvature must be True, False or a sonde\.Curvature, got 3"):
        sonde.measure(model_of(), loss, batches([4] * 8), unit="rows", verbose=False, curvature=3)  # type: ignore[arg-type]


def test_an_optimizer_without_a_rate_and_weights_of_16_bits_are_refused() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="with a learning rate above 0"):
        reading(model, batches([4] * 8), optimizer=torch.optim.AdamW(model.parameters(), lr=0.0))
    with pytest.raises(ValueError, match="load the model in float32"):
        reading(model.bfloat16(), batches([4] * 8))


@pytest.mark.parametrize("n_batches", [4, 24])
def test_an_iterator_that_curvature_uses_up_has_two_reasons(n_batches: int) -> None:
    data = iter(batches([4] * n_batches))
    options = sonde.Curvature(**QUICK)  # type: ignore[arg-type]
    found = sonde.measure(model_of(), loss, data, unit="rows", verbose=False, curvature=options)
    assert found.curvature is not None
    assert "the data ended before" in found.curvature.b_noise.reason
    assert "give 152 on each rank" in found.curvature.b_noise.reason
    assert (found.ended, found.loss, found.n_batches) == ("data ended", None, 0)
    assert str(found).startswith("B_simple not known (")


def test_what_cannot_be_measured_has_a_reason() -> None:
    assert "the data ended before one draw of 16" in reading(model_of(), batches([4] * 20)).b_noise.reason
    few = reading(model_of(), batches([4] * (8 + 3 * 16 + 8))).b_noise
    assert few.reason == "2 draws and 8 held-out batches are too few: give data for 4 of each"
    flat = Quadratic([0.0, 0.0], [0.1, 1.0])
    straight = reading(flat, noise(160), lambda m, x: m(x))
    assert "curves by more than its rounding" in straight.b_noise.reason
    saddle = Quadratic([-1.0, -1.0], [0.1, 1.0])
    down = reading(saddle, noise(160), lambda m, x: m(x))
    assert "the curvature along the mean gradient is negative" in down.b_noise.reason

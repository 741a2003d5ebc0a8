"""Adam's metric, against the optimizer's own second moment."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sonde.batch_size.taps.metric import AdamMetric, add_parts
from tests.batch_size.loops import (
    assert_same,
    attached,
    flat_grad,
    piece_losses,
    small_model,
    train,
)
from tests.oracles import window_by_hand


@pytest.mark.parametrize("variant", [{}, {"fused": True}, {"amsgrad": True}], ids=str)
def test_adam_metric_is_the_weighted_sum_of_squares(variant: dict[str, bool]) -> None:
    """Σ P_j g_j² with the second moment of the previous step, from the optimizer's own state, by hand."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **variant)
    losses = piece_losses(model, [4, 6])
    with attached(model, optimizer, metric="adam") as probe:
        for _ in range(2):
            weight = []
            for p in model.parameters():
                state = optimizer.state.get(p)
                if state:
                    moment = state["max_exp_avg_sq" if variant.get("amsgrad") else "exp_avg_sq"]
                    corrected = moment.double() / (1 - 0.999 ** float(state["step"]))
                    weight.append(1 / (corrected.sqrt() + 1e-8).flatten())
            gradients = [flat_grad(model, loss()) for loss in losses]
            for loss, n in zip(losses, (4, 6), strict=True):
                with probe.piece(units=n):
                    loss().backward()
            norm = probe.clip_grad_norm_(math.inf)
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
    # The first window came before any second moment, which is no cause for alarm.
    assert (reading.windows, sum(reading.dropped.values())) == (1, 1)
    assert "the optimizer's second moment, which exists only after its first step" in next(iter(reading.dropped))
    assert probe.alerts == {}
    root = torch.cat(weight).sqrt()
    assert_same(reading, window_by_hand([root * h for h in gradients], [1, 1], [4, 6], root * sum(gradients)))
    assert float(norm) == pytest.approx(float(sum(gradients).norm()), rel=1e-5)  # type: ignore[union-attr]


def test_adam_metric_follows_a_loaded_state() -> None:
    """Resuming: the optimizer's state is loaded after the probe was attached."""
    model = small_model()
    trained = torch.optim.Adam(model.parameters(), lr=0.0)
    piece_losses(model, [4])[0]().backward()
    trained.step()
    trained.zero_grad()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    with attached(model, optimizer, metric="adam") as probe:
        optimizer.load_state_dict(trained.state_dict())
        train(model, probe, optimizer, windows=2)
        assert probe.reading().windows == 2


def test_adam_metric_needs_an_optimizer_of_adams_kind() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="got no optimizer"):
        attached(model, metric="adam")
    with pytest.raises(ValueError, match="got SGD: use Adam"):
        attached(model, torch.optim.SGD(model.parameters(), lr=0.1), metric="adam")
    with pytest.raises(ValueError, match="got Adamax: use Adam"):
        attached(model, torch.optim.Adamax(model.parameters()), metric="adam")
    with pytest.raises(ValueError, match="metric must be"):
        attached(model, metric="lion")


def test_sums_are_kept_in_a_dtype_that_the_device_has() -> None:
    """Apple's GPUs have no float64. Fake tensors know a device's dtypes without having the device."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        parameter = torch.nn.Parameter(torch.empty(6, device="mps"))
        optimizer = torch.optim.AdamW([parameter])
        metric, gradient = AdamMetric(optimizer, [parameter]), torch.empty(6, device="mps")
        assert metric.parts([0], [gradient])[0][1].dtype == torch.float32  # before a second moment
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg_sq": torch.empty(6, device="mps")}
        got = metric.parts([0], [gradient])[0][1]
        assert (got.dtype, got.device.type) == (torch.float32, "mps")


def test_the_norm_of_a_whole_gradient_is_that_of_its_ranges() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 17)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300)).square().sum().backward()
    optimizer.step()
    metric, grad = AdamMetric(optimizer, list(model.parameters())), torch.randn(17, 300)
    of_ranges = [
        part for a, b in [(0, 7), (7, 2000), (2000, 5100)] for part in metric.parts([0], [grad.flatten()[a:b]], a)
    ]
    whole, cut = (add_parts(1, parts, torch.device("cpu")) for parts in (metric.parts([0], [grad]), of_ranges))
    assert float(cut) == pytest.approx(float(whole), rel=1e-12)


def test_a_gradient_without_a_second_moment_has_no_norm_unless_it_is_zero() -> None:
    model = torch.nn.Linear(3, 2)
    metric = AdamMetric(torch.optim.AdamW(model.parameters()), list(model.parameters()))
    for start, shape in ((0, (6,)), (None, (2, 3))):
        assert float(metric.parts([0], [torch.zeros(shape)], start)[0][1]) == 0.0
        assert math.isnan(metric.parts([0], [torch.ones(shape)], start)[0][1])

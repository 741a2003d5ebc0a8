"""What cannot be measured is refused, with the way out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from tests.batch_size.checkpoint.regression import Batch, batches, loss, model_of


def refused(data: Any = None, error: type[Exception] = ValueError, **options: Any) -> str:
    """The message of a measurement that must be refused."""
    data = batches([4] * 12) if data is None else data
    model = options.pop("model", None) or model_of()
    with pytest.raises(error, match=r".") as raised:
        sonde.measure(model, options.pop("loss", loss), data, **{"unit": "rows", "verbose": False} | options)
    assert not any(p._backward_hooks for p in model.parameters())
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"until": 0}, "use 0.1 for ± 10 %"),
        ({"until": math.nan}, "use 0.1 for ± 10 %"),
        ({"until": "0.1"}, "use 0.1 for ± 10 %"),
        ({"most_batches": 0}, "most_batches must be a whole number from 1 up, got 0"),
        ({"most_batches": 2.5}, "most_batches must be a whole number"),
        ({"batch": -1}, "batch must be a positive number of units, got -1"),
        ({"batch": 10**400}, "batch must be a positive number of units, got 1000"),
        ({"loss": 3}, "loss must be a function of the model and a batch, got 3"),
        ({"unit": ""}, "unit must name the independent sample"),
        ({"groups": 7}, "groups must be 'blocks', 'kinds', 'parameters', None or a function"),
        ({"units": 0}, "units must be positive and finite, got 0"),
        ({"units": lambda b: float("inf")}, "units must be positive and finite, got inf"),
        ({"weight": lambda b: -len(b[0])}, "weight must be positive and finite, got -4"),
    ],
)
def test_options(options: dict[str, Any], says: str) -> None:
    assert says in refused(**options)


def test_batches() -> None:
    assert "batches must be an iterable of micro-batches, got int" in refused(3)
    assert "got Tensor: pass a DataLoader or a list" in refused(torch.randn(4, 8))
    assert "there was none: pass two or more" in refused([])
    used = iter(batches([4] * 3))
    list(used)
    assert "a new iterator if this one was used before" in refused(used)
    assert "there was only one: pass two or more" in refused(batches([4]))
    x, y = batches([4])[0]
    unclear = "which dim is the batch is not clear: the batch has 0 float32 [4, 8]; 1 float32 [3, 2]: pass units="
    assert unclear in refused([(x, y[:3])] * 4)
    assert "the batch has no tensor with rows: pass units=" in refused(["a", "b"])


def test_losses() -> None:
    def per_example(m: nn.Module, b: Batch) -> Tensor:
        return (m(b[0]) - b[1]).square().sum(-1)

    @torch.no_grad()
    def without_graph(m: nn.Module, b: Batch) -> Tensor:
        return loss(m, b)

    assert "got torch.float32 of shape (4,): return the mean over the batch" in refused(loss=per_example)
    assert "got torch.float32 of shape (): " in refused(loss=without_graph)
    assert "got float: return" in refused(loss=lambda m, b: 1.0)
    assert "got dict: return" in refused(loss=lambda m, b: {"loss": loss(m, b)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_window_with_a_loss_that_is_not_finite_is_left_out(value: float) -> None:
    data = batches([4] * 12)
    data[8] = (data[8][0], data[8][1] * value)
    measurement = sonde.measure(model_of(), loss, data, unit="rows", verbose=False)
    assert measurement.reading.windows == 2  # of 2 and 4 batches; the third has the ninth
    assert [n for reason, n in measurement.reading.dropped.items() if "finite" in reason] == [1]
    assert not math.isfinite(measurement.loss or 0.0)


def test_a_loss_that_trains_the_model() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def training(m: nn.Module, b: Batch) -> Tensor:
        torch.autograd.backward(loss(m, b), inputs=list(m.parameters()))
        optimizer.step()
        return loss(m, b)

    assert "the weights changed while they were measured" in refused(model=model, loss=training, error=RuntimeError)


def test_gradients_that_a_hook_changes_are_no_measurement() -> None:
    """What the optimizer would get is no multiple of the pieces' sum: no number, and the reason."""
    model, generator = model_of(), torch.Generator().manual_seed(0)

    def add_noise(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.add_(0.3 * p.grad.norm() * torch.randn(p.shape, generator=generator))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(add_noise)
    said = refused(model=model)
    assert said.startswith("no window can be measured: ")
    assert "not a multiple of the sum of its pieces" in said

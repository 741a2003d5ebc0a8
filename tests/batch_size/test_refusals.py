"""Bad input: refused at the door, with the way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.batch_size.loops import Recording, attached, piece_losses, small_model, train

ADAM = torch.optim.Adam


def test_refuses_lazy_parameters_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'1.weight' has no shape yet.*attach after one forward pass"):
        attached(model)
    model(torch.randn(1, 4))
    attached(model).close()


def test_refuses_complex_parameters_by_name() -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"gradients must be real, got torch.complex64 for 'phase'"):
        attached(model)


@pytest.mark.parametrize("given", [None, [nn.Linear(2, 2)]])
def test_refuses_what_is_no_model(given: Any) -> None:
    with pytest.raises(ValueError, match=r"model must be a torch[.]nn[.]Module, got"):
        attached(given)


def test_refuses_inference_mode() -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match="attach outside of it"):
        attached(small_model())


def test_refuses_a_model_without_trainable_parameters() -> None:
    with pytest.raises(ValueError, match="no trainable parameters: attach after requires_grad is set"):
        attached(small_model().requires_grad_(False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": " "}, "unit must name the independent sample"),
        ({"units_per_piece": 0}, "units_per_piece must be positive"),
        ({"units_per_piece": math.nan}, "units_per_piece must be positive"),
        ({"log_every": 0}, "every must be a whole number"),
        ({"log_every": 2.5}, "every must be a whole number"),
        ({"log_every": math.inf}, "every must be a whole number"),
        ({"log_every": "5"}, "every must be a whole number"),
        ({"unit": 5}, "unit must name the independent sample"),
        ({"units_per_piece": "8"}, "units_per_piece must be a number, 'first dim' or a function"),
        ({"allowance": "x"}, "allowance must be seconds"),
        ({"staging_mib": math.inf}, "staging_mib must be"),
        ({"sinks": [Recording(), 7]}, "a log needs places for records, got 7"),
        ({"sinks": None}, "a log needs places for records, got None"),
        ({"grad_scaler": True}, "grad_scaler must be"),
        ({"optimizer": "adam"}, "optimizer must be a torch.optim.Optimizer"),
        ({"allowance": -1.0}, "allowance must be seconds"),
        ({"allowance": 10**400}, "allowance must be seconds"),
        ({"units_per_piece": 10**400}, "units_per_piece must be positive"),
        ({"mesh": 3}, "mesh must be a DeviceMesh, got 3"),
        ({"process_group": 3}, "process_group must be a torch.distributed.ProcessGroup that this rank is in, got 3"),
        ({"staging_mib": -1}, "staging_mib must be"),
        ({"budget": 0}, "budget must be a part of the run's time between 0 and 1, got 0: use 0.01 for 1 %"),
        ({"budget": 1.0}, "budget must be a part"),
        ({"budget": math.nan}, "budget must be a part"),
        ({"budget": "1%"}, "budget must be a part"),
        ({"budget": True}, "budget must be a part"),
        ({"rules": [1]}, "rules must be a function for each type of layer, got .1."),
        ({"rules": {int: len}}, "rules must be a function for each type of layer"),
        ({"every": 0}, "every must be a whole number of windows from 1 up, got 0: use 1 to measure every window"),
        ({"every": 2.5}, "every must be a whole number of windows"),
        ({"every": True}, "every must be a whole number of windows"),
        ({"groups": "layers"}, "groups must be"),
        (
            {"groups": lambda name: 3 if name.startswith("3") else name},
            "groups must return a group's name, a str, for each parameter, got 3 for '3.weight': return",
        ),
        ({"groups": 3}, "groups must be"),
        ({"log_groups": "yes"}, "log_groups must be"),
        ({"per_example": "always", "metric": "adam", "optimizer": ADAM}, "per_example='always' needs the gradients"),
        ({"metric": "lion"}, "metric must be"),
        ({"metric": "l1"}, "one or several of"),
        ({"metric": ()}, "one or several of"),
        ({"metric": ("sign", "sign")}, "once"),
        ({"metric": ("euclidean", "adam")}, "got no optimizer"),
        ({"metric": "adam", "optimizer": torch.optim.SGD}, "got SGD: use Adam"),
        ({"metric": "adam", "optimizer": torch.optim.Adamax}, "got Adamax: use Adam"),
        (
            {"metric": "spectral", "staging_mib": 0.5},
            r"needs 1.0 MiB for '3.weight' of shape \(160, 160\), got staging_mib=0.5",
        ),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates its closure several times a step"),
    ],
)
def test_refuses_bad_options_and_leaves_no_hook(options: dict[str, Any], message: str) -> None:
    model, made = small_model(), options.get("optimizer")
    if isinstance(made, type):
        options = options | {"optimizer": made(model.parameters())}
    with pytest.raises(ValueError, match=message):
        attached(model, **options)
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize(
    "counts",
    [
        {"units": 0},
        {"units": -4},
        {"units": math.nan},
        {"units": 4, "weight": math.nan},
        {"units": 4, "weight": 0.0},
        {"unit_weights": []},
        {"unit_weights": [1.0, math.nan]},
        {"units": "8"},
        {"units": 10**400},
        {"units": True},
        {"units": torch.ones(2)},
        {"units": torch.tensor(0.0)},
        {"units": 4, "weight": torch.tensor(math.nan)},
        {"unit_weights": torch.tensor([1.0, math.nan])},
        {"unit_weights": torch.tensor([1.0, -1.0])},
        {"units": 4, "unit_weights": [1.0] * 8},
        {"unit_weights": torch.ones(2, 2)},
    ],
    ids=str,
)
def test_refuses_bad_counts_at_the_door(counts: dict[str, Any]) -> None:
    with attached(small_model()) as probe:
        with pytest.raises(ValueError, match=r"must be|must hold"), probe.piece(**counts):
            pytest.fail("the piece was entered")
        with probe.piece(units=4):  # and the probe goes on
            pass


@pytest.mark.parametrize("given", [{"units_per_piece": None}, {"unit": ("rows", "tokens")}], ids=str)
def test_a_missing_number_of_units_is_refused(given: dict[str, Any]) -> None:
    model = small_model()
    with attached(model, **given) as probe:
        with pytest.raises(RuntimeError, match="pass units_per_piece="), probe.piece():
            pass
        piece_losses(model, [4])[0]().backward()
        probe.step()
        assert "pass units_per_piece=" in probe.reading().reason


def test_wrong_order_of_calls() -> None:
    with attached(small_model(), units_per_piece=1) as probe, probe.piece():
        with pytest.raises(RuntimeError, match="inside another piece"), probe.piece():
            pass
        with pytest.raises(RuntimeError, match="inside a piece"):
            probe.step()


@pytest.mark.parametrize("every", [1, 10**6])
def test_a_closed_probe_takes_nothing_more(every: int) -> None:
    """Closed in a window that would end quietly too."""
    model = small_model()
    probe = attached(model, every=every)
    train(model, probe, windows=4)
    assert (probe._ends._n_quiet > 0) == (every > 1)
    probe.close()
    calls: list[Callable[[], Any]] = [probe.step, lambda: probe.piece(units=4), lambda: probe.clip_grad_norm_(1.0)]
    for call in (*calls, lambda: probe.log(loss=1.0)):
        with pytest.raises(RuntimeError, match="the probe is closed"):
            call()
    assert probe._ends.n_windows == 4


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"loss": torch.ones(3)}, "0-dim tensor"),
        ({"loss": "low"}, "takes a number"),
        ({"gns/b_simple": 7.0}, "is measured by sonde"),
        ({"a b": 1.0}, "letters, digits"),
        ({"z": torch.zeros((), dtype=torch.complex64)}, "real number"),
    ],
)
def test_log_refuses(scalars: dict[str, Any], message: str) -> None:
    with attached(small_model()) as probe, pytest.raises(ValueError, match=message):
        probe.log(**scalars)

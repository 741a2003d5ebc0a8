"""The bodies of the tests on a GPU are right: on a CPU, they pass. (`tests/gpu/` is skipped without a GPU.)

On a pretended device, which a GPU's checks are forbidden to wait for, those of one process pass too.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.gpu.set_ups import (
    ON_RANKS,
    SETUPS,
    WINDOWS,
    check,
    compared,
    entropy_forecast,
    equal,
    no_waiting,
    train_policy,
)
from tests.mutants import Mutant
from tests.pretend_device import DEVICE, HostReadError, MixedDevicesError, PretendDevice
from tests.ranks import Ranks

CPU = torch.device("cpu")
NOT_PRETENDED = {
    "backwards on two streams": "the pretended device has one stream",
    "single examples": "its tensors are not plain ones, which layers must have",
    "a fused optimizer": "torch fuses on devices that it knows",
    **dict.fromkeys(("Adam's metric", "the sign metric", "the spectral metric"), "metrics together show each"),
}


@pytest.mark.parametrize("name", SETUPS)
def test_one_process(name: str) -> None:
    reading, is_untouched = compared(CPU, SETUPS[name])
    assert is_untouched
    assert reading.windows >= {"one window in three": 2, "Adam's metric": WINDOWS - 1}.get(name, WINDOWS)
    assert reading.grad_sq > 0
    if name not in NOT_PRETENDED:
        with PretendDevice():
            on_device, is_untouched = compared(DEVICE, SETUPS[name])
        check(on_device, reading, is_untouched=is_untouched)


@pytest.mark.slow
def test_two_ranks(ranks2: Ranks) -> None:
    for name, setup in ON_RANKS.items():
        for reading, is_untouched in ranks2(compared, CPU, setup):
            assert is_untouched, name
            assert reading.windows == WINDOWS, name
            assert reading.grad_sq > 0, name


def test_entropy() -> None:
    forecast = entropy_forecast(CPU)
    assert forecast != 0
    with PretendDevice():
        assert entropy_forecast(DEVICE) == pytest.approx(forecast, rel=1e-3)


def test_training_beside_forecasts() -> None:
    assert equal(train_policy(CPU, probed=False), train_policy(CPU, probed=True))
    with PretendDevice():
        probed = train_policy(DEVICE, probed=True)
        assert equal(train_policy(DEVICE, probed=False), probed)


def test_a_changed_run_is_noticed() -> None:
    """The comparison with a run without a probe can fail."""
    mutant = Mutant(
        "a hook changes the gradient that it reads",
        "sonde.batch_size.taps.leaf_hooks:PieceGradient._keep",
        "witness, cut = self._tap.witness, self._tap.cut",
        "witness, cut = self._tap.witness, self._tap.cut; [g.mul_(1.001) for g in grads.values()]",
    )
    with mutant.applied():
        _, is_untouched = compared(CPU, {})
    assert not is_untouched


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("train_window", "model(x).square().mean().backward()", "model(x).square().mean().backward(); bool(x.sum())"),
        ("end_window", "probe.step()", "probe.step(); probe._reader._sums._small.sum().item()"),
    ],
)
def test_a_body_that_waits_itself_is_noticed(function: str, old: str, new: str) -> None:
    """A GPU would raise there, in every set-up."""
    mutant = Mutant("a body that waits", f"tests.gpu.set_ups:{function}", old, new)
    with mutant.applied(), PretendDevice(), pytest.raises(HostReadError, match="outside of sonde"):
        compared(DEVICE, {})


def test_a_body_that_mixes_devices_is_noticed() -> None:
    mutant = Mutant(
        "inputs stay on the host", "tests.gpu.set_ups:rows_on", 'device="cpu").to(device)', 'device="cpu").to("cpu")'
    )
    with mutant.applied(), PretendDevice(), pytest.raises(MixedDevicesError):
        compared(DEVICE, {})


def test_the_sync_debug_mode_ends_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's warning at the first call would otherwise fail a test, and leave the mode on for all tests after it."""
    modes = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if len(modes) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)

    def fail() -> None:
        assert modes == ["error"]
        raise ZeroDivisionError

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(ZeroDivisionError), no_waiting(torch.device("cuda")):
        fail()
    assert modes == ["error", "default"]

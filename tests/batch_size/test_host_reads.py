"""Between attach and reading(), nothing waits for the device: on a device that computes behind the host's back."""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import pytest
import torch

import sonde
from sonde.batch_size.taps import tap
from sonde.batch_size.taps.leaf_hooks import STAGED_NUMEL
from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.mutants import Mutant
from tests.pretend_device import DEVICE, HostReadError, PretendDevice, on_host

WINDOWS = 5

SETUPS: dict[str, dict[str, Any]] = {
    "pieces": {},
    "weights on the device": {"weighted": True},
    "two backwards in a piece": {"twice": True},
    "single examples": {"per_example": "always", "sizes": (8,)},
    "single examples of several pieces": {"per_example": "always"},
    "single examples until pieces are seen": {"per_example": "auto", "windows": 8},
    "gradients that wait are few": {"staging_mib": 1e-6},
    "large gradients wait too": {"waits": STAGED_NUMEL},
    "frozen later": {"freezes": True},
    "a GradScaler": {"scaled": True},
    "a GradScaler and a clip": {"scaled": True, "clip": 1.0},
    "Adam's metric": {"metric": "adam"},
    "further metrics": {"metric": ("euclidean", "adam", "sign", "spectral")},
    "one window in three": {"every": 3, "clip": 1.0},
    "a budget": {"budget": 0.5},
    "a clip": {"clip": 0.1},
    "a clip that does nothing": {"clip": 1e9},
    "a norm alone": {"clip": float("inf")},
    "another norm": {"clip": 0.1, "norm_type": 3.0},
    "the largest element": {"clip": 0.1, "norm_type": float("inf")},
    "scalars of the user": {"logs": True},
    "an overflow": {"overflows": True},
}


WITH_FLOAT64_ALONE = (
    *("gradients that wait are few", "large gradients wait too", "frozen later", "a GradScaler", "scalars of the user"),
    *("single examples of several pieces", "single examples until pieces are seen", "one window in three", "a budget"),
    *("a clip that does nothing", "a norm alone", "another norm", "weights on the device", "two backwards in a piece"),
)
"""Nothing there depends on whether the device has fp64 that the others do not show."""


def train(
    device: torch.device,
    pretended: PretendDevice | None = None,
    *,
    probed: bool = True,
    weighted: bool = False,
    twice: bool = False,
    freezes: bool = False,
    scaled: bool = False,
    clip: float | None = None,
    norm_type: float = 2.0,
    logs: bool = False,
    overflows: bool = False,
    windows: int = WINDOWS,
    waits: int = 16_384,
    sizes: tuple[int, ...] = (4, 2, 6),
    **options: Any,
) -> tuple[sonde.NoiseScaleReading | None, list[torch.Tensor]]:
    """A reading of some windows, and the weights after them; on a pretended device, every read of sonde's raises."""
    model = small_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0) if scaled else None
    options = {"grad_scaler": scaler, "log_every": 4, "groups": str, "staging_mib": 8.0} | options
    with mock.patch.object(tap, "STAGED_NUMEL", waits):  # the model has gradients of both kinds
        probe = attached(model, optimizer, **options) if probed else None
    generator = torch.Generator(device="cpu").manual_seed(0)
    no_reads = pretended.no_reads() if pretended is not None else contextlib.nullcontext()
    with probe or contextlib.nullcontext(), no_reads:
        for window in range(windows):
            if freezes and window == 3:
                model[0].bias.requires_grad_(False)  # type: ignore[union-attr]
                model[0].bias.grad = None  # type: ignore[union-attr]
            for n in sizes:
                x, y = (t.to(device, non_blocking=True) for t in batch(n, generator))
                units: Any = torch.tensor(float(n), device="cpu").to(device) if weighted else n
                weights = torch.linspace(0.5, 1.0, n, device=device) if weighted else None
                declared = (
                    probe.piece(units=units, weight=units, unit_weights=weights) if probe else contextlib.nullcontext()
                )
                with declared:
                    for _ in range(1 + twice):
                        loss = mean_loss(model, x, y) * (1e30 if overflows and window == 3 else 1.0)
                        (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
            if probe and logs:
                probe.log(loss=loss.detach(), rate=0.1)
            if probe and clip is not None:
                probe.clip_grad_norm_(clip, norm_type)
            elif probe:
                probe.step()
            elif clip is not None:
                sonde.clip_grad_norm_(model.parameters(), clip, norm_type)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            optimizer.zero_grad()
            if pretended is not None:
                pretended.catch_up(but=5)  # the device lags behind
    reading = probe.reading() if probe else None
    return reading, [on_host(p.detach()).clone() for p in model.parameters()]


@functools.cache
def on_cpu(name: str) -> sonde.NoiseScaleReading | None:
    """The reading of a set-up on the CPU."""
    return train(torch.device("cpu"), **SETUPS[name])[0]


@pytest.mark.parametrize(
    ("name", "has_float64"),
    [*((name, True) for name in SETUPS), *((name, False) for name in SETUPS if name not in WITH_FLOAT64_ALONE)],
)
def test_nothing_waits_for_the_device(name: str, has_float64: bool) -> None:
    """The device's reading is that of the CPU, and its training that without a probe, bit for bit."""
    expected = on_cpu(name)
    with PretendDevice(has_float64=has_float64) as device:
        reading, weights = train(DEVICE, device, **SETUPS[name])
        _, plain = train(DEVICE, probed=False, **SETUPS[name])
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    assert reading is not None
    assert expected is not None
    if "budget" in SETUPS[name]:  # which windows are measured depends on time
        assert reading.windows >= 3
        return
    assert (reading.windows, dict(reading.dropped)) == (expected.windows, dict(expected.dropped))
    assert reading.windows >= 2
    # The CPU takes norms by rows, and a GPU whole tensors at once: both in fp32. Without fp64, sums of squares lose up
    # to 1e-6 more, and tr Σ and |G|² are a tenth to a hundredth of the sums that they are differences of.
    assert (reading.trace_cov, reading.grad_sq) == pytest.approx((expected.trace_cov, expected.grad_sq), rel=1e-4)
    for group, of_cpu in zip(reading.groups.values(), expected.groups.values(), strict=True):
        assert group.trace_cov == pytest.approx(of_cpu.trace_cov, rel=1e-4)


READS = [
    Mutant(
        "a value is looked at when a piece is added",
        "sonde.batch_size.taps.window_sums:WindowSums.add",
        "self._count(counts)",
        "self._count(counts); float(gradient.witness.sum())",
    ),
    Mutant(
        "a norm is looked at in a hook",
        "sonde.batch_size.taps.leaf_hooks:PieceGradient._keep",
        "witness, cut = self._tap.witness, self._tap.cut",
        "witness, cut = self._tap.witness, self._tap.cut; bool(results[0].sum() > 0)",
    ),
    Mutant(
        "elements are chosen by a mask",
        "sonde.batch_size.taps.window_reader:WindowReader._of_pieces",
        "own: dict[str, Tensor] = {}",
        "own = {}; self._sums._small[self._sums._small > 0]",
    ),
    Mutant(
        "the copy to the host waits",
        "sonde.batch_size.arrivals:Delivery.send",
        "start_copy_to_host(flat)",
        "start_copy_to_host(flat.cpu())",
    ),
    Mutant(
        "windows are waited for",
        "sonde.batch_size.window_ends:WindowEnds._deliver",
        "self._delivery.receive(wait=False)",
        "self._delivery.receive(wait=True)",
    ),
    Mutant(
        "a clip looks at its norm",
        "sonde.gradient_norm.scaling:_coefficient",
        "if is_at_hand(exact.device):",
        "if True:",
    ),
    Mutant(
        "scalars go to the host one by one",
        "sonde.batch_size.window_ends:WindowClip.scalars",
        "norm > most",
        "(norm > most).cpu()",
    ),
]


@pytest.mark.parametrize("mutant", READS, ids=lambda mutant: mutant.name)
def test_a_read_is_noticed(mutant: Mutant) -> None:
    with mutant.applied(), PretendDevice() as device, pytest.raises(HostReadError):
        train(DEVICE, device, clip=1.0)


FLOAT64 = [
    Mutant(
        "sums are kept in fp64 everywhere",
        "sonde.parallel.devices:accumulation_dtype",
        "torch.float64 if has_float64(device) else torch.float32",
        "torch.float64",
    ),
    Mutant(
        "elements are squared in fp64",
        "sonde.batch_size.taps.window_sums:WindowSums._add_gradient",
        "of_rest.sum() / weight",
        "of_rest.sum(dtype=torch.float64) / weight",
    ),
    Mutant(
        "a 0-dim number of the host widens another",
        "sonde.batch_size.taps.window_sums:WindowSums._add_gradient",
        "self._witness_small += of_rest.sum() / weight",
        "self._witness_small += torch.mul(squares.sum(), torch.ones((), dtype=torch.float64, device='cpu')) / weight",
    ),
]


@pytest.mark.parametrize("mutant", FLOAT64, ids=lambda mutant: mutant.name)
def test_the_pretended_device_refuses_every_float64_tensor(mutant: Mutant) -> None:
    with mutant.applied(), PretendDevice(has_float64=False) as device, pytest.raises(TypeError, match="float64"):
        train(DEVICE, device, clip=1.0)


def test_values_that_have_not_arrived_are_not_used() -> None:
    """A copy leaves NaN on the host until the device has made it: to take it too early spoils the reading."""
    early = Mutant(
        "copies count as arrived", "sonde.parallel.devices:HostCopy.has_arrived", "self.copied.query()", "True"
    )
    with PretendDevice() as device:
        sound, _ = train(DEVICE, device)
    assert sound is not None
    assert sound.windows == WINDOWS
    with early.applied(), PretendDevice() as device, pytest.raises(ValueError, match="cannot convert float NaN"):
        train(DEVICE, device)


def test_windows_are_timed_by_the_devices_events() -> None:
    with PretendDevice() as device:
        model = small_model().to(DEVICE)
        with attached(model, every=2, units_per_piece=4) as probe:
            x, y = (t.to(DEVICE) for t in batch(4, torch.Generator(device="cpu").manual_seed(0)))
            for _ in range(8):
                before = device.n_events
                for _ in range(2):
                    with probe.piece():
                        mean_loss(model, x, y).backward()
                probe.step()
                assert device.n_events > before
                model.zero_grad()
            assert probe.reading().windows > 0

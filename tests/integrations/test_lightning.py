"""A real Trainer of Lightning: the values of a plain loop, weights as without sonde, and its own loggers."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning", reason="needs lightning: pip install '.[lightning]'")
# Lightning and what it imports cause various warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

import lightning as L  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

import sonde  # noqa: E402
from sonde.integrations import lightning as integration  # noqa: E402
from tests.integrations.lightning_module import Module, batches, loss_of, network, trainer_of  # noqa: E402
from tests.integrations.plain_loop import BY_PIECES, Piece, optimizer_of, plain_loop, same_numbers, weights  # noqa: E402


def trained(folder: Path, *callbacks: Any, module: Module | None = None, **options: Any) -> tuple[Tensor, L.Trainer]:
    is_manual = bool(options.get("is_manual"))
    module = module or Module(is_manual=is_manual)
    trainer = trainer_of(folder, *callbacks, **options)
    trainer.fit(module)
    return weights(module), trainer


def windows_of(n_accumulated: int = 3, epochs: int = 2) -> list[list[Piece]]:
    """Lightning divides by 3 also in the last window of an epoch, which has 2 batches."""
    data = batches()
    pieces = [Piece({"batch": batch}, {"units": len(batch)}, 1 / 3) for batch in data]
    return [pieces[k : k + n_accumulated] for k in range(0, len(data), n_accumulated)] * epochs


def loss_of_piece(model: Any, piece: Piece) -> Tensor:
    return loss_of(model, piece.inputs["batch"]) * piece.weight


@pytest.mark.parametrize("is_manual", [False, True], ids=["automatic", "manual"])
def test_reads_as_a_plain_loop(tmp_path: Path, is_manual: bool) -> None:
    probe = integration.NoiseScale(unit="rows", log=tmp_path / "log", on_error="raise", **BY_PIECES)
    with_probe, _ = trained(tmp_path, probe, is_manual=is_manual, logger=CSVLogger(tmp_path, "csv"))
    without, _ = trained(tmp_path, is_manual=is_manual)
    assert torch.equal(with_probe, without)
    reading = probe.reading()
    assert (reading.windows, reading.dropped) == (10, {})
    assert same_numbers(reading, plain_loop(network(), windows_of(), loss_of_piece))
    run = sonde.read_run(tmp_path / "log")
    assert (run.ended, run.alerts) == ("training ended", ())
    assert run.header.setup["trainer"] == "Lightning"
    (file,) = tmp_path.glob("csv/**/metrics.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    # Lightning counts from 0: steps, or batches where optimization is manual.
    assert [int(row["step"]) for row in rows] == ([11, 23, 27] if is_manual else [3, 7])
    assert all(float(row["gns/units_per_window"]) == pytest.approx(10, abs=1) for row in rows)


def test_unequal_weights_of_rows_and_batches(tmp_path: Path) -> None:
    """Rows count as their first number says, as tokens would; batches as their rows."""

    def tokens(batch: Tensor) -> Tensor:
        return (batch[:, 0].abs() * 10).ceil()

    probe = integration.NoiseScale(
        unit="rows", units=tokens, weight=lambda batch: float(len(batch)), on_error="raise", **BY_PIECES
    )

    class Weighs(Module):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return weighed_loss(self.net, batch) * len(batch)

    def weighed_loss(net: Any, batch: Tensor) -> Tensor:
        errors = (net(batch) - batch[:, :1] - 0.3).square()[:, 0]
        return (errors * tokens(batch)).sum() / tokens(batch).sum()

    trained(tmp_path, probe, module=Weighs())
    windows = [
        [Piece(p.inputs, {"unit_weights": tokens(p.inputs["batch"]).tolist()}, len(p.inputs["batch"]) / 3) for p in w]
        for w in windows_of()
    ]
    expected = plain_loop(network(), windows, lambda net, p: weighed_loss(net, p.inputs["batch"]) * p.weight)
    assert same_numbers(probe.reading(), expected)


def test_bf16(tmp_path: Path) -> None:
    """Without a clip, which Lightning's precision refuses beside a fused optimizer."""
    probe = integration.NoiseScale(unit="rows", on_error="raise", **BY_PIECES)
    with_probe, _ = trained(tmp_path, probe, precision="bf16-mixed", gradient_clip_val=None)
    without, _ = trained(tmp_path, precision="bf16-mixed", gradient_clip_val=None)
    assert torch.equal(with_probe, without)

    def loss_in_bf16(model: Any, piece: Piece) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, piece.inputs["batch"])
        return loss * piece.weight

    assert same_numbers(probe.reading(), plain_loop(network(), windows_of(), loss_in_bf16, max_norm=1e9))


class NotFused(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("kind", [Module, NotFused])
def test_a_grad_scalers_skipped_steps_are_no_windows(kind: type[Module], tmp_path: Path) -> None:
    """The first scales are too large for fp16, and these steps are left out without an alert.

    A fused optimizer is called, and leaves out the step itself. Another one is not even called.
    """
    probe = integration.NoiseScale(unit="rows", log=tmp_path / "log", on_error="raise", **BY_PIECES)
    options: dict[str, Any] = {"gradient_clip_val": None, "max_epochs": 4}

    def in_fp16() -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)  # type: ignore[attr-defined]
        return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]

    with_probe, _ = trained(tmp_path, probe, module=kind(), plugins=in_fp16(), **options)
    assert torch.equal(with_probe, trained(tmp_path, module=kind(), plugins=in_fp16(), **options)[0])
    reading = probe.reading()
    assert reading.windows + sum(reading.dropped.values()) == 20
    assert len(reading.dropped) == 1
    assert "GradScaler" in next(iter(reading.dropped))
    assert sonde.read_run(tmp_path / "log").alerts == ()


def test_a_resumed_training_goes_on_with_its_averages(tmp_path: Path) -> None:
    whole = integration.NoiseScale(unit="rows", on_error="raise", **BY_PIECES)
    trained(tmp_path, whole)
    first = integration.NoiseScale(unit="rows", on_error="raise", **BY_PIECES)
    _, trainer = trained(tmp_path, first, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = integration.NoiseScale(unit="rows", on_error="raise", **BY_PIECES)
    trainer_of(tmp_path, resumed).fit(Module(), ckpt_path=tmp_path / "half.ckpt")
    reading = resumed.reading()
    assert reading.windows == 10
    assert same_numbers(reading, whole.reading())
    trained(tmp_path, resumed, max_epochs=1)  # another training, without a checkpoint, begins anew
    reading = resumed.reading()
    assert reading.windows == 5


class TwoLosses(Module):
    """Two backwards of each batch, and a step after each."""

    def __init__(self) -> None:
        super().__init__(is_manual=True)

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        for part in (0.25, 0.75):
            self.manual_backward(part * loss_of(self.net, batch))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("module", "parts"), [(Module, (1.0,)), (TwoLosses, (0.25, 0.75))])
def test_a_batch_a_step_is_read_by_its_examples_as_in_a_plain_loop(
    module: Any, parts: tuple[float, ...], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    probe = integration.NoiseScale(unit="rows", on_error="raise", **BY_PIECES | {"per_example": "auto"})
    with_probe, _ = trained(tmp_path, probe, module=module(), **options)
    assert torch.equal(with_probe, trained(tmp_path, module=module(), **options)[0])
    windows = windows_of(n_accumulated=1)
    for (piece,) in windows:
        piece.weight = 1.0
    expected = plain_loop(network(), windows, loss_of_piece, max_norm=1e9, parts=parts, per_example="auto")
    reading = probe.reading()
    # The first window shows that pieces have several backwards.
    assert (reading.windows, reading.u) == (len(windows) - (len(parts) > 1), 1.0)
    assert same_numbers(reading, expected)


class TwoOptimizers(Module):
    def __init__(self) -> None:
        super().__init__(is_manual=True)

    def configure_optimizers(self) -> Any:
        return [optimizer_of(self.net[0]), optimizer_of(self.net[2])], []

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizers: Any = self.optimizers()
        self.manual_backward(loss_of(self.net, batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class ManySteps(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


class TwoLoaders(Module):
    def train_dataloader(self) -> Any:
        return {"first": super().train_dataloader(), "second": super().train_dataloader()}

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        return super().training_step(torch.cat([batch["first"], batch["second"]]), index)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (TwoOptimizers, "the module has 2 optimizers"),
        (ManySteps, "LBFGS evaluates its closure several times"),
        (TwoLoaders, "each batch comes from 2 dataloaders, so its rows do not show all of its units"),
    ],
)
def test_what_cannot_be_measured_trains_on_and_is_named(
    tmp_path: Path, module: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    probe = integration.NoiseScale(unit="rows", verbose=False)
    with caplog.at_level(logging.ERROR):
        with_probe, _ = trained(tmp_path, probe, module=module(), **options)
    assert f"this training is not measured: ValueError: {why}" in caplog.text
    assert probe.reading() is None
    without, _ = trained(tmp_path, module=module(), **options)
    assert torch.equal(with_probe, without)
    with pytest.raises(ValueError, match=why):
        trained(tmp_path, integration.NoiseScale(unit="rows", on_error="raise"), module=module(), **options)


class Fails(Module):
    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 7:
            raise KeyError("of the user's own")
        return super().training_step(batch, index)


def test_a_training_that_fails_ends_its_log(tmp_path: Path) -> None:
    probe = integration.NoiseScale(unit="rows", log=tmp_path / "log", **BY_PIECES)
    with pytest.raises(KeyError, match="of the user's own"):
        trained(tmp_path, probe, module=Fails())
    run = sonde.read_run(tmp_path / "log")
    assert run.ended == "stopped by KeyError"
    assert run.readings[-1].window == 2
    reading = probe.reading()
    assert reading.windows == 2
    assert probe.state_dict()["averages"]  # for a checkpoint of Lightning's OnExceptionCheckpoint


class Notes(L.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.calls.append(f"start {len(trainer.optimizers)} {trainer.model is not None}")

    def on_train_batch_start(self, *args: Any) -> None:
        self.calls.append("batch")

    def on_before_backward(self, *args: Any) -> None:
        self.calls.append("before backward")

    def on_after_backward(self, *args: Any) -> None:
        self.calls.append("after backward")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        norm = float(torch.cat([p.grad.flatten() for p in module.parameters()]).norm())
        self.calls.append(f"step, {'clipped' if norm <= 0.5 + 1e-6 else 'not clipped'}")

    def on_train_batch_end(self, *args: Any) -> None:
        self.calls.append("batch end")


def test_guard_the_order_of_lightnings_hooks(tmp_path: Path) -> None:
    """What the callback leans on: the last backward of a window comes before its step's hook, and the clip after it."""
    notes = Notes()
    trained(tmp_path, notes, max_steps=1)
    backward = ["before backward", "after backward"]
    batch = ["batch", *backward, "batch end"]
    assert notes.calls == ["start 1 True", *batch * 2, "batch", *backward, "step, not clipped", "batch end"]

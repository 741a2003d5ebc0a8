"""A real loop with Accelerate: the values of a plain loop, weights as without sonde, trackers and checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")
# Accelerate and what it imports cause various warnings.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_accelerate_state")]

from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.tracking import GeneralTracker  # noqa: E402

import sonde  # noqa: E402
from sonde.integrations import accelerate as integration  # noqa: E402
from tests.integrations.accelerate_loop import Attached, accelerator, batches, loop, loss_of, network, tokens  # noqa: E402
from tests.integrations.plain_loop import BY_PIECES, Piece, optimizer_of, plain_loop, same_numbers, weights  # noqa: E402
from tests.schedule import noisy_gradients  # noqa: E402


def windows_of(epochs: int = 3, weight: Any = lambda batch: 1.0) -> list[list[Piece]]:
    """Accelerate divides by 3 also in the last window of an epoch, which has 2 micro-batches."""
    data = batches()
    pieces = [Piece({"batch": b}, {"unit_weights": tokens(b).tolist()}, weight(b) / 3) for b in data]
    return [pieces[0:3], pieces[3:6], pieces[6:8]] * epochs


def loss_of_piece(model: Any, piece: Piece) -> Tensor:
    return loss_of(model, piece.inputs["batch"]) * piece.weight


@pytest.mark.parametrize("clips", [False, True], ids=["clipped by torch", "clipped by sonde"])
def test_reads_as_a_plain_loop(tmp_path: Path, clips: bool) -> None:
    a = accelerator()
    attached = Attached(a, units=tokens, clips=clips, log=tmp_path)
    model = loop(a, attached)
    reading = attached.probe.reading()
    assert (reading.windows, reading.dropped) == (9, {})
    assert same_numbers(reading, plain_loop(network(), windows_of(), loss_of_piece))
    a.end_training()
    assert "backward" not in vars(a)
    plain = loop(accelerator())
    if clips:  # the norm's sum is exact, torch's is not: the last bit may differ
        assert torch.allclose(weights(model), weights(plain), rtol=0, atol=1e-6)
    else:
        assert torch.equal(weights(model), weights(plain))
    run = sonde.read_run(tmp_path)
    assert (run.ended, run.alerts) == ("training ended", ())
    assert run.header.setup["optimizer_kind"] == "Adam or AdamW (β = 0.9)"  # inside the accelerator's own
    assert run.header.setup["trainer"] == "Accelerate"
    assert run.readings[-1].metrics["grad/clip_fraction"] is not None  # also where Accelerate clips


def test_weights_of_micro_batches(tmp_path: Path) -> None:
    a = accelerator()
    attached = Attached(a, units=tokens, weight=lambda batch: float(tokens(batch).sum()))
    loop(a, attached, scale=lambda batch: float(tokens(batch).sum()))
    expected = plain_loop(network(), windows_of(weight=lambda batch: float(tokens(batch).sum())), loss_of_piece)
    assert same_numbers(attached.probe.reading(), expected)


def test_several_units() -> None:
    def both(batch: Tensor) -> dict[str, Any]:
        return {"rows": len(batch), "tokens": tokens(batch).sum()}

    a = accelerator()
    attached = Attached(a, unit=("rows", "tokens"), units=both)
    loop(a, attached)
    reading = attached.probe.reading()
    rows_of_a_step = sum(len(batch) for batch in batches()) / 3
    tokens_of_a_step = sum(float(tokens(batch).sum()) for batch in batches()) / 3
    expected = reading.b_simple * tokens_of_a_step / rows_of_a_step
    assert reading.in_unit("tokens").b_simple == pytest.approx(expected, rel=0.05)  # an average that forgets


def loss_under_autocast(dtype: torch.dtype) -> Any:
    def loss(model: nn.Module, piece: Piece) -> Tensor:
        def in_fp32(batch: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return model(batch).float()  # type: ignore[no-any-return]

        return loss_of(in_fp32, piece.inputs["batch"]) * piece.weight  # type: ignore[arg-type]

    return loss


def test_bf16() -> None:
    """The trained network is that without sonde, and the reading that of a plain loop under autocast."""
    a = accelerator(mixed_precision="bf16")
    attached = Attached(a, units=tokens)
    measured = weights(loop(a, attached))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert torch.equal(measured, weights(loop(accelerator(mixed_precision="bf16"))))
    expected = plain_loop(network(), windows_of(), loss_under_autocast(torch.bfloat16))
    assert same_numbers(attached.probe.reading(), expected)


class Tracker(GeneralTracker):
    name, requires_logging_directory = "of the test", False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[dict[str, Any], int]] = []

    def store_init_configuration(self, values: Any) -> None:
        pass

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        assert step is not None
        self.rows.append((values, step))


def test_trackers_get_the_metrics_at_the_users_own_step() -> None:
    tracker = Tracker()
    a = accelerator(log_with=[tracker])
    a.init_trackers("project")
    loop(a, Attached(a))
    assert len(tracker.rows) == 24
    assert {step for _, step in tracker.rows} == {7}
    with_metrics = [k for k, (values, _) in enumerate(tracker.rows) if "gns/units_per_window" in values]
    assert with_metrics == [k for k in range(24) if k % 8 in (2, 5, 7)]  # after each step


def test_a_checkpoint_takes_the_averages_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = accelerator()
    uninterrupted = Attached(whole)
    loop(whole, uninterrupted)
    first = accelerator()
    loop(first, Attached(first), epochs=2)
    first.save_state(str(tmp_path / "with"))
    second = accelerator()
    resumed = Attached(second)
    loop(second, resumed, epochs=1, begin=lambda: second.load_state(str(tmp_path / "with")))
    assert resumed.probe.reading().windows == 9
    assert same_numbers(resumed.probe.reading(), uninterrupted.probe.reading())

    without = accelerator()
    loop(without, epochs=2)
    without.save_state(str(tmp_path / "without"))
    third = accelerator()
    begun = Attached(third)
    with caplog.at_level(logging.WARNING):
        loop(third, begun, epochs=1, begin=lambda: third.load_state(str(tmp_path / "without")))
    assert "the checkpoint has no sonde_noise_scale.json: the averages of the noise scale begin anew" in caplog.text
    assert begun.probe.reading().windows == 3


def test_a_checkpoint_that_cannot_be_written_or_read_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full" / "sonde_noise_scale.json").mkdir(parents=True)
    a = accelerator()
    attached = Attached(a, on_error="warn")
    loop(a, attached)
    a.save_state(str(tmp_path / "full"))
    assert "the checkpoint lacks the averages of the noise scale: IsADirectoryError" in caplog.text
    a.save_state(str(tmp_path / "torn"))
    (tmp_path / "torn" / "sonde_noise_scale.json").write_text('{"torn')
    a.load_state(str(tmp_path / "torn"))
    assert "the averages of the checkpoint are not used, and begin anew: JSONDecodeError" in caplog.text
    assert attached.probe.reading().windows == 9


def test_the_window_of_a_step_with_a_closure_ends_after_its_backward() -> None:
    by_examples = BY_PIECES | {"per_example": "always"}

    def trained(attach: Any) -> nn.Module:
        a = accelerator(gradient_accumulation_steps=1)
        model, optimizer = a.prepare(net := network(), optimizer_of(net))
        if attach is not None:
            attach.probe = integration.attach(a, model, optimizer, units=tokens, on_error="raise", **by_examples)
        for batch in [batch for batch in batches() for _ in range(2)]:

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                a.backward(loss)
                return loss

            optimizer.step(closure)
        return net

    attached = Attached(accelerator())
    assert torch.equal(weights(trained(attached)), weights(trained(None)))
    windows = [[Piece({"batch": b}, {"unit_weights": tokens(b).tolist()}, 1.0)] for b in batches() for _ in range(2)]
    reading = attached.probe.reading()
    assert (reading.windows, reading.dropped) == (16, {})
    assert same_numbers(reading, plain_loop(network(), windows, loss_of_piece, max_norm=1e9, **by_examples))


def test_lbfgs_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    a = accelerator()
    model, optimizer = a.prepare(net := network(), torch.optim.LBFGS(net.parameters()))
    assert integration.attach(a, model, optimizer, verbose=False).probe is None
    assert "this training is not measured: ValueError: LBFGS evaluates its closure several times a step" in caplog.text


def test_a_scaler_of_accelerate() -> None:
    """In fp16, gradients are scaled, unscaled before the clip, and a first window overflows."""

    def trained(attach: bool) -> tuple[nn.Module, Any]:
        a = accelerator(gradient_accumulation_steps=2)
        a.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=1000)
        a.native_amp, a.state._mixed_precision = True, "fp16"  # Accelerate makes a scaler on accelerators only
        attached = Attached(a, units=tokens)
        return loop(a, attached if attach else None), attached.probe

    model, probe = trained(attach=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert torch.equal(weights(model), weights(trained(attach=False)[0]))
    reading = probe.reading()
    (n_dropped,) = reading.dropped.values()
    assert 0 < n_dropped < 4
    pieces = [Piece({"batch": b}, {"unit_weights": tokens(b).tolist()}, 1 / 2) for b in batches()]
    windows = [pieces[k : k + 2] for k in (0, 2, 4, 6)] * 3
    expected = plain_loop(network(), windows[n_dropped:], loss_under_autocast(torch.float16))
    # Without a scale, small gradients lose bits in fp16, so the plain loop takes other steps.
    assert reading.windows == expected.windows
    for name in ("grad_sq", "trace_cov", "units_per_window"):
        assert getattr(reading, name) == pytest.approx(getattr(expected, name), rel=5e-3), name
    assert reading.average.ratio == pytest.approx(expected.average.ratio, rel=5e-3)


def test_bad_arguments() -> None:
    a, net = accelerator(), network()
    with pytest.raises(ValueError, match=r"accelerator must be an accelerate\.Accelerator, got Sequential"):
        integration.attach(net, net, optimizer_of(net))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the optimizer is not one that accelerator\.prepare has returned: attach"):
        integration.attach(a, net, optimizer_of(net))
    model, optimizer = a.prepare(net, optimizer_of(net))
    with pytest.raises(TypeError, match="unexpected keyword argument 'budgt'"):
        integration.attach(a, model, optimizer, budgt=3)
    with pytest.raises(ValueError, match=r"a batch is counted in one unit, got unit=\('rows', 'tokens'\): pass units="):
        integration.attach(a, model, optimizer, unit=("rows", "tokens"))
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(ValueError, match=r"a hook on an nn\.TransformerEncoderLayer changes .*: prepare a module"):
        integration.attach(a, *a.prepare(layer, optimizer_of(layer)))
    probe = integration.attach(a, model, optimizer, verbose=False)
    with pytest.raises(ValueError, match="this accelerator has a probe already: close it first"):
        integration.attach(a, model, optimizer)
    probe.close()
    integration.attach(a, model, optimizer, verbose=False).close()


def test_a_batch_schedule_takes_what_accelerate_has_prepared() -> None:
    """A loop that accumulates by itself. The schedule of the rate ends after as many rows as at the smallest batch."""
    a, net = accelerator(gradient_accumulation_steps=1), noisy_gradients.Linear()
    own = torch.optim.SGD(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.1, total_iters=1000)
    model, optimizer, prepared = a.prepare(net, own, scheduler)
    attached = integration.attach(a, model, optimizer, unit="rows", on_error="raise", **BY_PIECES)
    assert attached.probe is not None
    grows: dict[str, Any] = {"smallest": 2, "largest": 8, "ratio": 50.0, "pause": 0, "verbose": False}
    schedule, again = (sonde.BatchSchedule(attached.probe, **grows) for _ in range(2))

    def train(schedule: sonde.BatchSchedule, step_lr: Any) -> list[int]:
        counts = []
        for window in range(60):
            counts.append(n := schedule.micro_batches)
            for x in noisy_gradients.micro_batches(window, n):
                a.backward(model(x).mean() / n)
            optimizer.step()
            optimizer.zero_grad()
            step_lr(prepared)
        return counts

    with pytest.raises(ValueError, match=r"pass it as scale_lr\(optimizer, lr_scheduler\)"):
        schedule.scale_lr(optimizer)
    schedule.scale_lr(optimizer, prepared)
    counts = train(schedule, schedule.step_lr)
    assert set(counts) == {2, 4, 8}
    assert scheduler.last_epoch == sum(counts) // 2
    schedule.close()
    again.scale_lr(optimizer, prepared)
    with pytest.raises(ValueError, match=r"its end would move: .*call schedule.step_lr\(lr_scheduler\)"):
        train(again, lambda each: each.step())


def test_guard_what_accelerate_does_at_a_backward_and_a_step() -> None:
    """Gradients are synchronised in the last backward of a window; the loss is divided by 3 also in a shorter one."""
    a = accelerator()
    calls: list[str] = []
    gradients: list[float] = []

    def watch(model: Any, optimizer: Any) -> None:
        optimizer.optimizer.register_step_pre_hook(lambda *args: calls.append(f"step {a.sync_gradients}"))
        model[2].bias.register_hook(lambda g: gradients.append(float(g)))
        model.register_forward_pre_hook(lambda *args: calls.append("forward"))

    loop(a, watch, epochs=1)
    assert calls == [*["forward"] * 3, "step True"] * 2 + [*["forward"] * 2, "step True"]
    net = network()
    (alone,) = torch.autograd.grad(loss_of(net, batches()[0]), net[2].bias)
    assert gradients[0] == pytest.approx(float(alone) / 3)


def test_guard_accelerate_keeps_the_forward_that_it_wraps() -> None:
    """FullPrecision scores by this forward, since the wrapped one casts to 16 bits."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0**-12)  # bf16 has 8 bits: 3 + 2⁻¹² is 3 there
    prepared = accelerator(mixed_precision="bf16").prepare(model)
    assert prepared(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
    assert prepared._original_forward(torch.ones(1, 3)).tolist() == [[3.0 + 2.0**-12] * 2]

"""`allow_biased=True`: consecutive steps compared where one process shows no noise otherwise."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from tests.batch_size.loops import Recording, attached, flat_grad, mean_loss, small_model
from tests.batch_size.single_examples import pieces_of
from tests.oracles import StepsOnAQuadratic, window_by_hand

LR = 0.002


def run(
    model: nn.Module,
    probe: sonde.NoiseScaleProbe,
    windows: range,
    sizes: Sequence[int] = (6,),
    *,
    lr: float = LR,
    gradients: list[Tensor] | None = None,
) -> None:
    """SGD on windows of pieces of these sizes; collects each window's whole gradient if a list is given."""
    for window in windows:
        for x, y in pieces_of(*sizes, seed=window):
            with probe.piece(units=len(x)):
                mean_loss(model, x, y).backward()
        if gradients is not None:
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())  # type: ignore[union-attr]
        probe.step()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad  # type: ignore[operator]
        model.zero_grad()


def by_hand(gradients: Sequence[Tensor], units: Sequence[float] = (6, 6)) -> tuple[float, float]:
    """tr Σ and |G|² of two whole gradients as two pieces of equal weight."""
    return window_by_hand(list(gradients), [1, 1], units, torch.stack(list(gradients)).mean(0))


def of_blocks(model: nn.Sequential, gradients: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Whole gradients, block by block."""
    sizes = [n for block in model if (n := sum(p.numel() for p in block.parameters()))]
    return list(zip(*(gradient.split(sizes) for gradient in gradients), strict=True))


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # torch.compile says so there
@pytest.mark.parametrize("is_compiled", [False, True])
def test_each_pair_is_two_pieces_of_one_window(is_compiled: bool) -> None:
    torch._dynamo.reset()
    model, gradients = small_model(), []  # type: ignore[var-annotated]
    called = torch.compile(model, backend="aot_eager") if is_compiled else model
    per_example = "auto" if is_compiled else "never"  # compiled layers do not show examples
    with attached(called, allow_biased=True, per_example=per_example, horizon=math.inf) as probe:  # type: ignore[arg-type]
        for window in range(4):
            run(called, probe, range(window, window + 1), gradients=gradients)  # type: ignore[arg-type]
            solved = probe.window()
            if window % 2 == 0:
                assert solved is None
                continue
            assert solved is not None
            trace_cov, grad_sq = by_hand(gradients[-2:])
            assert solved.total.trace_cov == pytest.approx(trace_cov, rel=1e-5)
            assert solved.total.grad_sq == pytest.approx(grad_sq, rel=1e-5)
            # fp32 gradients: a few 1e-7 of both numbers, amplified by their difference.
            for group, parts in zip(solved.per_group, of_blocks(model, gradients[-2:]), strict=True):
                trace_cov, grad_sq = by_hand(parts)
                assert group.trace_cov == pytest.approx(trace_cov, rel=1e-5)
                assert group.grad_sq == pytest.approx(grad_sq, rel=1e-5, abs=1e-6 * trace_cov)
        reading = probe.reading()
    assert (reading.windows, reading.is_biased) == (2, True)
    assert (reading.units_per_window, reading.effective_units, reading.u) == (6.0, pytest.approx(6.0), 1 / 6)
    assert list(reading.groups) == ["0", "2", "3", "4"]


def test_pieces_of_other_sizes_weights_and_scales() -> None:
    """A clip before the window ends, another loss scale in each window, and batches of 6 and of 3."""
    model, scaler = small_model(), torch.amp.GradScaler("cpu", init_scale=256.0)
    generator_scales, gradients = [1.0, 0.125], []
    with attached(model, allow_biased=True, grad_scaler=scaler) as probe:
        for (x, y), factor in zip(pieces_of(6, 3), generator_scales, strict=True):
            gradients.append(flat_grad(model, 5.0 * mean_loss(model, x, y)))
            with probe.piece(units=len(x), weight=5.0):
                scaler.scale(5.0 * mean_loss(model, x, y)).backward()
            for p in model.parameters():
                p.grad *= factor / scaler.get_scale()  # type: ignore[operator]
            probe.clip_grad_norm_(1e-3)
            scaler.update(1024.0)
            model.zero_grad()
        reading = probe.reading()
    trace_cov, grad_sq = by_hand(gradients, (6, 3))
    assert reading.trace_cov == pytest.approx(trace_cov, rel=1e-5)
    assert reading.grad_sq == pytest.approx(grad_sq, rel=1e-5)


def test_a_large_model_is_folded_and_right_on_average() -> None:
    """26,000 elements in 2,048 buckets: the error of a pair is 3 %, and that of 60 pairs 0.4 %."""
    model, gradients = small_model(), []  # type: ignore[var-annotated]
    solved, expected = [], []
    with attached(model, allow_biased=True, staging_mib=0) as probe:
        assert "compared, with an error of about" in str(probe._setup()["biased_fallback"])
        for pair in range(60):
            run(model, probe, range(2 * pair, 2 * pair + 2), lr=0.0, gradients=gradients)
            window = probe.window()
            assert window is not None
            solved.append(window.total.trace_cov)
            expected.append(by_hand(gradients[-2:])[0])
    ratios = torch.tensor(solved) / torch.tensor(expected)
    assert 0.001 < float(ratios.std()) < 0.15
    assert abs(float(ratios.mean()) - 1) < 4 * float(ratios.std()) / math.sqrt(len(ratios))


class Quadratic(nn.Module):
    """L(θ) = ½ θᵀHθ + θᵀ mean(noise)."""

    def __init__(self, case: StepsOnAQuadratic) -> None:
        super().__init__()
        self.weights = nn.Parameter(case.weights.clone())
        self.hessian = case.hessian

    def forward(self, noise: Tensor) -> Tensor:
        return self.weights @ self.hessian @ self.weights / 2 + noise.mean(0) @ self.weights


def test_a_loop_of_sgd_has_the_bias_that_the_closed_form_predicts() -> None:
    generator, n = torch.Generator().manual_seed(5), 12
    case = StepsOnAQuadratic(
        hessian=torch.linspace(0.5, 4.0, n, dtype=torch.float64).diag(),
        noise=torch.linspace(2.0, 0.5, n, dtype=torch.float64).diag(),
        weights=torch.full((n,), 0.3, dtype=torch.float64),
        rate=0.2,
        batch=4,
    )
    model, solved = Quadratic(case), []
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate)
    with attached(model, optimizer, allow_biased=True) as probe:
        for window in range(400):
            if window % 2 == 0:  # each pair begins at the same weights
                with torch.no_grad():
                    model.weights.copy_(case.weights)
            noise = torch.randn(case.batch, n, generator=generator, dtype=torch.float64) * case.noise.diag().sqrt()
            with probe.piece(units=case.batch):
                model(noise).backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
            if (last := probe.window()) is not None:
                solved.append([last.total.trace_cov, last.total.grad_sq])
    values = torch.tensor(solved, dtype=torch.float64)
    means, errors = values.mean(0), values.std(0) / math.sqrt(len(values))
    expected, truth = case.expected, case.truth
    assert len(values) == 200
    for mean, error, predicted, exact in zip(
        means, errors, (expected.trace_cov, expected.grad_sq), (truth.trace_cov, truth.grad_sq), strict=True
    ):
        assert abs(float(mean) - predicted) < 3 * float(error)
        assert abs(float(mean) - exact) > 8 * float(error)
    assert float(means[0] / means[1]) > 1.5 * truth.b_simple


def test_every_number_says_that_it_is_biased(capsys: pytest.CaptureFixture[str]) -> None:
    sink, model = Recording(), small_model()
    with attached(model, allow_biased=True, log_every=4, sinks=[sink], verbose=True) as probe:
        assert "biased    consecutive steps are compared, exactly, if a window is a single" in capsys.readouterr().err
        run(model, probe, range(40))
        reading, state = probe.reading(), probe.state_dict()
    text = "biased: read from consecutive steps, so the true B_simple is probably smaller"
    assert text in str(reading)
    assert "20 pairs of windows" in str(reading)
    assert "pair" in reading.advice or reading.status == "unresolved"
    assert reading.metrics()["gns/biased"] == 1.0
    assert all(record["metrics"]["gns/biased"] == 1.0 for record in sink.of_kind("reading"))
    [alert] = [record for record in sink.of_kind("alert") if record["name"] == "biased"]
    assert alert["window"] == 1
    assert (
        alert["message"]
        == f"the noise scale is {text}. Accumulate gradients over 2 or more micro-batches to avoid the bias"
    )
    assert sink.of_kind("reading")[-1]["metrics"]["grad/norm"] > 0
    assert text in probe.alerts["biased"]
    assert json.loads(state["json"])["biased"] is True
    assert "biased" in sink.of_kind("reading")[-1]["alerts"]


def test_windows_with_pieces_are_not_touched(capsys: pytest.CaptureFixture[str]) -> None:
    def reading(**options: Any) -> sonde.NoiseScaleReading:
        model = small_model()
        with attached(model, verbose=True, **options) as probe:
            run(model, probe, range(10), (4, 4))
            run(model, probe, range(10, 12), (4,))  # a short window now and then
            run(model, probe, range(12, 16), (4, 4))
            run(model, probe, range(16, 17), (4,))
            run(model, probe, range(17, 20), (4, 4))
            return probe.reading()

    with_pairs, without = reading(allow_biased=True), reading()
    assert with_pairs == without
    assert (with_pairs.windows, with_pairs.is_biased) == (17, False)
    assert "allow_biased=True has no effect: a window has 2 pieces" in capsys.readouterr().err


def test_examples_come_first() -> None:
    model = small_model()
    with attached(model, allow_biased=True, per_example="auto") as probe:
        run(model, probe, range(6))
        reading = probe.reading()
    assert (reading.windows, reading.u, reading.is_biased) == (6, 1.0, False)


def test_where_examples_turn_out_unreadable_pairs_begin(capsys: pytest.CaptureFixture[str]) -> None:
    model, sink = small_model(), Recording()
    with attached(model, allow_biased=True, per_example="auto", log_every=1, sinks=[sink], verbose=True) as probe:
        for window in range(12):
            x, y = pieces_of(6, seed=window)[0]
            with probe.piece(units=3):  # units that are no rows
                mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert reading.is_biased
    assert reading.windows == 4  # three failures show it, and the pairs begin with the fifth window
    [alert] = [record for record in sink.of_kind("alert") if record["name"] == "biased"]
    assert alert["window"] == 4
    since = "consecutive steps are compared, since a window is a single piece, and its examples cannot be told apart: "
    assert f"sonde: {since}the first dim" in capsys.readouterr().err


def test_noise_scales_with_and_without_bias_are_never_averaged_together() -> None:
    model = small_model()
    with attached(model, allow_biased=True, log_every=1) as probe:
        run(model, probe, range(8))
        assert probe.reading().is_biased
        run(model, probe, range(8, 10), (4, 4))  # two windows with pieces among the others do not count
        biased = probe.reading()
        assert (biased.is_biased, biased.windows) == (True, 4)
        assert any("2 pieces among windows of one" in reason for reason in biased.dropped)
        fresh = copy.deepcopy(model)
        run(model, probe, range(10, 20), (4, 4))
        sound, saved = probe.reading(), probe.state_dict()
    with attached(fresh) as probe:  # sees neither the pairs nor the two windows that were dropped
        run(fresh, probe, range(10, 20), (4, 4))
        expected = probe.reading()
    assert not sound.is_biased
    # Windows count in units of their neighbours' size, and here the first ones had other neighbours.
    assert sound.trace_cov == pytest.approx(expected.trace_cov, rel=0.02)
    assert biased.trace_cov != pytest.approx(expected.trace_cov, rel=0.02)
    with attached(small_model()) as probe:
        probe.load_state_dict(saved)
        assert (probe.reading().trace_cov, probe.reading().is_biased) == (sound.trace_cov, False)


@pytest.mark.parametrize("every", [1, 4])
def test_pairs_are_neighbours_and_restarts_keep_their_places(every: int) -> None:
    def measured(n_before: int) -> tuple[list[int], sonde.NoiseScaleReading]:
        model, seen, state = small_model(), [], None
        for windows in (range(n_before), range(n_before, 80)):
            with attached(model, allow_biased=True, every=every) as probe:
                if state is not None:
                    probe.load_state_dict(state)
                for window in windows:
                    if probe._pacing.is_measured:
                        seen.append(window)
                    run(model, probe, range(window, window + 1))
                state, reading = probe.state_dict(), probe.reading()
        return seen, reading

    seen, reading = measured(0)
    assert [b - a for a, b in zip(seen[::2], seen[1::2], strict=True)] == [1] * (len(seen) // 2)
    n_pairs = 80 // (2 * every)
    assert len(seen) // 2 in (n_pairs, n_pairs + 1)  # the first pair of all is measured besides
    assert (reading.windows, reading.every, reading.is_biased) == (len(seen) // 2, 2.0 * every, True)
    assert not reading.dropped
    assert (f"pairs of windows measured, one in {every} (" in str(reading)) == (every > 1)
    again, restarted = measured(40)
    assert set(seen) <= set(again)
    assert set(again) - set(seen) <= {40, 41}  # the first pair after a restart is measured too
    assert not restarted.dropped
    assert restarted.windows == len(again) // 2


def test_a_restart_within_a_pair_drops_its_two_windows() -> None:
    model = small_model()
    with attached(model, allow_biased=True) as probe:
        run(model, probe, range(5))
        state = probe.state_dict()
    with attached(model, allow_biased=True) as probe:
        probe.load_state_dict(state)
        assert probe.reading().is_biased
        run(model, probe, range(5, 10))
        reading = probe.reading()
    assert reading.windows == 2 + 2  # the fifth window's half is lost, and the tenth one waits


def test_a_short_epoch_after_a_restart_does_not_end_the_pairs() -> None:
    model = small_model()
    with attached(model, allow_biased=True) as probe:
        run(model, probe, range(6))
        state = probe.state_dict()
    with attached(model, allow_biased=True) as probe:
        probe.load_state_dict(state)
        run(model, probe, range(6, 7), (3, 3))
        run(model, probe, range(7, 11))
        reading = probe.reading()
    assert (reading.windows, reading.is_biased) == (3 + 2, True)


def test_a_skipped_step_drops_the_pair() -> None:
    model = small_model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=LR), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with attached(model, optimizer, allow_biased=True, grad_scaler=scaler) as probe:
        for window in range(8):
            x, y = pieces_of(6, seed=window)[0]
            loss = mean_loss(model, x, y) * (1e30 if window == 2 else 1.0)
            with probe.piece(units=6):
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            probe.step()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        reading = probe.reading()
    assert reading.windows == 3
    (reason,) = reading.dropped
    assert "the window before it, with which it makes a pair, could not be used: a piece's gradient" in reason


def test_parameters_frozen_between_two_windows_do_not_make_noise() -> None:
    model = small_model()
    with attached(model, allow_biased=True) as probe:
        run(model, probe, range(5))
        model[0].requires_grad_(False)
        for window in range(5, 20):
            x, y = pieces_of(6, seed=window)[0]
            with probe.piece(units=6):
                mean_loss(model, x, y).backward()
            probe.step()
            model.zero_grad()
        groups = probe.reading().groups
    assert groups["4"].trace_cov
    assert list(groups) == ["2", "3", "4"]


def test_training_is_bit_for_bit_the_same() -> None:
    def trained(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 300), nn.Dropout(0.2), nn.Linear(300, 3))  # too many to copy
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with attached(model, optimizer, staging_mib=0, **options) as probe:
            for window in range(20):
                x, y = pieces_of(6, seed=window)[0]
                with probe.piece(units=6):
                    mean_loss(model, x, y).backward()
                probe.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            assert probe.reading().windows == (10 if options else 0)
            hooks = sum(len(p._backward_hooks or ()) for p in model.parameters())
        assert hooks == sum(1 for _ in model.parameters())  # pairs need no hook of their own
        return [p.detach().clone() for p in model.parameters()] + [torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(trained(allow_biased=True), trained(), strict=True))


def test_sparse_gradients_give_a_reason() -> None:
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 1))
    with attached(model, allow_biased=True) as probe:
        for window in range(4):
            with probe.piece(units=5):
                model(torch.arange(window, window + 5)).square().mean().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert reading.windows == 0
    assert "its gradient is sparse: use Embedding(sparse=False)" in reading.reason
    assert "Accumulate gradients over 2 or more micro-batches for a noise scale without bias" in reading.reason

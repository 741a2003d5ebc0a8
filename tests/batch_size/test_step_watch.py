"""Windows that are ended twice, late or never, whichever optimizer steps."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from tests.batch_size.loops import attached, batch, mean_loss, piece_losses, sgd, small_model, train, windows_of


def test_a_window_ended_twice_raises_an_alert_and_counts_once() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            norm = probe.clip_grad_norm_(0.5)
            probe.step()
            again = probe.clip_grad_norm_(0.5)
            assert float(norm) > 0.5
            assert float(again) == pytest.approx(0.5, rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.units_per_window) == (3, 8)
        assert "ended twice" in probe.alerts["no_backward"]


def test_a_window_never_ended_raises_an_alert_and_its_pieces_are_forgotten() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as probe:
        for window in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            if window:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert (reading.windows, reading.dropped) == (2, {})
        assert "call probe.step()" in probe.alerts["never_called"]


def test_a_last_window_that_is_never_ended_raises_an_alert_at_close() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        with probe.piece(units=4):
            piece_losses(model, [4])[0]().backward()
        optimizer.step()
        assert not probe.alerts  # probe.step() may still come: late
    assert "was not ended" in probe.alerts["never_called"]


def test_a_window_ended_after_the_optimizers_step_raises_one_alert_only() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as probe:
        for _ in range(3):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            optimizer.step()
            probe.step()
            optimizer.zero_grad()
        reading = probe.reading()
    assert list(probe.alerts) == ["ended_late"]
    assert reading.windows == 0
    [(reason, n)] = reading.dropped.items()
    assert "ended after optimizer.step()" in reason
    assert n == 3


def test_without_an_optimizer_the_one_that_steps_is_found() -> None:
    model = small_model()
    other, optimizer = sgd(small_model()), sgd(model)
    with attached(model) as probe:
        windows_of(model, probe, 5, other, optimizer)
        assert probe.alerts == {}
        windows_of(model, probe, 2, optimizer, ended=False)
    assert list(probe.alerts) == ["never_called"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_another_optimizer_than_the_given_one_is_followed(is_replaced: bool) -> None:
    """The given one is another model's, or the loop makes a new one."""
    model = small_model()
    given = sgd(model if is_replaced else small_model())
    with attached(model, given, log_every=1) as probe:
        if is_replaced:
            early = sgd(model)  # stepped once, long ago
            windows_of(model, probe, 1, early)
            windows_of(model, probe, 3, given)
        windows_of(model, probe, 5, sgd(model))
        optimizer = sgd(model)
        windows_of(model, probe, 5, optimizer)
        assert list(probe.alerts) == ["optimizer_replaced"]
        assert probe.reading().dropped == {}
        windows_of(model, probe, 2, optimizer, ended=False)
    assert list(probe.alerts) == ["optimizer_replaced", "never_called"]


def test_another_models_optimizer_gives_way_though_it_steps_too() -> None:
    model = small_model()
    given, optimizer = sgd(small_model()), sgd(model)
    with attached(model, given, log_every=1) as probe:
        windows_of(model, probe, 8, given, optimizer)
        assert list(probe.alerts) == ["optimizer_replaced"]
        windows_of(model, probe, 2, optimizer, ended=False)
    assert list(probe.alerts) == ["optimizer_replaced", "never_called"]


def test_a_check_without_any_step_to_see_says_so() -> None:
    model = small_model()
    with attached(model, sgd(small_model()), log_every=1) as probe:
        windows_of(model, probe, 20)
        assert probe.alerts == {}
        windows_of(model, probe, 2)
        assert "cannot be checked" in probe.alerts["steps_unwatched"]


@pytest.mark.parametrize("are_given", [False, True])
def test_optimizers_that_share_the_parameters_out_are_the_models_together(are_given: bool) -> None:
    """As Muon for matrices and AdamW for the rest."""
    model = small_model()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in (model[:2], model[2:])]
    with attached(model, optimizers if are_given else None, log_every=1) as probe:
        windows_of(model, probe, 30, *optimizers)
        assert probe.alerts == {}
        windows_of(model, probe, 6, optimizers[1])  # the other rests
        assert probe.alerts == {}
        windows_of(model, probe, 2, *optimizers, ended=False)
    assert list(probe.alerts) == ["never_called"]


def test_several_optimizers_of_the_same_parameters_need_one_to_be_given() -> None:
    model = small_model()
    optimizers = [sgd(model), sgd(model)]
    with attached(model, log_every=1) as probe:
        windows_of(model, probe, 6, *optimizers)
        assert "2 optimizers step the same parameters" in probe.alerts["steps_unwatched"]
    with attached(model, optimizers[1], log_every=1) as probe:
        windows_of(model, probe, 30, *optimizers)
        assert probe.alerts == {}


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_window_may_end_inside_a_steps_closure(is_given: bool, by_keyword: bool) -> None:
    """The last backward runs inside the step, as some trainers do it."""
    model = small_model()
    optimizer = sgd(model)
    first, last = piece_losses(model, [4, 4])
    with attached(model, optimizer if is_given else None, log_every=1) as probe:

        def closure() -> float:
            with probe.piece(units=4):
                loss = last()
                loss.backward()
            probe.step()
            return float(loss.detach())

        for _ in range(8):
            with probe.piece(units=4):
                first().backward()
            optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            model.zero_grad()
        assert probe.reading().windows == 8, probe.reading().dropped
        assert probe.alerts == {}


def test_close_removes_the_hooks() -> None:
    model = small_model()
    optimizer = sgd(model)
    before = len(_global_optimizer_pre_hooks)
    with attached(model, optimizer):
        assert len(_global_optimizer_pre_hooks) == before + 1
    assert len(_global_optimizer_pre_hooks) == before
    assert not optimizer._optimizer_step_pre_hooks


def test_steps_inside_backward_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with attached(model, log_every=1, verbose=True) as probe:
        assert "post-accumulate-grad hooks on 8 parameters:" in capsys.readouterr().err
        windows_of(model, probe, 3)
        assert probe.reading().windows == 0
        assert "stepped inside backward" in probe.reading().reason
        assert list(probe.alerts) == ["stepped_in_backward"]


def step_by_hand(parameter: torch.Tensor) -> None:
    parameter.data.sub_(parameter.grad, alpha=0.0)  # type: ignore[arg-type]
    parameter.grad = None


@pytest.mark.parametrize("by_hand", [True, False])
def test_steps_inside_backward_by_hooks_that_come_after_attach_are_named(
    by_hand: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    with attached(model, log_every=1, verbose=True) as probe:
        windows_of(model, probe, 2)
        assert "post-accumulate" not in capsys.readouterr().err
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step_by_hand if by_hand else step)
        windows_of(model, probe, 3)
        assert capsys.readouterr().err.count("post-accumulate-grad hooks on 8 parameters since attach") == 1
        assert probe.reading().windows == 2
        assert list(probe.alerts) == ["taken_in_backward" if by_hand else "stepped_in_backward"]
        assert "step after the last backward" in next(iter(probe.alerts.values()))


def test_hooks_that_leave_the_gradient_alone_are_no_cause_for_alarm() -> None:
    model = small_model()
    with attached(model, log_every=1) as probe:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
        windows_of(model, probe, 3)
        assert probe.reading().windows == 3
        assert probe.alerts == {}


def test_an_optimizer_that_steps_another_inside_its_step_is_one_optimizer() -> None:
    """As ZeroRedundancyOptimizer does."""
    model = small_model()

    class Wrapping(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(model.parameters(), {})
            self.inner = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    optimizer = Wrapping()
    with attached(model) as probe:
        train(model, probe, optimizer, windows=30)
        assert probe.alerts == {}
        with probe.piece(units=4):  # a window that is not ended is still noticed
            mean_loss(model, *batch(4, torch.Generator().manual_seed(0))).backward()
        optimizer.step()
        train(model, probe, optimizer, windows=1)
        assert list(probe.alerts) == ["never_called"]


def step_without_an_optimizer(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=1e-3)  # type: ignore[arg-type]


def test_without_an_optimizer_weights_that_change_unseen_are_named() -> None:
    model = small_model()
    with attached(model, log_every=1) as probe:
        for window in range(24):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            probe.step()
            step_without_an_optimizer(model)
            model.zero_grad()
            assert ("steps_unwatched" in probe.alerts) == (window > 20)
    assert "no optimizer was given" in probe.alerts["steps_unwatched"]
    assert "as optimizer=" in probe.alerts["steps_unwatched"]


def test_weights_that_rest_need_no_optimizer() -> None:
    """A noise scale measured at one checkpoint, or at a few of them."""
    model, generator = small_model(), torch.Generator().manual_seed(0)
    state = model.state_dict()
    with attached(model, log_every=1) as probe:
        for window in range(60):
            if window % 20 == 0:
                model.load_state_dict(state)
            for _ in range(2):
                with probe.piece(units=4):
                    mean_loss(model, *batch(4, generator)).backward()
            probe.step()
            model.zero_grad()
        assert probe.alerts == {}


def test_parameters_that_join_an_optimizer_later_are_its_own() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(small_model().parameters(), lr=0.0)  # those of another model at first
    with attached(model, optimizer, log_every=1) as probe:
        windows_of(model, probe, 2, optimizer)
        optimizer.add_param_group({"params": list(model.parameters())})
        windows_of(model, probe, 8, optimizer, sgd(model))
        assert probe.alerts == {}
        windows_of(model, probe, 2, optimizer, ended=False)
    assert list(probe.alerts) == ["never_called"]


@pytest.mark.parametrize("every", [1, 4])
def test_windows_that_are_all_ended_late_are_dropped_however_few_are_measured(every: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer, every=every) as probe:
        for _ in range(24):
            for loss in piece_losses(model, [4, 4]):
                with probe.piece(units=4):
                    loss().backward()
            optimizer.step()
            probe.step()
            optimizer.zero_grad()
        reading = probe.reading()
        assert reading.windows == 0
        assert sum(reading.dropped.values()) >= 24 // every
        assert "ended after optimizer.step()" in probe.alerts["ended_late"]


@pytest.mark.parametrize("n_optimizers", [1, 2])
@pytest.mark.parametrize("n_calls", [1, 3])
def test_a_window_ended_with_each_micro_batch_is_named(n_calls: int, n_optimizers: int) -> None:
    model = small_model()
    parts = [model] if n_optimizers == 1 else [model[:2], model[2:]]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
    with attached(model, optimizers) as probe:
        for _ in range(6):
            for number, loss in enumerate(piece_losses(model, [4, 4, 4])):
                with probe.piece(units=4):
                    loss().backward()
                if n_calls == 3 or number == 2:
                    probe.step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert ("was called 3 times between optimizer steps" in probe.alerts.get("called_often", "")) == (n_calls == 3)


@pytest.mark.parametrize("is_given", [True, False])
def test_an_optimizer_that_the_loop_is_done_with_is_not_kept_alive(is_given: bool) -> None:
    model = small_model()
    optimizer = sgd(model)
    with attached(model, optimizer if is_given else None) as probe:
        windows_of(model, probe, 5, optimizer)
        reference = weakref.ref(optimizer)
        del optimizer
        assert reference() is None
        windows_of(model, probe, 25)
        assert "has not stepped" in probe.alerts["steps_unwatched"]

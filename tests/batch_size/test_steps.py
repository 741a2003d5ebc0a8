"""The step of whichever optimizer ends the window; loops that end it by themselves, or that cannot be followed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from tests.batch_size.loops import attached, batch, mean_loss, piece_losses, sgd, small_model, train, windows_of

Optimizers = Sequence[torch.optim.Optimizer]


@functools.cache
def readings(
    make: Callable[[nn.Sequential], Optimizers], call: str, *, are_given: bool = True, windows: int = 12, **options: Any
) -> tuple[sonde.NoiseScaleReading, dict[str, str], list[Tensor]]:
    """A loop that ends its windows by `probe.step()` before the step, after it, now and then, or never."""
    model = small_model()
    optimizers, generator = make(model), torch.Generator().manual_seed(0)
    with attached(model, list(optimizers) if are_given else None, **options) as probe:
        for window in range(windows):
            for n in (4, 6):
                with probe.piece(units=n):
                    mean_loss(model, *batch(n, generator)).backward()
            if call == "before" or (call == "now and then" and window % 3 == 1):
                probe.step()
            if call == "a clip":
                probe.clip_grad_norm_(1e9)
            for optimizer in optimizers:
                optimizer.step()
            if call == "after":
                probe.step()
            model.zero_grad()
        reading = probe.reading()
        return reading, dict(probe.alerts), [p.detach().clone() for p in model.parameters()]


LOOPS: dict[str, Callable[[nn.Sequential], Optimizers]] = {
    "one": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01)],
    "two": lambda model: [torch.optim.SGD(model[:2].parameters(), lr=0.01), torch.optim.Adam(model[2:].parameters())],
    "fused": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)],
}


@pytest.mark.parametrize("call", ["never", "after", "now and then", "a clip"])
@pytest.mark.parametrize(("loop", "are_given"), [("one", False), ("two", True), ("two", False), ("fused", True)])
def test_the_step_ends_the_window(loop: str, are_given: bool, call: str) -> None:
    """Whatever the loop calls besides, the numbers are those of a loop that ends each window before the step."""
    expected, _, rested = readings(LOOPS[loop], "before", are_given=are_given)
    reading, alerts, weights = readings(LOOPS[loop], call, are_given=are_given)
    assert (reading.windows, reading.dropped, alerts) == (12, {}, {})
    if call != "a clip":  # which computes |F|² in another order
        assert (reading.trace_cov, reading.grad_sq) == (expected.trace_cov, expected.grad_sq)
    assert reading.trace_cov == pytest.approx(expected.trace_cov, rel=1e-6)
    assert all(map(torch.equal, weights, rested))


@pytest.mark.parametrize("call", ["never", "after"])
def test_windows_that_are_not_measured_are_ended_too(call: str) -> None:
    reading, alerts, _ = readings(LOOPS["two"], call, windows=40, every=4)
    assert (reading.n_steps, reading.dropped, alerts) == (40, {}, {})
    assert reading.windows == 11


# Each loop trains a small model. Windows that were read, windows that were dropped, and alerts.

Loop = Callable[[nn.Sequential, Any], object]


def backwards(model: nn.Module, probe: Any, n: int = 2) -> None:
    for loss in piece_losses(model, [4] * n):
        with probe.piece(units=4):
            loss().backward()


def in_turn(model: nn.Sequential, probe: Any) -> None:
    """Each optimizer has windows of its own, as where a generator and a critic in one module are trained in turn."""
    optimizers = LOOPS["two"](model)
    for _ in range(3):
        for optimizer in optimizers:
            windows_of(model, probe, 1, optimizer, ended=False)


def without_gradients(model: nn.Sequential, probe: Any) -> None:
    """Steps without a gradient end no window."""
    optimizer = sgd(model)
    for _ in range(6):
        windows_of(model, probe, 1, optimizer, ended=False)
        optimizer.step()
        sgd(small_model()).step()


def of_the_same_parameters(model: nn.Sequential, probe: Any) -> None:
    """The first step ends the window."""
    windows_of(model, probe, 6, sgd(model), sgd(model), ended=False)


class FailsOnce(torch.optim.SGD):
    """As one that runs out of memory."""

    n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        if self.n == 3:
            raise MemoryError
        return super().step(closure)


def fails_once(model: nn.Sequential, probe: Any) -> None:
    optimizers = FailsOnce(model.parameters(), lr=0.0), sgd(model)
    for window in range(6):
        with contextlib.suppress(MemoryError):
            windows_of(model, probe, 1, optimizers[window > 2], ended=False)
        model.zero_grad()


class Wrapping(torch.optim.Optimizer):
    """Steps another optimizer inside its step, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.01)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def wrapping(model: nn.Sequential, probe: Any) -> None:
    optimizer = Wrapping(model.parameters())
    train(model, probe, optimizer, windows=3)
    windows_of(model, probe, 3, optimizer, ended=False)


def twice_ended(model: nn.Sequential, probe: Any) -> None:
    for _ in range(6):
        backwards(model, probe)
        norm, _, again = probe.clip_grad_norm_(0.5), probe.step(), probe.clip_grad_norm_(0.5)
        assert float(norm) > 0.5
        assert float(again) == pytest.approx(0.5, rel=1e-4)
        model.zero_grad()


def each_micro_batch(n: int) -> Loop:
    def loop(model: nn.Sequential, probe: Any) -> None:
        optimizers = LOOPS["two"](model)[:n]
        for _ in range(6):
            for loss in piece_losses(model, [4, 4, 4]):
                with probe.piece(units=4):
                    loss().backward()
                probe.step()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()

    return loop


def weights_that_rest(model: nn.Sequential, probe: Any) -> None:
    """A noise scale measured at one checkpoint, or at a few of them, needs no optimizer."""
    state = model.state_dict()
    for seed in range(3):
        model.load_state_dict(state)
        train(model, probe, windows=20, seed=seed)


def steps_in_a_piece(model: nn.Sequential, probe: Any) -> None:
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model[0].weight.detach().clone()
    with probe.piece(units=4):
        piece_losses(model, [4])[0]().backward()
        optimizer.step()
    assert not torch.equal(before, model[0].weight)  # it is taken all the same


def in_backward(how: str, at: int = 2) -> Loop:
    """A hook on each parameter steps it, from a window on."""

    def loop(model: nn.Sequential, probe: Any) -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}

        def step(p: Any) -> None:
            if how == "by optimizers":
                optimizers[p].step()
                optimizers[p].zero_grad()
            elif how == "by hand":
                p.data.sub_(p.grad, alpha=0.0)
                p.grad = None

        windows_of(model, probe, at)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        windows_of(model, probe, 6 - at)

    return loop


def applied_in_backward(model: nn.Sequential, probe: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    windows_of(model, probe, 3)


def without_a_window(model: nn.Sequential, probe: Any) -> None:
    """Steps inside backward, and nothing that ends a window."""
    in_backward("by optimizers", at=0)(model, probe)
    for _ in range(40):
        piece_losses(model, [4])[0]().backward()
    assert probe.n_windows == 6


FOLLOWED: dict[str, tuple[Loop, int, dict[str, str]]] = {
    "optimizers in turn": (in_turn, 6, {}),
    "steps without a gradient": (without_gradients, 6, {}),
    "optimizers of the same parameters": (of_the_same_parameters, 6, {}),
    "a step that fails": (fails_once, 6, {}),
    "an optimizer inside another": (wrapping, 6, {}),
    "weights that rest": (weights_that_rest, 60, {}),
    "hooks that leave gradients alone": (in_backward(""), 6, {}),
    "ended twice": (twice_ended, 6, {"no_backward": "ended twice"}),
    "ended with each micro-batch": (each_micro_batch(1), 0, {"not_zeroed": "before each optimizer.step() only"}),
    "the same, two optimizers": (each_micro_batch(2), 0, {"not_zeroed": "before each optimizer.step() only"}),
    "a step inside a piece": (steps_in_a_piece, 0, {"not_ended": "inside a piece"}),
    "steps in backward": (in_backward("by optimizers", at=0), 0, {"stepped_in_backward": "step after the last"}),
    "steps in backward, later": (in_backward("by optimizers"), 2, {"stepped_in_backward": "step after the last"}),
    "steps in backward by hand": (in_backward("by hand"), 2, {"zero": "taken by a hook"}),
    "steps in backward by torch": (applied_in_backward, 0, {"stepped_in_backward": "step after the last"}),
    "steps in backward, no window": (without_a_window, 0, {"stepped_in_backward": "step after the last backward"}),
}


def test_a_loop_whose_steps_are_no_optimizers_of_torch_is_told_at_its_end() -> None:
    model = small_model()
    with attached(model) as probe:
        for _ in range(18):
            backwards(model, probe)
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=1e-3)  # type: ignore[arg-type]
            model.zero_grad()
    assert "call probe.step() before each step" in probe.alerts["no_step"]


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # an import of torch's compiles a function
@pytest.mark.parametrize("name", FOLLOWED)
def test_loops_that_step(name: str) -> None:
    """Windows are read and nothing is said, or what is wrong is said, and no number is made of it."""
    loop, windows, said = FOLLOWED[name]
    model = small_model()
    with attached(model, log_every=1) as probe:
        loop(model, probe)
        reading = probe.reading()
        assert reading.windows == windows, reading.dropped
        assert said or (reading.dropped, probe.alerts) == ({}, {})
        for kind, words in said.items():
            assert words in probe.alerts[kind]
        if "stepped_in_backward" in said:
            assert "stepped inside backward" in " ".join(reading.dropped)


# Closures.


class Twice(torch.optim.SGD):
    """Evaluates its closure again, as a line search does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Twice])
@pytest.mark.parametrize("ends_inside", [True, False])
@pytest.mark.parametrize("n_before", [0, 1])
@pytest.mark.parametrize(("is_given", "by_name"), [(True, True), (False, False), (True, False)])
def test_a_steps_closure_may_run_the_backwards(
    kind: type[torch.optim.SGD], is_given: bool, by_name: bool, ends_inside: bool, n_before: int
) -> None:
    """Or the last of them. The window ends after the closure's run; an optimizer that evaluates it again is named."""
    model = small_model()
    optimizer = kind(model.parameters(), lr=0.0)
    with attached(model, optimizer if is_given else None, log_every=1) as probe:

        def closure() -> float:
            if not n_before:
                optimizer.zero_grad()
            backwards(model, probe, 2 - n_before)
            if ends_inside:
                probe.step()
            return 1.5

        for _ in range(4):
            backwards(model, probe, n_before)
            assert (optimizer.step(closure=closure) if by_name else optimizer.step(closure)) == 1.5
            if n_before:
                optimizer.zero_grad()
        reading = probe.reading()
        named = any("evaluates its closure several times a step, as LBFGS" in why for why in reading.dropped)
        assert named == (kind is Twice)
        assert kind is Twice or (reading.windows, reading.dropped, probe.alerts) == (4, {}, {})

"""Optimizers that are followed in other ways than by hooks of their own, and those that cannot be followed."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch

from tests.batch_size.loops import attached, piece_losses, sgd, small_model, windows_of


class Lookahead(torch.optim.Optimizer):
    """As often written: its class skips `super().__init__()`, so it has no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.n = inner, inner.param_groups, inner.state, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.n += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], slow, strict=True):
                if self.n % 5 == 0:
                    q.add_(p.data - q, alpha=0.5)
                    p.data.copy_(q)


@pytest.mark.parametrize("metric", ["euclidean", "adam"])
def test_an_optimizer_without_hooks_is_watched_by_the_one_inside(metric: str) -> None:
    model, alone = small_model(), small_model()
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01))
    with attached(model, optimizer, metric=metric, every=1) as probe:
        windows_of(model, probe, 8, optimizer)
        reading = probe.reading()
        assert (reading.windows, dict(probe.alerts)) == (8 - (metric == "adam"), {})
        windows_of(model, probe, 3, optimizer, ended=False)
        reading = probe.reading()
        assert (reading.windows, dict(probe.alerts)) == (11 - (metric == "adam"), {})
    other = Lookahead(torch.optim.Adam(alone.parameters(), lr=0.01))
    for _ in range(11):
        for loss in piece_losses(alone, [4, 4]):
            loss().backward()
        other.step()
        alone.zero_grad()
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


class Twice(torch.optim.SGD):
    """Evaluates its closure again, as a line search does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@pytest.mark.parametrize(("kind", "is_seen"), [(Twice, True), (torch.optim.SGD, False)])
@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("ends_inside", [True, False])
def test_an_optimizer_that_evaluates_its_closure_again_is_named(
    kind: type[torch.optim.SGD], is_seen: bool, is_given: bool, by_name: bool, ends_inside: bool
) -> None:
    model = small_model()
    optimizer = kind(model.parameters(), lr=0.01)
    with attached(model, optimizer if is_given else None, every=1, units_per_piece=4) as probe:

        def closure() -> float:
            optimizer.zero_grad()
            for loss in piece_losses(model, [4, 4]):
                loss().backward()
            if ends_inside:
                probe.step()
            return 0.0

        for _ in range(4):
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            if not ends_inside:
                probe.step()
        dropped = probe.reading().dropped
    assert any("evaluates its closure several times a step, as LBFGS" in why for why in dropped) == is_seen


def test_lbfgs_is_refused() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="LBFGS evaluates its closure several times a step"):
        attached(model, torch.optim.LBFGS(model.parameters()))


def test_a_forked_process_that_trains_is_left_alone() -> None:
    model = small_model()
    optimizer = sgd(model)
    with attached(model, optimizer, every=1) as probe:
        windows_of(model, probe, 2, optimizer)
        end, other_end = os.pipe()
        if not (child := os.fork()):
            status = 1
            with contextlib.suppress(BaseException):
                windows_of(model, probe, 4, optimizer, ended=False)
                os.write(other_end, str((probe._ends.n_windows, list(probe.alerts))).encode())
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(end, 1000) == b"(2, [])"
        windows_of(model, probe, 2, optimizer, ended=False)
        assert (probe.reading().windows, probe.alerts) == (4, {})

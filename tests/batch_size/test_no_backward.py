"""Windows in which no backward added to the gradients of measured parameters, or one that is no micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.batch_size.loops import attached, piece_losses, sgd, small_model

CAUSES = {
    "ended twice": "the same window was ended twice (call probe.step()",
    "by hand": "gradients are set by hand, as those of torch.autograd.grad",
    "others": "other parameters are trained now, such as another adapter (attach to each)",
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_window_without_a_backward_names_the_causes(
    cause: str, set_to_none: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A window of the usual kind comes first, as where a loop changes from one adapter to another."""
    model, head = small_model(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with attached(model, optimizer, units_per_piece="first dim", per_example="auto", verbose=True) as probe:
        for window in range(6):
            loss = piece_losses(model, [4])[0]
            if window and cause == "by hand":
                for p, gradient in zip(
                    model.parameters(), torch.autograd.grad(loss(), [*model.parameters()]), strict=True
                ):
                    p.grad = gradient
            elif window and cause == "others":
                head(model(torch.randn(4, 12)).detach()).sum().backward()
            else:
                loss().backward()
            if window and cause == "ended twice":
                probe.step()
            probe.step()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        [message] = probe.reading().dropped
    assert CAUSES[cause] in message
    assert "could one example be told" not in capfd.readouterr().err


def test_a_window_without_declared_pieces_names_what_its_loop_may_have_done() -> None:
    model = small_model()
    with attached(model, units_per_piece=4) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        probe.step()
        model.zero_grad()
        for loss in piece_losses(model, [4, 4]):
            loss().backward()
        probe.step()
        assert probe.reading().windows == 1
        assert "outside 'with probe.piece():'" in probe.alerts["no_backward"]


def test_a_further_backward_may_be_said_to_be_no_micro_batch() -> None:
    model = small_model()
    optimizer, why = sgd(model), "two losses"

    def undeclared(n: int) -> None:
        for loss in piece_losses(model, [8] * n):
            loss().backward()

    with attached(model, optimizer, units_per_piece="first dim") as probe:
        probe.judge_further_backwards(lambda: why)
        undeclared(2)
        optimizer.zero_grad()
        probe.discard()
        for n in (1, 2):
            undeclared(n)
            optimizer.step()
            optimizer.zero_grad()
            assert (probe.alerts.get("units") == "two losses") == (n == 2)
        why = ""
        undeclared(2)
        optimizer.step()
        reading = probe.reading()
    # The window of one backward is too small, and nothing else is wrong with it.
    assert (reading.windows, list(reading.dropped.values())) == (1, [1, 1]), reading.dropped

"""Windows in which no backward added to the gradients of measured parameters, and what they are told."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.batch_size.loops import attached, piece_losses, small_model


def test_a_window_without_declared_pieces_names_what_its_loop_may_have_done() -> None:
    model = small_model()
    with attached(model, units_per_piece=4) as probe:
        for window in range(2):
            for loss in piece_losses(model, [4, 4]):
                with nullcontext() if window else probe.piece(units=4):
                    loss().backward()
            probe.step()
            model.zero_grad()
        assert probe.reading().windows == 1
        assert "outside 'with probe.piece():'" in probe.alerts["no_backward"]


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
    model, head = small_model(), torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with attached(model, optimizer, units_per_piece="first dim", per_example="auto", verbose=True) as probe:
        for window in range(6):
            if not window:
                piece_losses(model, [4])[0]().backward()
            elif cause == "by hand":
                of_loss = torch.autograd.grad(piece_losses(model, [4])[0](), list(model.parameters()))
                for p, gradient in zip(model.parameters(), of_loss, strict=True):
                    p.grad = gradient
            elif cause == "others":
                head(model(torch.randn(4, 12)).detach()).sum().backward()
            else:
                piece_losses(model, [4])[0]().backward()
                probe.step()
            probe.step()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        [message] = probe.reading().dropped
    assert CAUSES[cause] in message
    assert "could one example be told" not in capfd.readouterr().err

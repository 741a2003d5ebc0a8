"""Uneven routing shows in the experts' noise scale: the same tokens through equal experts, sent to them in two ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.batch_size.cut_loops import attached
from tests.batch_size.cut_models import Values, last_window
from tests.batch_size.cuts import made
from tests.batch_size.set_ups import LENGTH, Loop, loss_of
from tests.gradient_norm.routed_experts import N_EXPERTS, build
from tests.ranks import Ranks

LOOP = Loop("ep plain")
"""Two pairs of ranks, each of which holds all experts: with two backwards, an expert has four pieces."""
ROWS = 4
"""Sequences of one rank's piece. Their tokens can be shared by all experts equally."""
UNITS = 2 * ROWS
"""Sequences of an expert's piece: both ranks of a pair feed it."""


class Routes(nn.Module):
    """Sends all tokens to one expert, or every expert the same number, in place of a router that learns."""

    expert: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Logits of experts; the chosen one has all the weight."""
        chosen = torch.arange(len(x)) % N_EXPERTS if self.expert is None else torch.full((len(x),), self.expert)
        return torch.where(torch.arange(N_EXPERTS) == chosen[:, None], 0.0, -torch.inf)


def _window(is_even: bool) -> dict[str, tuple[float, float]]:
    """(tr Σ, |G|²) of each group. All tokens of a rank's piece are the same one, and so have the same gradient."""
    cut = made(LOOP)
    model: Any = cut.model
    model.router = routes = Routes()
    with torch.no_grad():
        model.experts.w.to_local().copy_(build().experts.w[0])
    rank = dist.get_rank()
    with attached(cut, None) as probe:
        for k in range(2):
            routes.expert = None if is_even else 2 * (rank // LOOP.n_feeding) + k  # each of the four pieces has its own
            with probe.piece(units=ROWS):
                loss_of(LOOP, model, torch.full((ROWS, LENGTH), 2 * rank + k)).backward()
        cut.reduce()
        probe.step()
        values: Values | None = last_window(probe)
        reading = probe.reading()
    assert values is not None, reading.dropped
    return dict(zip(("total", *reading.groups), values, strict=True))


def test_uneven_routing_shows_as_a_larger_trace_of_the_experts(ranks4: Ranks) -> None:
    """There are K experts and K pieces of experts. The tokens of piece k have the gradient γ_k, whichever expert it is.

    Even routing gives γ_k/K to each expert, so |h_k|² = |γ_k|²/K. Uneven routing gives γ_k to one expert, so |h_k|² and
    its mean |G|² + tr Σ/n are K times as large. No two pieces share an expert then, so |G|² is 0.
    """
    (even, *other_even), (uneven, *other_uneven) = ranks4(_window, True), ranks4(_window, False)
    assert all(values == even for values in other_even)
    assert all(values == uneven for values in other_uneven)
    (even_trace, even_sq), (trace, sq) = even.pop("layer"), uneven.pop("layer")
    # Gradients are of fp32.
    assert even_sq + even_trace / UNITS > 0.0
    assert sq + trace / UNITS == pytest.approx(N_EXPERTS * (even_sq + even_trace / UNITS), rel=1e-5)
    assert sq == pytest.approx(0.0, abs=1e-5 * trace / UNITS)
    # tr Σ/n is the whole mean now. With even routing it was K/(K − 1) of it at most, as where |F|² is 0.
    assert trace > (N_EXPERTS - 1 - 1e-5) * even_trace
    for parts in (even, uneven):
        del parts["total"]
    assert list(even) == ["embed", "head"]
    for name, values in even.items():  # the other parameters have the same gradients in both
        assert uneven[name] == pytest.approx(values, rel=1e-5, abs=1e-5 * values[0] / ROWS)

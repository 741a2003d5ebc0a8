"""Per-example gradients by a loop: one backward for each example, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from sonde.batch_size.per_example.covered import PerExampleSquares
from sonde.batch_size.per_example.norms import PerExampleNorms

Shares = Callable[[nn.Module], Tensor]
"""Each example's share of the loss, [examples]: the terms that are its own, divided as the whole loss is."""


def exact_gradients(model: nn.Module, shares: Shares) -> dict[str, Tensor]:
    """Every example's own gradient of each trainable parameter: [examples, *shape], zeros where it has none."""
    double = copy.deepcopy(model).double()
    named = {name: p for name, p in double.named_parameters() if p.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in named}
    for share in shares(double):
        grads = torch.autograd.grad(share, list(named.values()), retain_graph=True, allow_unused=True)
        for (name, p), grad in zip(named.items(), grads, strict=True):
            found[name].append(torch.zeros_like(p) if grad is None else grad.to_dense())
    return {name: torch.stack(grads) for name, grads in found.items()}


def exact_squares(model: nn.Module, shares: Shares) -> dict[str, Tensor]:
    """|h_b|² of each parameter, by name: [examples]."""
    return {name: grads.flatten(1).square().sum(1) for name, grads in exact_gradients(model, shares).items()}


def measure(model: nn.Module, shares: Shares, **options: Any) -> PerExampleSquares:
    """The same by the hooks, in one backward of the whole loss."""
    with PerExampleNorms(model, **options) as norms:
        parts = shares(model)
        parts.sum().backward()
        return norms.take(len(parts))


def assert_exact(
    model: nn.Module, shares: Shares, *, rel: float = 1e-9, not_covered: tuple[str, ...] = (), **options: Any
) -> PerExampleSquares:
    """All parameters are covered but those that are named, and each of their values is the oracle's.

    Args:
        model: in float64, unless `rel` says otherwise.
        shares: each example's share of the loss.
        rel: of each example's |h_b|² of a parameter. Nothing but rounding separates the two.
        not_covered: parameters that must have a reason.
        options: of `PerExampleNorms`.
    """
    exact = exact_squares(model, shares)
    squares = measure(model, shares, **options)
    assert_as(squares, exact, rel=rel, not_covered=not_covered)
    return squares


def assert_as(
    squares: PerExampleSquares, exact: dict[str, Tensor], *, rel: float = 1e-9, not_covered: Collection[str] = ()
) -> None:
    """Each parameter but those that are named is covered, and has these |h_b|², [examples]."""
    assert set(squares.not_covered()) == set(not_covered), squares.not_covered()
    for name, row in zip(squares.names, squares.sq_norms, strict=True):
        if name in not_covered:
            assert row.isnan().all(), name
        else:
            torch.testing.assert_close(row, exact[name], rtol=rel, atol=1e-30, msg=lambda m, name=name: f"{name}: {m}")


def shares_of(*inputs: Tensor) -> Shares:
    """A loss whose terms are of each example alone, with a gradient that differs from place to place.

    The inputs keep their dtype in a model of that dtype, and become float64 in the oracle's copy.
    """

    def shares(model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        output = model(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
        flat = output.flatten(1)
        slopes = torch.linspace(0.5, 2.0, flat.shape[1], dtype=flat.dtype)
        return (torch.tanh(flat) * slopes).sum(1) / len(flat)

    return shares

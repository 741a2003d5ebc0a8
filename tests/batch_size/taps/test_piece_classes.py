"""Classes of parameters beside experts, as a branch would add them: each has columns, elements and a κ of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sonde.batch_size import found_model
from sonde.batch_size.taps.shared_pieces import PieceClass
from tests.batch_size.loops import attached, small_model, train


class SamePieces:
    """A class that is fed by the pieces of the rest."""

    def add(self, squares: torch.Tensor, counts: Any) -> None:
        pass

    def sum(self, squares: torch.Tensor) -> Any:
        return squares, {}, {}


def find_model(*arguments: Any) -> found_model.FoundModel:
    """With two classes: vectors, and one of the matrices."""
    found = found_model.find_model(*arguments)
    vectors = frozenset(i for i, shape in enumerate(found.whole.shapes) if len(shape) < 2)
    head = frozenset([found.whole.names.index("4.weight")])
    made: Any = SamePieces
    classes = [PieceClass("vectors", vectors, "was it changed", made), PieceClass("heads", head, "", made)]
    return replace(found, classes=classes)


def factor_of(name: str, p: nn.Parameter) -> float:
    return 0.5 if p.dim() < 2 else 3.0 if name == "4.weight" else 1.0


def numbers(factors: bool, noise: float = 0.0) -> tuple[dict[str, int], list[tuple[float, float]]]:
    """Reasons of dropped windows; and of each parameter tr Σ and |G|², in the units of the pieces' gradients."""
    model = small_model(torch.float64)
    named = [(factor_of(name, p) if factors else 1.0, p) for name, p in model.named_parameters()]

    def before_step() -> None:
        for factor, p in named:
            assert p.grad is not None
            p.grad.mul_(factor).add_(noise * torch.randn_like(p.grad) * (factor == 0.5))

    with attached(model, groups="parameters") as probe:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        train(model, probe, optimizer, windows=2, before_step=before_step, dtype=torch.float64)
        solved = probe.window()
        estimates = zip(named, solved.per_group, strict=True) if solved else ()
        return probe.reading().dropped, [
            (e.trace_cov / factor**2, e.grad_sq / factor**2) for (factor, _), e in estimates
        ]


def test_each_class_has_a_factor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped, expected = numbers(factors=False)
    assert not dropped
    dropped, _ = numbers(factors=True)
    assert next(iter(dropped)).startswith("the gradient is not a multiple of the sum of its pieces")
    monkeypatch.setattr("sonde.batch_size.probe.find_model", find_model)
    dropped, found = numbers(factors=True)
    assert not dropped
    # Gradients are in fp64, and |G|² is a difference of squares that tr Σ is the size of.
    for of_parameter, exact in zip(found, expected, strict=True):
        assert of_parameter == pytest.approx(exact, rel=1e-9, abs=1e-9 * exact[0])
    dropped, _ = numbers(factors=True, noise=0.1)
    reason = "the vectors' gradient is not a multiple of the sum of its pieces: was it changed."
    assert next(iter(dropped)).startswith(reason)

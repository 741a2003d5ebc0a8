"""Rows that share samples are no examples: the doubt names the cause, and independent rows are never accused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sonde
from tests.batch_size.loops import attached

DIRECTIONS = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))


def fresh(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 10, generator=generator)
    return x, functional.one_hot((0.7 * x @ DIRECTIONS).argmax(1), 4).float()


def drawn(kind: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = fresh(n, generator)
    part = float(torch.rand((), generator=generator))
    order = {
        "flip": torch.arange(n).flip(0),  # as timm does
        "roll": torch.arange(n).roll(1),  # as torchvision does
        "random": torch.randperm(n, generator=generator),
    }
    if kind in order:
        partner = order[kind]
        return part * x + (1 - part) * x[partner], part * y + (1 - part) * y[partner]
    if kind == "repeated":
        rows = torch.arange(n) // 2
        return x[rows] + 0.3 * torch.randn(n, 10, generator=generator), y[rows]
    if kind == "sorted":
        return x[x[:, 0].argsort()], y[x[:, 0].argsort()]
    return x, y


def trained(
    kind: str, *, rate: float, pieces: int = 1, steps: int = 80, adam: bool = False, **options: object
) -> sonde.NoiseScaleProbe:
    """A probe after some steps of training; it is closed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(1)
    with attached(model, optimizer, units_per_piece=64, log_every=1, **options) as probe:  # type: ignore[arg-type]
        for _ in range(steps):
            for _ in range(pieces):
                x, y = drawn(kind, 64, generator)
                functional.cross_entropy(model(x), y).backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
        probe.reading()
    return probe


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "flip",
            "the second and the last but one, and so on are more alike than chance allows",
        ),
        ("roll", "neighbouring rows of a batch are more alike than chance allows"),
        ("repeated", "neighbouring rows of a batch are more alike than chance allows"),
    ],
)
def test_shared_samples_are_named_and_give_no_number(kind: str, words: str) -> None:
    probe = trained(kind, rate=0.3, per_example="auto")
    assert words in probe.alerts["dependent_examples"]
    assert "mixup, cutmix or repeated augmentation" in probe.alerts["dependent_examples"]
    reading = probe.reading()
    assert (reading.status, reading.b_simple) == ("unresolved", None)
    assert "not independent" in reading.reason


@pytest.mark.parametrize("kind", ["independent", "sorted"])
@pytest.mark.parametrize(("rate", "adam"), [(0.1, False), (3.0, False), (0.03, True)])
def test_independent_rows_are_not_accused_at_any_rate(kind: str, rate: float, adam: bool) -> None:
    probe = trained(kind, rate=rate, adam=adam, per_example="auto")
    assert "dependent_examples" not in probe.alerts
    assert probe.reading().windows == 80


@pytest.mark.parametrize(("kind", "is_doubted"), [("random", True), ("independent", False)])
def test_where_both_are_read_examples_are_held_against_pieces(kind: str, is_doubted: bool) -> None:
    """Partners at random places show nowhere in the order of rows, but pieces differ more than examples say."""
    probe = trained(kind, rate=0.1, pieces=8, per_example="always")
    assert ("dependent_examples" in probe.alerts) == is_doubted
    if is_doubted:
        assert "times the noise that single examples say" in probe.alerts["dependent_examples"]
        assert probe.reading().b_simple is None


def test_pieces_of_rows_that_share_samples_are_read_as_they_are() -> None:
    probe = trained("flip", rate=0.1, pieces=4, steps=20, per_example="auto")
    assert "dependent_examples" not in probe.alerts
    assert probe.reading().u == pytest.approx(1 / 64)


@pytest.mark.parametrize(("per_example", "pieces"), [("auto", 1), ("always", 2)])
def test_the_set_up_says_that_rows_must_share_no_samples(
    per_example: str, pieces: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("independent", rate=0.1, pieces=pieces, steps=4, per_example=per_example, verbose=True)
    assert (
        capsys.readouterr().err.count("rows that share samples, as after mixup, or that are not drawn at random") == 1
    )

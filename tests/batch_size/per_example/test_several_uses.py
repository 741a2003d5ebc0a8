"""A parameter that is used several times: its uses are added up before they are squared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sonde.batch_size.per_example.norms import PerExampleNorms
from tests.batch_size.per_example.oracle import assert_as, assert_exact, exact_squares, shares_of

B, T, WIDTH, VOCABULARY = 4, 6, 8, 11


class Tied(nn.Module):
    """A language model whose head is its embedding: [B, T] → [B, T, vocabulary]."""

    def __init__(self, *, padding_idx: int | None = None, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding_idx, sparse=sparse)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


class EncoderDecoder(Tied):
    """One table, looked up with two inputs, and the head: [B, 2 T] → [B, T, vocabulary]."""

    def forward(self, ids: Tensor) -> Tensor:
        source, target = self.embed(ids[:, :T]), self.embed(ids[:, T:])
        return self.head(torch.tanh(self.mix(target) + source.mean(1, keepdim=True)))


class TwoHeads(Tied):
    """The table as a head in two places, and looked up between them."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embed(ids)))
        early = self.head(hidden)
        return early + self.head(torch.sin(hidden) + self.embed(early.argmax(-1)))


class Repeated(nn.Module):
    """One block, called three times."""

    def __init__(self, use: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + (self.block(x) if self.use is None else self.use(self.block, x))
        return x


class TwoNames(nn.Module):
    """Layers that share one weight, of other kinds and with other numbers of positions."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.sin(self.first(x))[:, : x.shape[1] - 1]))


def ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tied embedding": (Tied, ids(B, T)),
    "tied embedding, longer than the vocabulary": (Tied, ids(B, 20)),
    "tied embedding with padding": (lambda: Tied(padding_idx=3), ids(B, 20)),
    "one table, two lookups and a head": (EncoderDecoder, ids(B, 2 * T)),
    "one table, two heads and two lookups": (TwoHeads, ids(B, T)),
    "a block called three times": (Repeated, torch.randn(B, T, WIDTH)),
    "a block called three times on rows": (Repeated, torch.randn(B, WIDTH)),
    "a block called on many positions": (Repeated, torch.randn(B, 40, WIDTH)),
    "two linear layers with one weight": (
        lambda: TwoNames(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        torch.randn(B, T, WIDTH),
    ),
    "a convolution called three times": (
        lambda: Repeated(lambda block, x: block[1](x[..., None] * torch.ones(WIDTH).to(x)).mean(-1)),
        torch.randn(B, T, WIDTH),
    ),
}


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    make, x = CASES[name]
    model = make()
    if name == "a convolution called three times":
        model.block = nn.Sequential(nn.Identity(), nn.Conv1d(T, T, 3, padding=1))
        model.use = lambda block, x: block(x)
    return model.double(), x


@pytest.mark.parametrize("staging", [8 * 2**20, 20_000], ids=["", "small staging area"])
@pytest.mark.parametrize("name", CASES)
def test_uses_are_added_before_they_are_squared(name: str, staging: int) -> None:
    model, x = model_of(name)
    assert_exact(model, shares_of(x), staging_bytes=staging)


@pytest.mark.parametrize("name", CASES)
def test_the_squares_of_single_uses_would_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the products between uses each of these cases is wrong, so the test above can fail."""
    from sonde.batch_size.per_example import piece

    model, x = model_of(name)
    monkeypatch.setattr(piece, "inner_products", lambda x, y, staging: torch.zeros(len(piece.tensors_of(x)[0])))
    with pytest.raises(AssertionError, match="not close"):
        assert_exact(model, shares_of(x))


def two_losses(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model(x)
    return torch.tanh(y).flatten(1).sum(1), torch.sin(y).flatten(1).mean(1)


@pytest.mark.parametrize("name", ["tied embedding", "a block called three times"])
@pytest.mark.parametrize("forwards", [1, 2], ids=["one graph", "two forwards"])
def test_several_backwards_of_the_same_examples(name: str, forwards: int) -> None:
    model, x = model_of(name)
    x = x.double() if x.is_floating_point() else x
    exact = exact_squares(model, lambda m: sum(two_losses(m, x)))  # type: ignore[arg-type]
    with PerExampleNorms(model, several_backwards=True) as norms:
        first, second = two_losses(model, x)
        first.sum().backward(retain_graph=forwards == 1)
        (second if forwards == 1 else two_losses(model, x)[1]).sum().backward()
        squares = norms.take(B)
    assert_as(squares, exact)


@pytest.mark.parametrize("forwards", [1, 2], ids=["one graph", "two forwards"])
def test_several_backwards_that_were_not_announced_are_refused(forwards: int) -> None:
    model, x = model_of("tied embedding")
    with PerExampleNorms(model) as norms:
        first, second = two_losses(model, x)
        first.sum().backward(retain_graph=forwards == 1)
        (second if forwards == 1 else two_losses(model, x)[1]).sum().backward()
        squares = norms.take(B)
        two_losses(model, x)[0].sum().backward()
        next_piece = norms.take(B)
    assert all("2 backwards" in reason for reason in squares.not_covered().values())
    assert squares.sq_norms.isnan().all()
    assert next_piece.not_covered() == {}


def test_uses_that_cannot_be_kept_say_how_much_memory_they_need() -> None:
    model = Repeated().double()
    shares = shares_of(torch.randn(B, 40, WIDTH))
    squares = assert_exact(model, shares, staging_bytes=1000, not_covered=("block.1.weight",))
    reason = squares.not_covered()["block.1.weight"]
    assert "takes 2,048 bytes, more than 1,000: say staging_bytes=2_048" in reason  # 4 examples × 8 × 8 × 8 bytes
    assert_exact(model, shares, staging_bytes=2048)


def test_pieces_whose_forwards_overlap() -> None:
    """As in a pipeline: the second forward comes before the first backward."""
    model, x = model_of("tied embedding")
    exact = exact_squares(model, shares_of(x))
    with PerExampleNorms(model) as norms:
        losses = [shares_of(part)(model).sum() * len(part) / B for part in (x[:3], x[3:])]
        found = []
        for loss, n in zip(losses, (3, 1), strict=True):
            loss.backward()
            found.append(norms.take(n))
    for squares, rows in zip(found, (slice(0, 3), slice(3, 4)), strict=True):
        assert_as(squares, {name: of_all[rows] for name, of_all in exact.items()})

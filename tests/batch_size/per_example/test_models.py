"""Whole models: every parameter's squared norms for each example, against one backward for each example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from tests.batch_size.per_example.oracle import assert_exact, exact_squares, measure

B = 4


class Block(nn.Module):
    """Attention and an MLP with an activation in place: [B, T, width] → [B, T, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm_attention(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu_(self.up(self.norm_mlp(x))))


class SmallGpt(nn.Module):
    """A GPT whose head is its embedding, with the positions of every sequence: [B, T] → [B, T, vocabulary]."""

    def __init__(self, vocabulary: int = 19, width: int = 16, context: int = 12) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).expand_as(ids)
        return self.head(self.norm(self.blocks(self.embed(ids) + self.position(places))))


def token_shares(model: Any, ids: Tensor) -> Tensor:
    """Each sequence's part of the mean loss over all tokens."""
    logits = model(ids[:, :-1])
    logits = logits if isinstance(logits, Tensor) else logits.logits
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1).sum(1) / losses.numel()


def tokens(n: int = 19, length: int = 9) -> Tensor:
    return torch.randint(n, (B, length))


def test_gpt() -> None:
    ids = tokens()
    squares = assert_exact(SmallGpt().double(), lambda model: token_shares(model, ids))
    assert len(squares.names) == 28


def test_gpt_in_fp32_is_exact_to_rounding() -> None:
    """1e-6 for all parameters together; fp32's own backward is no better for single parameters."""
    ids, model = tokens(), SmallGpt()
    exact = exact_squares(model, lambda m: token_shares(m, ids))
    squares = measure(model, lambda m: token_shares(m, ids))
    assert squares.not_covered() == {}
    total = torch.stack(list(exact.values())).sum(0)
    torch.testing.assert_close(squares.sq_norms.sum(0), total, rtol=1e-6, atol=0.0)
    for name, row in zip(squares.names, squares.sq_norms, strict=True):
        torch.testing.assert_close(row, exact[name], rtol=1e-4, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")


class TimeFirst(nn.Module):
    """A language model that reads [time, examples], as torch's layers do by default; its head is its embedding."""

    def __init__(self, *, transformer: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(19, 8), nn.LayerNorm(8)
        self.inner: Any = nn.TransformerEncoderLayer(8, 2, 16, 0.0) if transformer else nn.LSTM(8, 8)
        self.head = nn.Linear(8, 19)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.inner(self.embed(ids))
        return self.head(self.norm(inner[0] if isinstance(inner, tuple) else inner))


def column_shares(model: Any, ids: Tensor) -> Tensor:
    losses = cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten(), reduction="none")
    return losses.view(-1, ids.shape[1]).sum(0) / losses.numel()


@pytest.mark.parametrize("transformer", [True, False], ids=["transformer", "LSTM"])
def test_examples_in_dim_1(transformer: bool) -> None:
    model, columns = TimeFirst(transformer=transformer).double(), tokens().T
    own = () if transformer else tuple(name for name, _ in model.named_parameters() if name.startswith("inner"))
    assert_exact(model, lambda m: column_shares(m, columns), not_covered=own)
    assert_exact(model, lambda m: column_shares(m, columns), not_covered=own, staging_bytes=2400)


@pytest.mark.parametrize("transformer", [True, False], ids=["transformer", "LSTM"])
def test_as_many_positions_as_examples_in_a_model_that_may_read_time_first(transformer: bool) -> None:
    squares = measure(TimeFirst(transformer=transformer).double(), lambda m: column_shares(m, tokens(length=B + 1).T))
    assert len(squares.not_covered()) == len(squares.names)
    assert (
        "with batch_first=False was called with as many examples as positions" in squares.not_covered()["embed.weight"]
    )


def hugging_face(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=19,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config)
    from tests.tiny_llama import tiny_llama

    tied = kind == "tied llama"
    return tiny_llama(vocab_size=19, hidden_size=16, intermediate_size=24, tie_word_embeddings=tied)  # type: ignore[no-any-return]


class WithPositions(nn.Module):
    """GPT-2, told the positions of each sequence: its table of positions is then looked up for every example."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids, position_ids=torch.arange(ids.shape[1]).expand_as(ids))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "tied llama"])
def test_models_of_transformers(kind: str) -> None:
    model, ids = hugging_face(kind).double(), tokens()
    not_covered = ("transformer.wpe.weight",) if kind == "gpt2" else ()
    # Llama's norms compute in fp32 in a float64 model too.
    rel = 1e-9 if kind == "gpt2" else 1e-6
    squares = assert_exact(model, lambda m: token_shares(m, ids), rel=rel, not_covered=not_covered)
    if kind == "gpt2":
        assert "is 1, not 4 examples" in squares.not_covered()["transformer.wpe.weight"]
        assert_exact(WithPositions(model), lambda m: token_shares(m, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["autocast", "parameters"])
def test_16_bits(dtype: torch.dtype, kind: str) -> None:
    """The squares are those of the gradients that 16-bit backward has, so they differ from fp64's by 16-bit rounding.

    Compared with one backward for each example in the same precision, whose own rounding is what is allowed here.
    """
    ids, model = tokens(), SmallGpt()
    if kind == "parameters":
        model = model.to(dtype)

    def shares(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=kind == "autocast"):
            logits = m(ids[:, :-1])
        losses = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        return losses.view(B, -1).sum(1) / losses.numel() * 64

    exact = {name: [] for name, _ in model.named_parameters()}
    for b in range(B):
        model.zero_grad()
        shares(model)[b].backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            exact[name].append(p.grad.double().square().sum())
    squares = measure(model, shares)
    assert squares.not_covered() == {}
    eps = torch.finfo(dtype).eps
    for name, row in zip(squares.names, squares.sq_norms, strict=True):
        torch.testing.assert_close(
            row, torch.stack(exact[name]), rtol=6 * eps, atol=0.0, msg=lambda m, n=name: f"{n}: {m}"
        )

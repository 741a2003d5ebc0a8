"""Each rule gives the squared norms of each example's gradient, in every form of its layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.batch_size.per_example.gradients import OuterProducts
from tests.batch_size.per_example.oracle import assert_exact, measure, shares_of

B = 5


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ids(*shape: int, n: int = 6) -> Tensor:
    return torch.randint(n, shape)


def in_training(layer: nn.Module) -> nn.Module:
    """The layer in float64, with parameters that are all different from 0 and 1."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape) * 0.5)
    return layer.double()


LINEAR = {
    "rows": (nn.Linear(7, 4), (B, 7)),
    "few positions, by Gram matrices": (nn.Linear(40, 30), (B, 3, 40)),
    "many positions, formed": (nn.Linear(4, 3), (B, 50, 4)),
    "images": (nn.Linear(6, 4), (B, 3, 2, 6)),
    "no bias": (nn.Linear(7, 4, bias=False), (B, 3, 7)),
    "one position": (nn.Linear(7, 4), (B, 1, 7)),
    "one output": (nn.Linear(7, 1), (B, 7)),
    "one example": (nn.Linear(7, 4), (1, 3, 7)),
}


@pytest.mark.parametrize("staging", [8 * 2**20, 1], ids=["", "no staging area"])
@pytest.mark.parametrize(("layer", "shape"), LINEAR.values(), ids=LINEAR)
def test_linear(layer: nn.Linear, shape: tuple[int, ...], staging: int) -> None:
    assert_exact(in_training(layer), shares_of(real(*shape)), staging_bytes=staging)


EMBEDDING = {
    "one row": (nn.Embedding(6, 4), (B,)),
    "sequences with repeats": (nn.Embedding(6, 4), (B, 20)),
    "sequences shorter than the table": (nn.Embedding(30, 4), (B, 9)),
    "two dims": (nn.Embedding(6, 4), (B, 3, 5)),
    "padding": (nn.Embedding(6, 4, padding_idx=2), (B, 20)),
    "padding, counted from the end": (nn.Embedding(6, 4, padding_idx=-1), (B, 20)),
    "sparse gradients": (nn.Embedding(6, 4, sparse=True), (B, 20)),
    "renormalised": (nn.Embedding(6, 4, max_norm=0.7), (B, 20)),
}


@pytest.mark.parametrize("staging", [8 * 2**20, 1], ids=["", "no staging area"])
@pytest.mark.parametrize(("layer", "shape"), EMBEDDING.values(), ids=EMBEDDING)
def test_embedding(layer: nn.Embedding, shape: tuple[int, ...], staging: int) -> None:
    assert_exact(in_training(layer), shares_of(ids(*shape)), staging_bytes=staging)


def test_embedding_that_divides_by_frequencies_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, scale_grad_by_freq=True), nn.Linear(4, 3)).double()
    squares = assert_exact(model, shares_of(ids(B, 7)), not_covered=("0.weight",))
    assert "scale_grad_by_freq" in squares.not_covered()["0.weight"]


NORMS = {
    "layer norm": (nn.LayerNorm(6), (B, 4, 6)),
    "layer norm of rows": (nn.LayerNorm(6), (B, 6)),
    "layer norm over two dims": (nn.LayerNorm((4, 6)), (B, 3, 4, 6)),
    "layer norm over the whole example": (nn.LayerNorm((4, 6)), (B, 4, 6)),
    "layer norm without bias": (nn.LayerNorm(6, bias=False), (B, 4, 6)),
    "layer norm with a large eps": (nn.LayerNorm(6, eps=0.5), (B, 2, 3, 6)),
    "rms norm": (nn.RMSNorm(6), (B, 4, 6)),
    "rms norm with eps": (nn.RMSNorm(6, eps=0.5), (B, 4, 6)),
    "group norm": (nn.GroupNorm(3, 6, eps=0.5), (B, 6, 4, 4)),
    "group norm of rows": (nn.GroupNorm(2, 6), (B, 6)),
    "instance norm": (nn.InstanceNorm2d(6, affine=True), (B, 6, 4, 4)),
    "instance norm of sequences": (nn.InstanceNorm1d(6, affine=True), (B, 6, 4)),
    "batch norm in evaluation mode": (nn.BatchNorm2d(6).eval(), (B, 6, 4, 4)),
    "batch norm of rows in evaluation mode": (nn.BatchNorm1d(6).eval(), (B, 6)),
    "instance norm by running statistics": (
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True).eval(),
        (B, 6, 4, 4),
    ),
}


@pytest.mark.parametrize("staging", [8 * 2**20, 1], ids=["", "no staging area"])
@pytest.mark.parametrize(("layer", "shape"), NORMS.values(), ids=NORMS)
def test_norm(layer: Any, shape: tuple[int, ...], staging: int) -> None:
    if getattr(layer, "running_mean", None) is not None:
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2.0)
    assert_exact(in_training(layer), shares_of(real(*shape)), staging_bytes=staging)


CONVOLUTIONS = {
    "2d": (nn.Conv2d(3, 4, 3), (B, 3, 8, 9)),
    "no bias": (nn.Conv2d(3, 4, 3, bias=False), (B, 3, 8, 9)),
    "stride": (nn.Conv2d(3, 4, 3, stride=(2, 3), padding=1), (B, 3, 8, 9)),
    "padding of each dim": (nn.Conv2d(3, 4, (3, 5), padding=(2, 1)), (B, 3, 8, 9)),
    "same": (nn.Conv2d(3, 4, (2, 4), padding="same", dilation=(3, 1)), (B, 3, 8, 9)),
    "valid": (nn.Conv2d(3, 4, 3, padding="valid"), (B, 3, 8, 9)),
    "dilation": (nn.Conv2d(3, 4, 3, dilation=2, padding=2), (B, 3, 8, 9)),
    "groups": (nn.Conv2d(6, 4, 3, groups=2), (B, 6, 8, 9)),
    "depthwise": (nn.Conv2d(6, 12, 3, groups=6), (B, 6, 8, 9)),
    "reflect": (nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="reflect"), (B, 3, 8, 9)),
    "circular": (nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="circular"), (B, 3, 8, 9)),
    "replicate, same": (nn.Conv2d(3, 4, 4, padding="same", padding_mode="replicate"), (B, 3, 8, 9)),
    "1 × 1": (nn.Conv2d(6, 4, 1), (B, 6, 5, 5)),
    "few places, as factors": (nn.Conv2d(32, 32, 3, padding=1, stride=2), (B, 32, 4, 3)),
    "few places in groups, as factors": (nn.Conv2d(64, 64, 3, groups=2, dilation=2), (B, 64, 6, 7)),
    "patches as factors": (nn.Conv2d(3, 32, 4, stride=4), (B, 3, 8, 8)),
    "1d": (nn.Conv1d(3, 4, 3, stride=2, padding=1), (B, 3, 11)),
    "1d, causal padding of the user": (nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(3, 4, 3)), (B, 3, 11)),
    "1d as factors": (nn.Conv1d(30, 40, 5, groups=2, dilation=2), (B, 30, 11)),
    "3d": (nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), (B, 2, 3, 4, 5)),
    "channels last": (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (B, 3, 8, 9)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("staging", [8 * 2**20, 1], ids=["", "no staging area"])
@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolution(layer: nn.Module, shape: tuple[int, ...], staging: int) -> None:
    x = real(*shape)
    if "channels last" in CONVOLUTIONS and layer is CONVOLUTIONS["channels last"][0]:
        x = x.to(memory_format=torch.channels_last)
    assert_exact(in_training(layer), shares_of(x), staging_bytes=staging)


class Attend(nn.Module):
    """Calls attention as the options say: [B, T, 8] → [B, T, 8]."""

    def __init__(self, *, cross: bool = False, call: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.first = options.setdefault("batch_first", True)
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.cross, self.call = cross, call or {}

    def forward(self, x: Tensor) -> Tensor:
        order = x if self.first else x.transpose(0, 1)
        query, key, value = order, order, order
        if self.cross:
            other = order[:, 1:] if self.first else order[1:]
            key, value = torch.sin(other), torch.cos(other)
        key = key[..., : self.attention.kdim]
        value = value[..., : self.attention.vdim]
        y, _ = self.attention(query, key, value, **self.call)
        return y if self.first else y.transpose(0, 1)


T = 4
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDED = torch.arange(T) >= torch.tensor([4, 3, 2, 4, 1])[:, None]
ATTENTION = {
    "self": Attend(),
    "positions first": Attend(batch_first=False),
    "without weights": Attend(call={"need_weights": False}),
    "no bias": Attend(bias=False),
    "causal": Attend(call={"attn_mask": CAUSAL}),
    "causal hint": Attend(call={"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "float mask": Attend(call={"attn_mask": torch.zeros(T, T, dtype=torch.float64).masked_fill(CAUSAL, -2.5)}),
    "mask for each head": Attend(call={"attn_mask": torch.rand(B * 2, T, T).gt(0.7) & ~torch.eye(T).bool()}),
    "padding": Attend(call={"key_padding_mask": PADDED}),
    "padding and causal, positions first": Attend(
        batch_first=False, call={"key_padding_mask": PADDED, "attn_mask": CAUSAL, "need_weights": False}
    ),
    "cross": Attend(cross=True),
    "cross, positions first": Attend(cross=True, batch_first=False),
    "other widths": Attend(cross=True, kdim=5, vdim=3),
    "dropout in evaluation mode": Attend(dropout=0.5).eval(),
}


@pytest.mark.parametrize("staging", [8 * 2**20, 1], ids=["", "no staging area"])
@pytest.mark.parametrize("model", ATTENTION.values(), ids=ATTENTION)
def test_attention(model: Attend, staging: int) -> None:
    assert_exact(in_training(model), shares_of(real(B, T, 8)), staging_bytes=staging)


REFUSED = {
    "dropout": (Attend(dropout=0.1), "dropout=0.1"),
    "added keys": (Attend(add_bias_kv=True), "add_bias_kv"),
    "added zeros": (Attend(add_zero_attn=True), "add_zero_attn"),
}


@pytest.mark.parametrize(("model", "reason"), REFUSED.values(), ids=REFUSED)
def test_attention_that_cannot_be_seen_is_refused_by_name(model: Attend, reason: str) -> None:
    squares = measure(in_training(model), shares_of(real(B, T, 8)))
    found = squares.not_covered()
    assert set(found) == set(squares.names)
    assert all(reason in text for text in found.values())
    assert squares.sq_norms.isnan().all()


class Scale(nn.Module):
    """A layer of one's own: [B, …, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.turn = nn.Parameter(torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.turn


def scale_rule(layer: Scale, inputs: tuple[Tensor, ...], grad: Tensor) -> dict[str, Any]:
    (x,) = inputs
    return {"scale": (x * (grad @ layer.turn.T)).sum(1), "turn": OuterProducts(x * layer.scale, grad)}


@pytest.mark.parametrize("staging", [8 * 2**20, 1], ids=["", "no staging area"])
def test_a_layer_of_ones_own(staging: int) -> None:
    model = in_training(nn.Sequential(nn.Linear(3, 6), Scale(6), nn.Tanh(), Scale(6)))
    assert_exact(model, shares_of(real(B, 4, 3)), rules={Scale: scale_rule}, staging_bytes=staging)


def positions_first(grad: Tensor) -> OuterProducts:
    return OuterProducts(grad.transpose(0, 1), grad.transpose(0, 1))


def test_a_rule_that_gives_another_shape_or_name_is_named() -> None:
    model, shares = nn.Sequential(Scale(6)).double(), shares_of(real(B, 4, 6))
    message = r"the rule of '0' \(Scale\) must give '{}' as a tensor \[5, 6{}\] or as factors of 5 examples, got {}"
    with pytest.raises(ValueError, match=message.format("scale", "", r"\[\[5, 4, 6\]\]")):
        measure(model, shares, rules={Scale: lambda layer, inputs, grad: {"scale": grad * inputs[0]}})
    with pytest.raises(ValueError, match=message.format("scale", "", r"\[\[4, 6\]\]")):
        measure(model, shares, rules={Scale: lambda layer, inputs, grad: {"scale": grad.sum(0)}})
    with pytest.raises(ValueError, match=message.format("turn", ", 6", r"\[\[4, 5, 6\], \[4, 5, 6\]\]")):
        measure(model, shares, rules={Scale: lambda layer, inputs, grad: {"turn": positions_first(grad)}})
    squares = measure(model, shares, rules={Scale: lambda layer, inputs, grad: {"weight": grad.sum(1)}})
    assert all("does not give it by this name" in reason for reason in squares.not_covered().values())

"""Attributes that compute, as parametrizations do, are never read while the noise scale is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import sonde
from sonde.batch_size.stats.reading import NoiseScaleReading

WIDTH, POSITIONS, ROWS = 6, 5, 4
READS: list[str] = []
"""What was computed, in order."""


class Drawn(nn.Module):
    """A parametrization that notes each read, and draws a random number for it."""

    def forward(self, x: Tensor) -> Tensor:
        READS.append("parametrization")
        return x * (1 + 0.01 * torch.randn(()))


class OwnProperties(nn.Linear):
    """A layer with properties of its own, in the place of its parameters and beside them."""

    def _computed(self, name: str) -> Tensor:
        READS.append(name)
        return self._parameters[name] * (1 + 0.01 * torch.randn(()))  # type: ignore[operator]

    weight = property(lambda self: self._computed("weight"))  # type: ignore[assignment]
    bias = property(lambda self: self._computed("bias"))  # type: ignore[assignment]
    padding_idx = eps = gradient_checkpointing = _orig_mod = property(lambda self: READS.append("other"))


def with_properties() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)  # torch refuses to make it with them
    layer.__class__ = OwnProperties
    return layer


def drawn(layer: nn.Module, *names: str) -> nn.Module:
    """A layer whose tensors are computed at each read: by default all of its parameters."""
    for name in names or [name for name, _ in layer.named_parameters(recurse=False)]:
        parametrize.register_parametrization(layer, name, Drawn(), unsafe=True)
    return layer


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = drawn(nn.MultiheadAttention(WIDTH, 2, batch_first=True))
        drawn(self.inner.out_proj)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Turned(nn.Module):
    """A layer of channels, which come second."""

    def __init__(self, layer: nn.Module, *more: int) -> None:
        super().__init__()
        self.layer, self.more = layer, more

    def forward(self, x: Tensor) -> Tensor:
        places = x.transpose(1, 2).reshape(len(x), WIDTH, POSITIONS, *self.more)
        return self.layer(places).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "own properties": with_properties,
    "linear": lambda: drawn(nn.Linear(WIDTH, WIDTH)),
    "bias only": lambda: drawn(nn.Linear(WIDTH, WIDTH), "bias"),
    "embedding": lambda: nn.Sequential(Rounded(), drawn(nn.Embedding(7, WIDTH))),
    "layer norm": lambda: drawn(nn.LayerNorm(WIDTH)),
    "rms norm": lambda: drawn(nn.RMSNorm(WIDTH)),
    "group norm": lambda: Turned(drawn(nn.GroupNorm(2, WIDTH))),
    "instance norm": lambda: Turned(drawn(nn.InstanceNorm1d(WIDTH, affine=True))),
    "batch norm": lambda: Turned(drawn(nn.BatchNorm1d(WIDTH), "weight", "running_mean").eval()),
    "convolution": lambda: Turned(drawn(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))),
    "convolution in 2 dims": lambda: Turned(drawn(nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0))), 1),
    "attention": Attention,
}


class Mixed(nn.Module):
    """Lets positions see each other, so that the rows are the only independent dim."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.square().mean(1, keepdim=True)


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., 0].abs().mul(3).long().clamp(max=6)


class Seen:
    """What a training leaves behind."""

    def __init__(self, model: nn.Module) -> None:
        self.reads, self.rng = list(READS), torch.get_rng_state()
        self.tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]

    def assert_same(self, other: Seen) -> None:
        assert self.reads == other.reads
        assert torch.equal(self.rng, other.rng)
        assert all(map(torch.equal, self.tensors, other.tensors))


def train(layer: Callable[[], nn.Module], n_pieces: int, options: dict[str, Any] | None) -> tuple[Seen, Any]:
    """A few steps; what they leave behind, and what was measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), Mixed(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    READS.clear()
    probe = None
    if options is not None:
        probe = sonde.attach(model, optimizer, unit="rows", units_per_piece="first dim", verbose=False, **options)
    for step in range(6):
        for _ in range(n_pieces):
            x = torch.randn(ROWS, POSITIONS, WIDTH)
            (model(x)[..., 0] - x.sum(-1).sin()).square().mean().backward()
        sonde.clip_grad_norm_(model.parameters(), None)
        if probe is not None:
            probe.clip_grad_norm_(None) if step % 2 else probe.step()
        optimizer.step()
        optimizer.zero_grad()
    reading = None
    if probe is not None:
        reading = probe.reading()
        probe.load_state_dict(probe.state_dict())
        probe.close()
    return Seen(model), reading


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("n_pieces", "options"),
    [(1, {}), (3, {"per_example": "always"}), (3, {"metric": ("euclidean", "spectral"), "every": 1})],
)
def test_nothing_that_computes_is_read(name: str, n_pieces: int, options: dict[str, Any]) -> None:
    if name == "batch norm" and options.get("per_example") == "always":
        pytest.skip("a buffer that is computed may be that of train mode, which couples the examples: refused")
    plain, _ = train(LAYERS[name], n_pieces, None)
    probed, reading = train(LAYERS[name], n_pieces, options)
    assert name == "spectral norm" or plain.reads
    probed.assert_same(plain)
    assert isinstance(reading, NoiseScaleReading)
    # One backward a step gives a number by its examples alone, in the plain metric and without batch normalisation.
    if n_pieces > 1 or not (name == "batch norm" or "metric" in options):
        assert reading.windows > 0, reading.dropped


@pytest.mark.parametrize("measured", [False, True])
def test_a_parametrization_that_comes_after_attach_is_not_read_either(measured: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    probe = sonde.attach(model, unit="rows", units_per_piece="first dim", per_example="always", verbose=False)
    if not measured:
        probe.close()
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    drawn(model[0], "weight")
    READS.clear()
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    if measured:
        probe.step()
        probe.close()
    assert len(READS) == 1

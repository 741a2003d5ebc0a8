"""Models called in usual ways, with the units that are counted, or that sonde asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

N, T = 6, 9
"""Units in a micro-batch, and positions of each."""
ASKED = None


class By(nn.Module):
    """A model whose forward is a function of its layers."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self._layers, self.layers = forward, nn.ModuleDict(layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._layers(self.layers, *args, **kwargs)


def ids(*shape: int) -> Tensor:
    return torch.randint(1, 11, shape)


def images(n: int = N) -> list[Tensor]:
    return [torch.randn(3, 12 + k % 3, 14) for k in range(n)]


def detector(batch: Sequence[Tensor], targets: Any = None, layers: Any = None) -> Any:
    return torch.stack([layers.head(layers.conv(image[None]).mean((2, 3))).square().mean() for image in batch])


@dataclass
class Graphs:
    """As torch_geometric's Batch."""

    x: Tensor
    edge_index: Tensor
    batch: Tensor

    @property
    def num_graphs(self) -> int:
        return N


def graphs() -> Graphs:
    return Graphs(torch.randn(40, 5), torch.randint(40, (2, 90)), torch.arange(N).repeat_interleave(7)[:40])


def pooled(layers: Any, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
    mixed = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    return layers.head(torch.zeros(N, 5).index_add(0, batch, mixed))


def embedded(**layers: nn.Module) -> dict[str, nn.Module]:
    return {"embed": nn.Embedding(11, 8), **layers, "head": nn.Linear(8, 11)}


def encoder(*, batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=batch_first)


def causal(n: int) -> Tensor:
    return torch.triu(torch.ones(n, n, dtype=torch.bool), 1)


def language_model(batch_first: bool, **options: Any) -> By:
    def forward(layers: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = layers.head(layers.encoder(layers.embed(x), src_mask=mask))
        return y.flatten(0, 1) if options.get("flat") else y

    return By(forward, **embedded(encoder=encoder(batch_first=batch_first)))


def recurrent(batch_first: bool, returns: Callable[[Any, Tensor, Any], Any], kind: Any = nn.LSTM) -> By:
    def forward(layers: Any, x: Tensor, *others: Any) -> Any:
        y, state = layers.rnn(layers.embed(x))
        return returns(layers, y, state)

    return By(forward, **embedded(rnn=kind(8, 8, batch_first=batch_first)))


def transposing(layers: Any, x: Tensor) -> Tensor:
    """Batch first to its caller, and time first to its layers."""
    return layers.head(layers.rnn(layers.embed(x).transpose(0, 1))[0]).transpose(0, 1)


def recommender(layers: Any, dense: Tensor, offsets: Tensor, tables: Sequence[Tensor]) -> Tensor:
    bags = [layers.bag(table, offset) for table, offset in zip(tables, offsets, strict=True)]
    return layers.head(torch.stack([dense @ torch.ones(13, 8), *bags]).sum(0))[:, 0]


def unrolled(layers: Any, x: Tensor, state: Tensor) -> Tensor:
    for step in x:
        state = layers.cell(step, state)
    return state


def giving(*shapes: tuple[int, ...]) -> By:
    """A model that returns tensors of these shapes, whatever it is called with."""

    def forward(layers: Any, *args: Any, **kwargs: Any) -> Any:
        given = [layers.scale(torch.ones(*shape, 1))[..., 0] for shape in shapes]
        return given[0] if len(given) == 1 else tuple(given)

    return By(forward, scale=nn.Linear(1, 1))


def mean_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.square().mean() if output.requires_grad else torch.zeros(())
    parts = output.values() if isinstance(output, dict) else output
    return sum((mean_of(part) for part in parts), torch.zeros(()))


def state(n_layers: int = 2) -> Tensor:
    return torch.zeros(n_layers, N, 16)


LOSS = ()
CONV = {"conv": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 2)}
net = By(lambda m, x: m.head(m.conv(x).mean((2, 3))), **CONV)
CALLS: dict[str, tuple[nn.Module, Callable[[], Any], int | None]] = {
    "rows of features": (nn.Linear(5, 2), lambda: (torch.randn(N, 5),), N),
    "rows of one number": (
        By(lambda m, x: m.head(x[:, None])[:, 0], head=nn.Linear(1, 1)),
        lambda: (torch.randn(N),),
        N,
    ),
    "images": (net, lambda: (torch.randn(N, 3, 8, 8),), N),
    "a single image": (net, lambda: (torch.randn(1, 3, 8, 8),), 1),
    "inputs and targets, and a loss": (
        By(lambda m, x, y: F.mse_loss(m.head(x), y), head=nn.Linear(5, 2)),
        lambda: (torch.randn(N, 5), torch.randn(N, 2)),
        N,
    ),
    "two towers": (
        By(lambda m, a, b: (m.u(a) * m.v(b)).sum(-1), u=nn.Embedding(11, 4), v=nn.Embedding(11, 4)),
        lambda: (ids(N), ids(N)),
        N,
    ),
    "a dictionary": (
        By(lambda m, x: m.head(x["x"]), head=nn.Linear(5, 2)),
        lambda: ({"s": 1.0, "x": torch.randn(N, 5)},),
        N,
    ),
    "two views made in the model": (
        By(lambda m, x: m.head(torch.cat([x, x + 1])), head=nn.Linear(5, 2)),
        lambda: (torch.randn(N, 5),),
        N,
    ),
    "a loss and counts of experts": (
        By(lambda m, x, y: (F.mse_loss(m.head(x), y), torch.ones(4)), head=nn.Linear(5, 2)),
        lambda: (torch.randn(N, 5), torch.randn(N, 2)),
        N,
    ),
    "several losses": (
        By(lambda m, x: m.head(x).square().mean(0), head=nn.Linear(5, 2)),
        lambda: (torch.randn(N, 5),),
        N,
    ),
    "inputs and targets in a list, a loss": (
        By(lambda m, batch: F.mse_loss(m.head(batch[0]), batch[1]), head=nn.Linear(5, 2)),
        lambda: ([torch.randn(N, 5), torch.randn(N, 2)],),
        N,
    ),
    # Lists of images.
    "detection, a loss": (
        By(lambda m, x, y: detector(x, y, m).mean(), **CONV),
        lambda: (images(), list(torch.randn(N, 2))),
        N,
    ),
    "detection, losses and targets by name": (
        By(lambda m, x, y: {"a": detector(x, y, m).mean()}, **CONV),
        lambda: (images(), [{"boxes": torch.randn(k, 4), "labels": ids(k)} for k in range(1, N + 1)]),
        N,
    ),
    "images of one size in a tuple, with targets": (
        By(lambda m, x, y: detector(x, y, m).mean(), **CONV),
        lambda: (tuple(torch.randn(N, 3, 8, 8)), [{"boxes": torch.randn(2, 4)}] * N),
        N,
    ),
    "images of one size, a loss alone": (
        By(lambda m, x: detector(x, layers=m).mean(), **CONV),
        lambda: (list(torch.randn(N, 3, 8, 8)),),
        ASKED,
    ),
    "functions at coordinates that all share, as many as their coefficients": (
        By(
            lambda m, at, z: m.head(torch.tanh(m.at(at)[None] + m.of(z)[:, None])),
            at=nn.Linear(2, 8),
            of=nn.Linear(N, 8),
            head=nn.Linear(8, 3),
        ),
        lambda: (torch.randn(4 * T, 2), torch.randn(N, N)),
        ASKED,
    ),
    # Time.
    "LSTM, batch first, a class": (recurrent(True, lambda m, y, s: m.head(y[:, -1])), lambda: (ids(N, T),), N),
    "LSTM, batch first, each step": (recurrent(True, lambda m, y, s: m.head(y)), lambda: (ids(N, T),), N),
    "LSTM, time first, a class": (recurrent(False, lambda m, y, s: m.head(y[-1])), lambda: (ids(T, N),), N),
    "LSTM, time first, each step": (recurrent(False, lambda m, y, s: m.head(y)), lambda: (ids(T, N),), N),
    "LSTM, as many steps as units": (recurrent(False, lambda m, y, s: m.head(y)), lambda: (ids(N, N),), N),
    "LSTM, time first inside": (By(transposing, **embedded(rnn=nn.LSTM(8, 8))), lambda: (ids(N, T),), N),
    "time first by hand, targets of sequences": (
        By(lambda m, x, y: F.cross_entropy(m.head(x[-1]), y), head=nn.Linear(5, 4)),
        lambda: (torch.randn(T, N, 5), torch.randint(4, (N,))),
        ASKED,
    ),
    "transformer, batch first, with a mask": (language_model(True), lambda: (ids(N, T), causal(T)), N),
    "transformer, time first, with a mask": (language_model(False), lambda: (ids(T, N), causal(T)), N),
    "transformer, time first, with a mask, compiled": (
        torch.compile(language_model(False), backend="eager"),
        lambda: (ids(T, N), causal(T)),
        N,
    ),
    "transformer, time first, rows of all positions": (language_model(False, flat=True), lambda: (ids(T, N),), N),
    "seq2seq, time first": (
        By(
            lambda m, s, t: m.head(m.decoder(m.embed(t), m.encoder(m.embed(s)))),
            **embedded(encoder=encoder(batch_first=False), decoder=nn.TransformerDecoderLayer(8, 2, 8, 0.0)),
        ),
        lambda: (ids(T, N), ids(T + 2, N)),
        N,
    ),
    "packed sequences": (
        By(lambda m, x, y: (m.head(m.rnn(x)[1][-1]) - y).square().mean(), rnn=nn.GRU(5, 8), head=nn.Linear(8, 2)),
        lambda: (pack_sequence([torch.randn(20 - k, 5) for k in range(N)]), torch.randn(N, 2)),
        N,
    ),
    # Bags, graphs, recommenders.
    "a bag with offsets": (
        By(lambda m, x, o: m.head(m.bag(x, o)), bag=nn.EmbeddingBag(11, 8), head=nn.Linear(8, 4)),
        lambda: (ids(50), torch.arange(0, 8 * N, 8)),
        N,
    ),
    "a bag with offsets, a loss": (
        By(lambda m, x, o, y: F.cross_entropy(m.bag(x, o), y), bag=nn.EmbeddingBag(11, 8)),
        lambda: (ids(50), torch.arange(0, 8 * N, 8), torch.randint(8, (N,))),
        ASKED,
    ),
    "a bag with rows": (By(lambda m, x: m.bag(x), bag=nn.EmbeddingBag(11, 8)), lambda: (ids(N, T),), N),
    "a recommender": (
        By(recommender, bag=nn.EmbeddingBag(11, 8), head=nn.Linear(8, 1)),
        lambda: (torch.randn(N, 13), torch.arange(0, 4 * N, 4).expand(3, N), [ids(30 + k) for k in range(3)]),
        N,
    ),
    "graphs, by name": (
        By(lambda m, data: pooled(m, data.x, data.edge_index, data.batch), head=nn.Linear(5, 2)),
        lambda: (graphs(),),
        N,
    ),
    "graphs, as tensors": (
        By(pooled, head=nn.Linear(5, 2)),
        lambda: (graphs().x, graphs().edge_index, graphs().batch),
        ASKED,
    ),
    # Text, packed.
    "packed documents, with their borders": (
        By(lambda m, input_ids, cu_seqlens: m.head(m.embed(input_ids)), **embedded()),
        lambda: {"input_ids": ids(1, 50), "cu_seqlens": torch.tensor([0, 20, 50], dtype=torch.int32)},
        ASKED,
    ),
    "a packed row, with positions": (
        By(lambda m, input_ids, position_ids: m.head(m.embed(input_ids)), **embedded()),
        lambda: {"input_ids": ids(1, 50), "position_ids": torch.arange(25).repeat(2)[None]},
        ASKED,
    ),
    "patches of images before texts": (
        By(
            lambda m, pixel_values, grid, input_ids, mask: m.head(m.rnn(m.embed(input_ids))[0]) + pixel_values.mean(),
            **embedded(rnn=nn.GRU(8, 8, batch_first=True)),
        ),
        lambda: {"pixel_values": torch.randn(70, 12), "grid": ids(7, 3), "input_ids": ids(N, T), "mask": ids(N, T)},
        N,
    ),
}

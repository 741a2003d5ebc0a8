"""Ways to call models that are no plain [batch, features], by what the number of units is: the zoo of docs/units.md.

Each is a real model that learns from its batch. A loop of any of them has its units counted rightly, or is asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from tests.batch_size.usual_calls import By

N, T, C, H, K = 6, 8, 5, 8, 3
"""Units in a micro-batch, positions of each, features, hidden features, classes."""
LENGTHS = [3, 8, 5, 4, 8, 6]
"""Of documents; their sum is no multiple of N."""
TOTAL = sum(LENGTHS)
BORDERS = torch.tensor([0, *LENGTHS]).cumsum(0)
DOCUMENTS = torch.arange(N).repeat_interleave(torch.tensor(LENGTHS))
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def ids(*shape: int) -> Tensor:
    return torch.randint(1, 11, shape)


def layers(**more: nn.Module) -> dict[str, nn.Module]:
    return {"first": nn.Linear(C, H), "embed": nn.Embedding(11, H), "last": nn.Linear(H, K), **more}


def attended(x: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Attention without weights of its own, over dim 1 of [batch, positions, features]."""
    scores = x @ x.transpose(1, 2) / H**0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return x + scores.softmax(-1) @ x


def within(documents: Tensor) -> Callable[[Any, Tensor], Tensor]:
    """A packed model: each token sees those of its document alone."""

    def forward(m: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        y = torch.tanh(m.embed(x) if not x.is_floating_point() else m.first(x)).view(1, TOTAL, H)
        return m.last(attended(y, mask=documents[:, None] == documents)).view(
            *x.shape[: x.dim() - x.is_floating_point()], K
        )

    return forward


def sequence(m: Any, x: Tensor) -> Tensor:
    """[batch, positions, features] to as many classes."""
    return m.last(attended(torch.tanh(m.first(x))))


def time_first(m: Any, x: Tensor) -> Tensor:
    return sequence(m, x.transpose(0, 1)).transpose(0, 1)


def graph(m: Any, x: Tensor, edges: Tensor, owner: Tensor | None = None) -> Tensor:
    y = torch.tanh(m.first(x))
    y = y.index_add(0, edges[1], y[edges[0]])
    return m.last(y if owner is None else y.new_zeros(N, H).index_add(0, owner, y))


def edges() -> Tensor:
    """Each node of a graph with the next one."""
    ends = torch.arange(TOTAL - 1)
    ends = ends[DOCUMENTS[:-1] == DOCUMENTS[1:]]
    return torch.stack([ends, ends + 1])


def ensemble(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ m.first.weight.T) @ m.last.weight.T


def images(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.relu(m.conv(x)).mean((2, 3)))


def video(m: Any, x: Tensor) -> Tensor:
    """Frames that are folded into the batch, and averaged."""
    return images(m, x.flatten(0, 1)).view(len(x), -1, K).mean(1)


CONV = {"conv": nn.Conv2d(3, H, 3)}
Convention = tuple[Callable[..., Any], dict[str, nn.Module], Callable[[], Any], int]
"""The forward as a function of layers, further layers, a function that draws a batch, and the batch's units."""
SEEN: dict[str, Convention] = {
    # Which dim.
    "[B, C]": (lambda m, x: m.last(torch.tanh(m.first(x))), {}, lambda: (numbers(N, C),), N),
    "[B, T, C], attention": (sequence, {}, lambda: (numbers(N, T, C),), N),
    "[T, B, C], attention": (time_first, {}, lambda: (numbers(T, N, C),), N),
    "[T, B, C], as many steps as units": (time_first, {}, lambda: (numbers(N, N, C),), N),
    "[T, B] tokens, attention": (
        lambda m, x: m.last(attended(m.embed(x).transpose(0, 1))).transpose(0, 1),
        {},
        lambda: (ids(T, N),),
        N,
    ),
    "[T, B, C], own recurrence": (
        lambda m, x: m.last(torch.stack(list(_unrolled(m, x)))),
        {"state": nn.Linear(H, H)},
        lambda: (numbers(T, N, C),),
        N,
    ),
    "[B, C, T], convolution": (
        lambda m, x: m.last(m.conv1(x).mean(2)),
        {"conv1": nn.Conv1d(C, H, 3)},
        lambda: (numbers(N, C, T),),
        N,
    ),
    "[C, B, T], channels first of all": (
        lambda m, x: m.last(m.conv1(x.transpose(0, 1)).mean(2)),
        {"conv1": nn.Conv1d(C, H, 3)},
        lambda: (numbers(C, N, T),),
        N,
    ),
    "[C, T, B], batch last": (
        lambda m, x: sequence(m, x.permute(2, 1, 0)),
        {},
        lambda: (numbers(C, T, N),),
        N,
    ),
    "[H, W, C, B], batch last": (
        lambda m, x: images(m, x.permute(3, 2, 0, 1)),
        CONV,
        lambda: (numbers(9, 9, 3, N),),
        N,
    ),
    "[B, 3, H, W]": (images, CONV, lambda: (numbers(N, 3, 9, 9),), N),
    "[B, H, W, 3]": (lambda m, x: images(m, x.permute(0, 3, 1, 2)), CONV, lambda: (numbers(N, 9, 9, 3),), N),
    "[B, frames, 3, H, W], folded": (video, CONV, lambda: (numbers(N, 4, 3, 9, 9),), N),
    "[B, 3, frames, H, W]": (
        lambda m, x: m.last(m.conv3(x).mean((2, 3, 4))),
        {"conv3": nn.Conv3d(3, H, 2)},
        lambda: (numbers(N, 3, 4, 6, 6),),
        N,
    ),
    "[frames, B, 3, H, W]": (
        lambda m, x: video(m, x.transpose(0, 1)),
        CONV,
        lambda: (numbers(4, N, 3, 9, 9),),
        N,
    ),
    "[B, T, C], a scan over T": (
        lambda m, x: m.last(torch.tanh(m.first(x)).cumsum(1)),
        {},
        lambda: (numbers(N, T, C),),
        N,
    ),
    "[B, sets, members, C]": (
        lambda m, x: m.last(attended(torch.tanh(m.first(x)).mean(2))),
        {},
        lambda: (numbers(N, 4, T, C),),
        N,
    ),
    "[B, T, C], classes of all positions in rows": (
        lambda m, x: sequence(m, x).flatten(0, 1),
        {},
        lambda: (numbers(N, T, C),),
        N,
    ),
    "[B, T], classes of all positions in rows, time first": (
        lambda m, x: sequence(m, m.more(m.embed(x))).transpose(0, 1).flatten(0, 1),
        {"more": nn.Linear(H, C)},
        lambda: (ids(N, T),),
        N,
    ),
    "[members, B, C], one ensemble": (ensemble, {}, lambda: (numbers(4, N, C),), N),
    "[members, B, C], the same samples for all": (ensemble, {}, lambda: (numbers(N, C).expand(4, N, C),), N),
    "[B, agents, C], agents that see each other": (sequence, {}, lambda: (numbers(N, 4, C),), N),
    "[B, T, C], each step alone": (lambda m, x: m.last(torch.tanh(m.first(x))), {}, lambda: (numbers(N, T, C),), N),
    "[T, B, C], each step alone": (lambda m, x: m.last(torch.tanh(m.first(x))), {}, lambda: (numbers(T, N, C),), N),
    "[B, T], each token alone": (lambda m, x: m.last(m.embed(x)), {}, lambda: (ids(N, T),), N),
    # Containers.
    "a dictionary": (lambda m, batch: sequence(m, batch["x"]), {}, lambda: ({"x": numbers(N, T, C), "name": "a"},), N),
    "keywords": (lambda m, x, scale: sequence(m, x) * scale, {}, lambda: {"x": numbers(N, T, C), "scale": 2.0}, N),
    "a list of columns": (lambda m, batch: sequence(m, batch[0] + batch[1]), {}, lambda: ([numbers(N, T, C)] * 2,), N),
    "a list of images of several sizes": (
        lambda m, batch: torch.cat([images(m, x[None]) for x in batch]),
        CONV,
        lambda: ([numbers(3, 8 + k, 9) for k in range(N)],),
        N,
    ),
    "a list of sequences of several lengths": (
        lambda m, batch: sequence(m, pad_sequence(batch, batch_first=True)),
        {},
        lambda: ([numbers(n, C) for n in LENGTHS],),
        N,
    ),
    "a list of dictionaries": (
        lambda m, batch: torch.cat([sequence(m, each["x"][None])[:, 0] for each in batch]),
        {},
        lambda: ([{"x": numbers(n, C)} for n in LENGTHS],),
        N,
    ),
    "a PackedSequence": (
        lambda m, x: m.last(m.rnn(x)[1][0]),
        {"rnn": nn.GRU(C, H)},
        lambda: (pack_sequence([numbers(n, C) for n in LENGTHS], enforce_sorted=False),),
        N,
    ),
    "a nested tensor": (
        lambda m, x: m.last(torch.stack([torch.tanh(m.first(each)).mean(0) for each in x.unbind()])),
        {},
        lambda: (torch.nested.nested_tensor([numbers(n, C) for n in LENGTHS]),),
        N,
    ),
    "a sparse matrix of rows": (
        lambda m, x: m.last(torch.tanh(torch.sparse.mm(x, m.first.weight.T))),
        {},
        lambda: (numbers(N, C).relu().to_sparse(),),
        N,
    ),
    # Packed.
    **{
        f"packed, {name}": (within(DOCUMENTS), {}, lambda more=more: {"x": numbers(TOTAL, C)} | more, N)
        for name, more in {
            "cu_seqlens": {"cu_seqlens": BORDERS.int(), "max_seqlen": max(LENGTHS)},
            "offsets": {"offsets": BORDERS},
            "starts": {"starts": BORDERS[:-1]},
            "indptr": {"indptr": BORDERS.int()},
            "lengths in a list": {"seqlens": LENGTHS},
            "lengths": {"lengths": torch.tensor(LENGTHS)},
            "document_ids": {"document_ids": DOCUMENTS},
            "position_ids": {"position_ids": POSITIONS},
            "a mask of blocks": {"mask": DOCUMENTS[:, None] == DOCUMENTS},
            "nothing": {},
        }.items()
    },
    "packed tokens in one row, position_ids": (
        within(DOCUMENTS),
        {},
        lambda: {"x": ids(1, TOTAL), "position_ids": POSITIONS[None]},
        N,
    ),
    "packed tokens without a row, cu_seqlens": (
        within(DOCUMENTS),
        {},
        lambda: {"x": ids(TOTAL), "cu_seqlens": BORDERS.int()},
        N,
    ),
    "a flattening collator's row": (
        within(DOCUMENTS),
        {},
        lambda: {"x": ids(1, TOTAL), "cu_seq_lens_q": BORDERS.int(), "max_length_q": max(LENGTHS)},
        N,
    ),
    "bags and their offsets": (
        lambda m, x, offsets: m.last(functional.embedding_bag(x, m.embed.weight, offsets)),
        {},
        lambda: (ids(TOTAL), BORDERS[:-1]),
        N,
    ),
    "patches of images, and how many each has": (
        lambda m, x, grid: m.last(torch.stack([each.mean(0) for each in torch.tanh(m.first(x)).split(grid)])),
        {},
        lambda: (numbers(TOTAL, C), LENGTHS),
        N,
    ),
    # Graphs.
    "graphs, one class each": (graph, {}, lambda: (numbers(TOTAL, C), edges(), DOCUMENTS), N),
    "nodes of one graph": (graph, {}, lambda: (numbers(TOTAL, C), edges()), 1),
    "nodes, with a dense matrix of edges": (
        lambda m, x, a: m.last(a @ torch.tanh(m.first(x))),
        {},
        lambda: (numbers(N, T, C), torch.rand(N, T, T)),
        N,
    ),
    "points of clouds": (
        lambda m, x, owner: m.last(x.new_zeros(N, H).index_add(0, owner, torch.tanh(m.first(x)))),
        {},
        lambda: (numbers(TOTAL, C), DOCUMENTS),
        N,
    ),
    # Rows that depend on each other.
    "statistics of the batch": (
        lambda m, x: m.last((y := m.first(x)) - y.mean(0)),
        {},
        lambda: (numbers(N, C),),
        N,
    ),
    "batch norm": (lambda m, x: m.last(m.norm(m.first(x))), {"norm": nn.BatchNorm1d(H)}, lambda: (numbers(N, C),), N),
    "batch norm without averages": (
        lambda m, x: m.last(m.norm(m.first(x))),
        {"norm": nn.BatchNorm1d(H, track_running_stats=False)},
        lambda: (numbers(N, C),),
        N,
    ),
    "neighbours that the model pairs": (
        lambda m, x: m.last((y := torch.tanh(m.first(x)).view(-1, 2, H))[:, 0] * y[:, 1]),
        {},
        lambda: (numbers(2 * N, C),),
        N,
    ),
    "halves that the model pairs": (
        lambda m, x: m.last((y := torch.tanh(m.first(x)).view(2, -1, H))[0] * y[1]),
        {},
        lambda: (numbers(2 * N, C),),
        N,
    ),
    "a group of completions for each prompt": (
        lambda m, x: m.last((y := torch.tanh(m.first(x))) - y.view(N, 4, H).mean(1).repeat_interleave(4, 0)),
        {},
        lambda: (numbers(4 * N, C),),
        N,
    ),
    "all scores of two towers": (
        lambda m, a, b: torch.tanh(m.first(a)) @ torch.tanh(m.first(b)).T,
        {},
        lambda: (numbers(N, C), numbers(N, C)),
        N,
    ),
    # Several inputs.
    "coordinates and functions": (
        lambda m, at, x: m.last(torch.tanh(m.at(at)[None] + m.first(x)[:, None])),
        {"at": nn.Linear(2, H)},
        lambda: (torch.rand(20, 2), numbers(N, C)),
        N,
    ),
    "latent queries that all share": (
        lambda m, queries, x: m.last(attended(torch.tanh(m.first(x))) + m.first(queries).mean(0)),
        {},
        lambda: (numbers(7, C), numbers(N, T, C)),
        N,
    ),
    "times, and samples": (
        lambda m, x, t: m.last(torch.tanh(m.first(x)) * t[:, None]),
        {},
        lambda: (numbers(N, C), torch.rand(N)),
        N,
    ),
    "a state first": (
        lambda m, state, x: m.last(torch.tanh(m.first(x)).mean(1) + state[-1]),
        {},
        lambda: (numbers(2, N, H), numbers(N, T, C)),
        N,
    ),
    "one context for all": (
        lambda m, context, x: m.last(torch.tanh(m.first(x) + m.first(context))),
        {},
        lambda: (numbers(1, C), numbers(N, C)),
        N,
    ),
    # Losses.
    "a loss alone": (
        lambda m, x, y: functional.cross_entropy(sequence(m, x)[:, -1], y),
        {},
        lambda: (numbers(N, T, C), ids(N) % K),
        N,
    ),
    "a loss alone, time first": (
        lambda m, x, y: functional.cross_entropy(time_first(m, x)[-1], y),
        {},
        lambda: (numbers(T, N, C), ids(N) % K),
        N,
    ),
    "a contrastive loss alone": (
        lambda m, a, b: functional.cross_entropy(torch.tanh(m.first(a)) @ torch.tanh(m.first(b)).T, torch.arange(N)),
        {},
        lambda: (numbers(N, C), numbers(N, C)),
        N,
    ),
    "several losses by name": (
        lambda m, x: {"a": sequence(m, x).square().mean(), "b": sequence(m, x).abs().mean()},
        {},
        lambda: (numbers(N, T, C),),
        N,
    ),
    "choices among four": (
        lambda m, x, y: (functional.cross_entropy(s := sequence(m, x.flatten(0, 1))[:, -1, 0].view(N, 4), y), s),
        {},
        lambda: (numbers(N, 4, T, C), ids(N) % 4),
        N,
    ),
}


def _unrolled(m: Any, x: Tensor) -> Any:
    y = x.new_zeros(x.shape[1], H)
    for step in x:
        y = torch.tanh(m.first(step) + m.state(y))
        yield y


def convention(name: str) -> tuple[nn.Module, Callable[[], Any], int]:
    """The model, a function that draws a batch, and the units of that batch."""
    forward, more, draw, n = SEEN[name]
    torch.manual_seed(0)
    return By(forward, **layers(**more)), draw, n

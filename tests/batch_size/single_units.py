"""Models called without a dim for the batch, and models in which a layer alone is, with the units that are counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.batch_size.usual_calls import (
    ASKED,
    CONV,
    By,
    N,
    T,
    embedded,
    encoder,
    ids,
    language_model,
    net,
    recurrent,
    unrolled,
)

of_an_image = By(lambda m, x: m.head(m.conv(x).mean((1, 2))), **CONV)
RNN = {"rnn": nn.LSTM(5, 8), "head": nn.Linear(8, 2)}


def tagger(layers: Any, x: Tensor) -> Tensor:
    """As in PyTorch's tutorial of sequence models."""
    return layers.head(layers.rnn(layers.embed(x).view(len(x), 1, -1))[0].view(len(x), -1))


def word_by_word(layers: Any, x: Tensor) -> Tensor:
    state, scores = None, []
    for word in layers.embed(x):
        y, state = layers.rnn(word.view(1, 1, -1), state)
        scores.append(layers.head(y.view(-1)))
    return torch.stack(scores)


def image() -> tuple[Tensor]:
    return (torch.randn(3, 8, 8),)


def in_turn(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor]]:
    each = itertools.cycle(shapes)
    return lambda: (ids(*next(each)),)


def each_step(layers: Any, y: Tensor, state: Any) -> Tensor:
    return layers.head(y)


SINGLE: dict[str, tuple[Any, Callable[[], Any], int | None]] = {
    "an image alone": (By(lambda m, x: m.conv(x), **CONV), image, ASKED),
    "an image alone, a class": (of_an_image, image, ASKED),
    "an image alone, a batch inside": (By(lambda m, x: m.head(m.conv(x[None]).mean((2, 3)))[0], **CONV), image, ASKED),
    "a volume alone": (nn.Conv3d(2, 3, 3), lambda: (torch.randn(2, 8, 8, 8),), ASKED),
    "a signal alone, as many channels back": (nn.Conv1d(4, 4, 3), lambda: (torch.randn(4, 20),), ASKED),
    "features alone, one number": (nn.Linear(5, 1), lambda: (torch.randn(5),), ASKED),
    "a sentence alone, a tag of each word": (By(tagger, **embedded(rnn=nn.LSTM(8, 8))), lambda: (ids(T),), ASKED),
    "a sentence alone, batch first": (recurrent(True, each_step, nn.GRU), lambda: (ids(T),), ASKED),
    "a sentence alone, a transformer": (language_model(True), lambda: (ids(T),), ASKED),
    "a sentence alone, a transformer, time first": (language_model(False), lambda: (ids(T),), ASKED),
    "a sentence alone, cell by cell": (
        By(lambda m, x: m.head(unrolled(m, x, torch.zeros(8))), cell=nn.GRUCell(5, 8), head=nn.Linear(8, 2)),
        lambda: (torch.randn(T, 5),),
        ASKED,
    ),
    "a sentence alone, word by word": (By(word_by_word, **embedded(rnn=nn.LSTM(8, 8))), lambda: (ids(T),), ASKED),
    "a sentence alone, compiled": (torch.compile(language_model(True), backend="eager"), lambda: (ids(T),), ASKED),
    "an image alone, compiled": (torch.compile(of_an_image, backend="eager"), image, ASKED),
    "images, compiled": (torch.compile(net, backend="eager"), lambda: (torch.randn(N, 3, 8, 8),), N),
    "rows of features, compiled": (torch.compile(nn.Linear(5, 2), backend="eager"), lambda: (torch.randn(N, 5),), N),
    "users and what they have seen, compiled": (
        torch.compile(
            By(
                lambda m, users, x: m.encoder(m.embed(x)).mean(1) + m.embed(users),
                **embedded(encoder=encoder(batch_first=True)),
            ),
            backend="eager",
        ),
        lambda: (ids(N), ids(N, T)),
        N,
    ),
    # What layers have shown in a first forward holds for the others.
    "as many steps as units at first": (recurrent(False, each_step), in_turn((N, N), (T, N)), N),
    "one step at first, time first": (recurrent(False, each_step), in_turn((1, N), (T, N)), ASKED),
    "a batch of one at first": (recurrent(True, each_step), in_turn((1, T), (3, T)), 2),
    "a sentence of one word alone, and another": (recurrent(True, each_step), in_turn((1,), (T,)), ASKED),
    # Layers that see one unit, though there are more.
    "images one by one": (
        By(lambda m, x: torch.stack([m.head(m.conv(image).mean((1, 2))) for image in x]), **CONV),
        lambda: (torch.randn(N, 3, N, N),),
        N,
    ),
    "sequences one by one": (
        By(lambda m, x: torch.stack([m.head(m.rnn(each)[0][-1]) for each in x]), **RNN),
        lambda: (torch.randn(N, T, 5),),
        N,
    ),
    "a prompt that all images share": (
        By(lambda m, ids, x: m.head(x) + m.rnn(m.embed(ids))[0].mean(), **embedded(rnn=nn.LSTM(8, 8))),
        lambda: (ids(T), torch.randn(N, 8)),
        N,
    ),
}

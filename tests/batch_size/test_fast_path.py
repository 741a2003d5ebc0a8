"""`nn.TransformerEncoderLayer` leaves its fast path while any module inside has a hook, and then returns other bits.

So a loop that uses what the model returns in evaluation (self-training, acting, teachers) would train otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.checkpoint import checkpoint

import sonde
from sonde.batch_size.per_example.norms import PerExampleNorms
from tests.batch_size.per_example.oracle import assert_as, exact_squares

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

WIDTH, VOCABULARY, ROWS, LENGTH, STEPS = 32, 20, 8, 12, 9
IDS = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
MASK = torch.arange(LENGTH)[None] >= torch.arange(5, 5 + ROWS)[:, None]


def layer(dropout: float = 0.0, **options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout, batch_first=True, **options)


class Reader(nn.Module):
    """An embedding, something that mixes positions, and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(VOCABULARY, WIDTH), inner, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(ids), src_key_padding_mask=mask))


class AnsweringInParts(Reader):
    """Its evaluation calls no module around the layer."""

    def answer(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.forward(ids, mask)


class WithoutGraphInside(Reader):
    """It leaves the graph inside its forward, where no hook around the layer can know of it."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training):
            return super().forward(ids, mask)

    def answer(self, ids: Tensor, mask: Tensor) -> Tensor:
        with torch.enable_grad():
            return self(ids, mask)


class Attending(Reader):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.inner(x, x, x, key_padding_mask=mask, need_weights=False)[0])


class Translating(Reader):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.inner(x, x.flip(1), src_key_padding_mask=mask, memory_key_padding_mask=mask))


class Checkpointed(Reader):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(checkpoint(self.inner, x, None, mask, use_reentrant=False))


class FrozenInEvaluation(Reader):
    """Its first layer is frozen and in evaluation mode, while the others are trained."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.embed.requires_grad_(False)
        self.frozen = layer().requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenInEvaluation:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.inner(self.frozen(self.embed(ids), src_key_padding_mask=mask), src_key_padding_mask=mask))


class Recurrent(nn.TransformerEncoderLayer):
    """A layer that holds one whose input shows which dim is the batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__(WIDTH, 4, 64, dropout, batch_first=True)
        self.memory = nn.GRU(WIDTH, WIDTH)

    def forward(self, src: Tensor, *args: Any, **options: Any) -> Tensor:
        return super().forward(src + self.memory(src.transpose(0, 1))[0].transpose(0, 1), *args, **options)


class Alone(nn.TransformerEncoderLayer):
    """The layer is the model."""

    def __init__(self, dropout: float) -> None:
        super().__init__(WIDTH, 4, 64, dropout, batch_first=True)


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "layer": lambda p: Reader(layer(p)),
    "norm first": lambda p: Reader(layer(p, norm_first=True)),
    "encoder": lambda p: Reader(nn.TransformerEncoder(layer(p), 2)),
    "in parts": lambda p: AnsweringInParts(layer(p)),
    "without a graph inside": lambda p: WithoutGraphInside(layer(p)),
    "checkpointed": lambda p: Checkpointed(layer(p)),
    "frozen in evaluation": lambda p: FrozenInEvaluation(layer(p)),
    "recurrent": lambda p: Reader(Recurrent(p)),
    "alone": Alone,
    "attention": lambda p: Attending(nn.MultiheadAttention(WIDTH, 4, p, batch_first=True)),
    "transformer": lambda p: Translating(nn.Transformer(WIDTH, 4, 1, 1, 64, p, batch_first=True)),
}
PLACES = ["between windows", "between pieces", "between forward and backward"]


def call(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Scores of each position, [rows, length, vocabulary]."""
    if not isinstance(model, nn.TransformerEncoderLayer):
        return model(ids, mask)
    known = torch.sin(torch.arange(VOCABULARY * WIDTH).view(VOCABULARY, WIDTH) * 1.7)
    return model(known[ids], src_key_padding_mask=mask)[..., :VOCABULARY]


def answer(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """What the model says in evaluation."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        answered = model.answer(ids, mask) if hasattr(model, "answer") else call(model, ids, mask)  # type: ignore[operator]
    model.train(was_training)
    return answered.softmax(-1)


def run(
    name: str, place: str, *, probed: bool, n_micro: int = 1, dropout: float = 0.0, **options: Any
) -> tuple[list[Tensor], sonde.NoiseScaleReading | None]:
    """All answers, then the weights of a training that learns from the answers."""
    torch.manual_seed(0)
    model = MODELS[name](dropout)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    probe = None
    if probed:
        units = float(ROWS) if name == "alone" else "first dim"
        options = {"unit": "rows", "units_per_piece": units, "verbose": False} | options
        probe = sonde.attach(model, optimizer, **options)
    said = []
    before: Tensor | None = None
    for _ in range(STEPS):
        for i in range(n_micro):
            ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
            mask = torch.arange(LENGTH)[None] >= torch.randint(4, LENGTH + 1, (ROWS, 1), generator=generator)
            if before is None or place == "between pieces" or (place == "between windows" and i == 0):
                before = answer(model, ids, mask)
            scores = call(model, ids, mask)
            if place == "between forward and backward":
                before = answer(model, ids, mask)
            said.append(before)
            wanted = 0.7 * one_hot(ids, VOCABULARY) + 0.3 * before
            cross_entropy(scores.flatten(0, 1), wanted.flatten(0, 1)).backward()
        if probe is not None:
            probe.step()
        optimizer.step()
        optimizer.zero_grad()
    reading = None
    if probe is not None:
        reading = probe.reading()
        probe.close()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return said + [p.detach() for p in model.parameters()], reading


def assert_same_bits(measured: list[Tensor], plain: list[Tensor]) -> None:
    assert len(measured) == len(plain) > STEPS
    for a, b in zip(measured, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("n_micro", "dropout"), [(1, 0.1), (2, 0.0)])
@pytest.mark.parametrize(("name", "place"), [(name, PLACES[i % 3]) for i, name in enumerate(MODELS)])
def test_training_from_answers_is_bit_for_bit_the_same(name: str, place: str, n_micro: int, dropout: float) -> None:
    shape: dict[str, Any] = {"n_micro": n_micro, "dropout": dropout}
    measured, _ = run(name, place, probed=True, **shape)
    assert_same_bits(measured, run(name, place, probed=False, **shape)[0])


@pytest.mark.parametrize(
    ("options", "n_micro", "dropout"), [({"every": 3}, 1, 0.0), ({"per_example": "always"}, 2, 0.1)], ids=str
)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_the_options(place: str, n_micro: int, dropout: float, options: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"n_micro": n_micro, "dropout": dropout}
    measured, _ = run("layer", place, probed=True, **shape, **options)
    assert_same_bits(measured, run("layer", place, probed=False, **shape)[0])


@pytest.mark.parametrize("inside", [lambda m: m.inner, lambda m: m.inner.linear2], ids=["on it", "in it"])
def test_guard_a_hook_changes_what_the_layer_returns(inside: Callable[[Any], nn.Module]) -> None:
    model = Reader(layer())
    plain = answer(model, IDS, MASK)
    inside(model).register_forward_pre_hook(lambda module, args: None)
    assert not torch.equal(answer(model, IDS, MASK), plain)


def shares(model: nn.Module) -> Tensor:
    """Each example's share of a loss."""
    scores = call(model, IDS, MASK)
    return (scores * torch.linspace(-1, 1, scores[0].numel()).view_as(scores[0])).flatten(1).tanh().sum(1)


def assert_covered(model: nn.Module, *, before: bool = True, between: bool = False, alone: bool = False) -> None:
    """All parameters are covered, and right.

    Args:
        model: in fp64, without dropout.
        before: whether the model is asked before its forward.
        between: whether it is asked between forward and backward.
        alone: whether training goes past the model, to its layer.
    """
    exact = exact_squares(model, shares)
    with PerExampleNorms(model) as norms:
        if before:
            answer(model, IDS, MASK)
        losses = shares(CalledInParts(model) if alone else model)
        if between:
            answer(model, IDS, MASK)
        losses.sum().backward()
        squares = norms.take(ROWS)
    assert_as(squares, exact)


class CalledInParts(nn.Module):
    """Runs another model's forward without calling that model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.forward = model.forward


@pytest.mark.parametrize(("before", "between"), [(True, False), (True, True)])
@pytest.mark.parametrize(
    "name", ["layer", "norm first", "encoder", "in parts", "checkpointed", "attention", "transformer"]
)
def test_single_examples_are_covered_after_an_evaluation(name: str, before: bool, between: bool) -> None:
    assert_covered(MODELS[name](0.0).double(), before=before, between=between)


def test_single_examples_are_covered_in_a_training_in_evaluation_mode() -> None:
    assert_covered(MODELS["encoder"](0.0).double().eval())


@pytest.mark.parametrize("before", [False, True])
def test_a_layer_that_is_trained_alone_is_covered(before: bool) -> None:
    assert_covered(Reader(layer()).double(), before=before, alone=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_a_trace_in_a_window_is_that_of_the_layer_without_hooks() -> None:
    model = Reader(layer()).eval()
    with torch.no_grad():
        plain = torch.jit.trace(model, (IDS, MASK))(IDS, MASK)
        with PerExampleNorms(model):
            traced = torch.jit.trace(model, (IDS, MASK))
        assert torch.equal(traced(IDS, MASK), plain)


@pytest.mark.parametrize("inside", [lambda m: m, lambda m: m.inner], ids=["model", "encoder"])
def test_an_evaluation_compiled_in_a_window_is_that_of_the_model_without_hooks(
    inside: Callable[[Any], nn.Module],
) -> None:
    model = Reader(nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)).double().eval()
    part = inside(model)
    inputs = (IDS, MASK) if part is model else (model.embed(IDS).detach(), None, MASK)
    plain = torch.compile(part, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = plain(*inputs)
        torch._dynamo.reset()
        with PerExampleNorms(model) as norms:
            compiled = torch.compile(part, backend="eager", fullgraph=True)
            assert torch.equal(compiled(*inputs), expected)
            with torch.enable_grad():
                shares(model).sum().backward()
            assert norms.take(ROWS).not_covered() == {}
            assert torch.equal(compiled(*inputs), expected)
    torch._dynamo.reset()


def test_warnings_are_not_shown_again_in_each_window() -> None:
    model = Reader(layer())
    with PerExampleNorms(model):
        before = list(warnings.filters)
    with PerExampleNorms(model):
        assert list(warnings.filters) == before


def test_units_are_not_counted_in_the_forwards_of_a_layer_alone() -> None:
    with pytest.raises(ValueError, match=r"no nn\.TransformerEncoderLayer that is the whole model shows how"):
        sonde.attach(Alone(0.0), unit="rows", units_per_piece=len, verbose=False)
    model = Alone(0.0)
    with sonde.attach(model, unit="rows", per_example="never", verbose=False) as probe:
        assert len(model._forward_hooks) + len(model._forward_pre_hooks) == 0
        shares(model).sum().backward()
        probe.step()
        assert "the number of units in a piece is not known: pass units_per_piece=" in probe.reading().reason

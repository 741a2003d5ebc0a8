"""What a model keeps besides its weights is as it would be without sonde, which calls it a few times more.

Each model here counts, keeps, prints or draws in its forward. Where that can be put back, its batch is proved, and the
model has seen the training's own calls alone. Where it cannot, the model is not called.
"""

from __future__ import annotations

import collections
import itertools
import logging
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sonde.batch_size.proved_units import Rule, prove
from tests.batch_size.loops import attached

N, C = 6, 5
_CALLS: list[int] = []
_calls = 0


class Counts(nn.Module):
    """The layers that all models here have; `seen` is what a model shows of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(C, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.note(torch.tanh(self.layer(x))))

    def note(self, y: Tensor) -> Tensor:
        return y

    def seen(self) -> Any:
        return None


class InAttributes(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.shapes, self.by_name, self.names = 0, [], {"deep": [0]}, set()  # type: ignore[var-annotated]
        self.last: Tensor | None = None
        self.queue, self.array = collections.deque(maxlen=3), np.zeros(2)  # type: ignore[var-annotated]

    def note(self, y: Tensor) -> Tensor:
        self.n += 1
        self.shapes.append(tuple(y.shape))
        self.by_name["deep"][0] += 1
        self.by_name[f"call {self.n}"] = [self.n]
        self.names.add(self.n)
        self.queue.append(self.n)
        self.array += 1
        self.last = y.detach()
        self.made_by_a_call = self.n
        return y * (1 + 0.01 * self.n)

    def seen(self) -> Any:
        return self.n, self.shapes, self.by_name, self.names, self.queue, self.array.tolist(), self.made_by_a_call


class InGlobals(Counts):
    n_calls = 0

    def note(self, y: Tensor) -> Tensor:
        global _calls
        _calls += 1
        _CALLS.append(_calls)
        type(self).n_calls += 1
        return y * (1 + 0.01 * _calls)

    def seen(self) -> Any:
        return _calls, _CALLS, self.n_calls


class InClosures(Counts):
    def __init__(self) -> None:
        super().__init__()
        n, calls = 0, []  # type: ignore[var-annotated]

        def count(y: Tensor) -> Tensor:
            nonlocal n
            n += 1
            calls.append(n)
            return y * n

        self.count, self.counted = count, lambda: (n, calls)

    def note(self, y: Tensor) -> Tensor:
        return self.count(y)

    def seen(self) -> Any:
        return self.counted()


class InBuffers(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.steps = nn.BatchNorm1d(8), nn.Buffer(torch.zeros(()))
        self.memory = nn.Buffer(torch.zeros(4, 8))

    def note(self, y: Tensor) -> Tensor:
        self.steps += 1
        self.memory[int(self.steps) % 4] = y.detach().mean(0)
        return self.norm(y)

    def seen(self) -> Any:
        return [b.tolist() for b in self.buffers()]


class DrawsAtRandom(Counts):
    """By all generators that a seed of the whole program sets."""

    def note(self, y: Tensor) -> Tensor:
        return nn.functional.dropout(y, 0.3) * (1 + random.random()) * float(1 + np.random.rand())

    def seen(self) -> Any:
        return torch.rand(2).tolist(), random.random(), np.random.rand()


class SpectralNorm(Counts):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.layer)

    def seen(self) -> Any:
        return [b.tolist() for b in self.buffers()]


class HasHooks(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.layer.register_forward_hook(lambda *_: self.calls.append("layer"))
        self.register_forward_pre_hook(lambda *_: self.calls.append("model"))

    def seen(self) -> Any:
        return self.calls


class Speaks(Counts):
    def note(self, y: Tensor) -> Tensor:
        print("a forward")  # noqa: T201
        print("a forward", file=sys.stderr)  # noqa: T201
        logging.getLogger("of the user").warning("a forward")
        warnings.warn("a forward", stacklevel=1)
        return y


class TakesDerivative(Counts):
    def note(self, y: Tensor) -> Tensor:
        with torch.enable_grad():
            z = y.detach().requires_grad_()
            return y + torch.autograd.grad(z.pow(3).sum(), z)[0]


class OnlyZeros(Counts):
    """At the start, its head lets nothing through."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


PUT_BACK = [
    *(InAttributes, InGlobals, InClosures, InBuffers, DrawsAtRandom, SpectralNorm, HasHooks, Speaks, TakesDerivative),
    OnlyZeros,
]


class WritesToWeights(Counts):
    """As a codebook that follows an average."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.ones(8), requires_grad=False)

    def note(self, y: Tensor) -> Tensor:
        before = self.book.clone()
        self.book.data.mul_(0.9).add_(y.detach().mean(0))
        return y + before

    def seen(self) -> Any:
        return self.book.tolist()


class HasGenerator(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def note(self, y: Tensor) -> Tensor:
        return y + torch.rand(y.shape, generator=self.generator)

    def seen(self) -> Any:
        return torch.rand(2, generator=self.generator).tolist()


class HasIterator(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def note(self, y: Tensor) -> Tensor:
        return y * next(self.numbers)

    def seen(self) -> Any:
        return next(self.numbers)


class WritesToFile(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.file = Path("calls.txt").open("a")  # noqa: SIM115

    def note(self, y: Tensor) -> Tensor:
        self.file.write("a forward\n")
        return y

    def seen(self) -> Any:
        self.file.close()
        return Path("calls.txt").read_text()


class WritesToGivenTensor(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.table = {"sum": torch.zeros(8)}

    def note(self, y: Tensor) -> Tensor:
        self.table["sum"] += y.detach().sum(0)
        return y

    def seen(self) -> Any:
        return self.table["sum"].tolist()


REFUSED = [WritesToWeights, HasGenerator, HasIterator, WritesToFile, WritesToGivenTensor]


def trained(kind: type[Counts], folder: Path, *, measured: bool) -> tuple[list[Any], Any]:
    """Weights and what the model shows of itself after 3 steps of 2 micro-batches."""
    global _calls
    _calls, InGlobals.n_calls = 0, 0
    _CALLS.clear()
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        model = kind()
        optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(1)
        probe = attached(model, optimizer) if measured else None
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(N, C, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if probe is not None:
            assert probe.reading().units_per_window == 2 * N
            probe.close()
        return [p.tolist() for p in model.parameters()], model.seen()


@pytest.mark.parametrize("kind", [*PUT_BACK, *REFUSED])
@pytest.mark.filterwarnings("ignore:a forward")
def test_a_model_is_as_without_sonde(
    kind: type[Counts], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for name, measured in (("without", False), ("with", True)):
        said.append([trained(kind, tmp_path / name, measured=measured), capsys.readouterr(), caplog.messages[:]])
        caplog.clear()
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", PUT_BACK)
@pytest.mark.filterwarnings("ignore:a forward")
def test_what_can_be_put_back_is_no_reason_not_to_try(kind: type[Counts]) -> None:
    assert prove(kind(), (torch.randn(N, C),), {}) == Rule((0, 0), (0, 0))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_put_back_is_not_tried(kind: type[Counts], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = kind()
    assert prove(model, (torch.randn(N, C),), {}) is None
    model.seen()  # closes what is open


def test_an_error_in_the_users_code_leaves_no_trace_either() -> None:
    class Fails(InAttributes):
        def note(self, y: Tensor) -> Tensor:
            super().note(y)
            if self.n > 2:
                raise RuntimeError("of the user's")
            return y

    model = Fails()
    x = torch.randn(N, C)
    model(x)
    before, state = repr(model.seen()), torch.get_rng_state()
    assert prove(model, (x,), {}) == Rule((0, 0), (0, 0))  # each call finds what the first one found
    model.n = 2
    assert prove(model, (x,), {}) is None
    model.n = 1
    assert repr(model.seen()) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_in_any_precision_only_what_is_more_than_rounding_counts_as_moved(dtype: torch.dtype) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).to(dtype)
    assert prove(model, (torch.randn(N, 9, 8, dtype=dtype),), {}) == Rule((0, 0), (0, 0))


def test_autocast_keeps_no_weights_of_these_passes() -> None:
    """Its cache would give the training weights without a graph, converted while nothing was recorded."""
    model = Counts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert prove(model, (torch.randn(N, C),), {}) == Rule((0, 0), (0, 0))
        model(torch.randn(N, C)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_compiled_model_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        compiled.append(1)
        return graph.forward  # type: ignore[no-any-return]

    model = torch.compile(Counts(), backend=backend)
    with attached(model) as probe:  # type: ignore[arg-type]
        for _ in range(4):
            model(torch.randn(N, C)).square().mean().backward()
            probe.step()
        assert probe.reading().units_per_window == N
    assert compiled == [1]


def test_with_a_number_of_units_nothing_is_tried() -> None:
    model = InAttributes()
    with attached(model, units_per_piece=N):
        model(torch.randn(N, C)).sum().backward()
    assert model.n == 1


def test_collectives_are_refused_by_the_names_of_their_operations() -> None:
    import torch.distributed._functional_collectives

    for namespace in ("_c10d_functional", "_c10d_functional_autograd"):
        assert hasattr(getattr(torch.ops, namespace), "all_to_all_single")

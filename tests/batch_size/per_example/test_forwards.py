"""What a forward may do with a layer's input and output, and around it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sonde.batch_size.per_example.norms import PerExampleNorms
from tests.batch_size.per_example.oracle import assert_exact, measure, shares_of

B, T, WIDTH = 4, 5, 8
X = torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(2)).double()


class Then(nn.Module):
    """A layer, and something done with what it returned: [B, T, width]."""

    def __init__(self, layer: nn.Module, then: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.last, self.then = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH), then

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return self.last(self.then(x, y))


def write_slice(x: Tensor, y: Tensor) -> Tensor:
    y[:, 1:3] = 0.5 * y[:, 1:3]
    y[:, 0] = x[:, 0]
    return y


def detached_half(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([y[:, :2].detach(), y[:, 2:]], dim=1)


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "convolution": lambda: nn.Conv1d(T, T, 3, padding=1),
    "group norm": lambda: nn.GroupNorm(1, T),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
}
WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiplied in place": lambda x, y: y.mul_(1.5),
    "tanh in place": lambda x, y: y.tanh_(),
    "added to in place": lambda x, y: y.add_(x),
    "added in place to the input of others": lambda x, y: (x * 1.0).add_(y),
    "a slice overwritten": write_slice,
    "a view written to": lambda x, y: (y.view(B, T, 2, -1).mul_(2.0), y)[1],
    "a transposed view written to": lambda x, y: (y.transpose(1, 2).sigmoid_(), y)[1],
    "used twice": lambda x, y: torch.sin(y) * y,
    "half detached": detached_half,
    "sliced": lambda x, y: y[:, : T - 2],
    "not used": lambda x, y: x,
}


@pytest.mark.parametrize("then", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_what_is_done_with_an_output(make: Callable[[], nn.Module], then: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_exact(Then(make(), then).double(), shares_of(torch.randn(B, T, WIDTH)))


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "a slice": lambda x: torch.cat([x, x], -1)[..., 3 : 3 + WIDTH],
    "every second": lambda x: torch.cat([x, x], -1)[..., ::2],
    "expanded": lambda x: x[:, :1].expand(B, T, WIDTH),
    "expanded over features": lambda x: x[..., :1].expand(B, T, WIDTH) + torch.arange(WIDTH).to(x).expand(B, T, -1),
    "flipped": lambda x: x.flip(1),
}


@pytest.mark.parametrize("staging", [8 * 2**20, 1], ids=["", "no staging area"])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_are_views(name: str, staging: int) -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Conv1d(T, T, 3, padding=1)])

        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(INPUTS[name](x)) for layer in self.layers)  # type: ignore[return-value]

    assert_exact(Viewed().double(), shares_of(torch.randn(B, T, WIDTH)), staging_bytes=staging)


def test_gradients_that_are_expanded() -> None:
    """The gradient of a plain sum is one number, expanded."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).double(), torch.randn(B, T, WIDTH).double()
    for staging in (8 * 2**20, 1):
        measure(model, lambda m: m(x).flatten(1).sum(1), staging_bytes=staging)  # the norm's gradient is rounding only
        assert_exact(model[:1], lambda m: m(x).flatten(1).sum(1) / 7, staging_bytes=staging)


def test_other_forwards_in_between_do_not_count() -> None:
    """Without gradients, in evaluation mode, in inference mode, or never followed by a backward."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 3)).double()
    model.eval()
    x = torch.randn(B, T, WIDTH).double()
    alone = measure(model, shares_of(x))
    with PerExampleNorms(model) as norms:
        loss = shares_of(x)(model).sum()
        with torch.no_grad():
            model(x[:2])
        with torch.inference_mode():
            model(x)
        forgotten = model(x[:3])
        model.train()
        model(x)
        loss.backward()
        squares = norms.take(B)
        del forgotten
    assert squares.not_covered() == {}
    assert torch.equal(squares.sq_norms, alone.sq_norms)


def test_a_gradient_that_is_nothing_but_rounding_is_covered() -> None:
    """The bias of attention's keys moves all scores of a query alike, so its gradient is 0 but for rounding."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    squares = measure(Attend(), shares_of(torch.randn(B, 50, WIDTH)))
    assert squares.not_covered() == {}
    bias, weight = (squares.sq_norms[squares.names.index(name)] for name in ("k.bias", "k.weight"))
    assert (bias < 1e-9 * weight).all()


class Table(nn.Module):
    """Returns its parameter as a view: expanded to all examples, or as a single example."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(T, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[None] if len(x) == 1 else self.table.expand_as(x)


class Viewing(nn.Module):
    """Returns its input as a view, which others use too; its parameter has a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.shift).view(len(x), T, WIDTH)


@pytest.mark.parametrize("n", [1, B])
def test_a_layer_that_returns_its_parameter_as_a_view(n: int) -> None:
    model = Then(Table(), lambda x, y: (x + y) * y).double()
    rule = {Table: lambda layer, inputs, grad: {"table": grad}}
    assert_exact(model, shares_of(X[:n]), rules=rule)
    assert not model.layer.table._backward_hooks  # type: ignore[union-attr]


def test_a_layer_that_writes_into_its_input_and_returns_it() -> None:
    """The rule then needs the input as it was, which is gone: its parameter is named, and no other suffers."""
    model = Then(Viewing(), lambda x, y: torch.sin(x) * y).double()
    rule = {Viewing: lambda layer, inputs, grad: {"shift": (inputs[0] * grad).sum(1)}}
    assert_exact(model, shares_of(X), rules=rule, not_covered=("layer.shift",))


def test_keyword_arguments_and_a_layer_whose_output_is_not_used() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            y = self.layer(input=x)
            return torch.sin(y) + y * y

    squares = assert_exact(Keywords().double(), shares_of(torch.randn(B, T, WIDTH)))
    assert squares.sq_norms[squares.names.index("unused.weight")].tolist() == [0.0] * B


def inside_autocast(loss: Callable[[], Tensor]) -> None:
    """Autograd then multiplies in 16 bits. The rules do not: only the gradient that they are compared with changes."""
    of_window = loss()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        of_window.backward()


def with_saved_tensors_elsewhere(loss: Callable[[], Tensor]) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss().backward()


def in_another_thread(loss: Callable[[], Tensor]) -> None:
    thread = threading.Thread(target=loss().backward)
    thread.start()
    thread.join()


def with_create_graph(loss: Callable[[], Tensor]) -> None:
    loss().backward(create_graph=True)


def as_ever(loss: Callable[[], Tensor]) -> None:
    loss().backward()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(
    "way", [as_ever, inside_autocast, with_saved_tensors_elsewhere, in_another_thread, with_create_graph]
)
def test_ways_to_run_a_backward(way: Callable[[Callable[[], Tensor]], None]) -> None:
    """The bits are the same."""
    model, shares = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), shares_of(X.float())
    with PerExampleNorms(model) as norms:
        way(lambda: shares(model).sum())
        squares = norms.take(B)
    assert torch.equal(squares.sq_norms, measure(model, shares).sq_norms)
    assert not squares.sq_norms.requires_grad
    model.zero_grad()  # breaks the cycle of parameters and gradients


class Nested(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer, self.last, self.layout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), layout

    def forward(self, x: Tensor) -> Tensor:
        ragged = torch.nested.as_nested_tensor([x[0, :2], *x[1:]], layout=self.layout)
        return self.last(torch.nested.to_padded_tensor(self.layer(ragged), 0.0))


class Experts(nn.Module):
    """Rows are dealt to experts; the last of them gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        dealt = torch.arange(len(rows)) % 2
        found = torch.zeros_like(rows)
        for k, expert in enumerate(self.experts):
            where = (dealt == k).nonzero()[:, 0]
            found = found.index_add(0, where, expert(rows[where]))
        return self.last(found.view_as(x))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.func.vmap(self.layer)(x))


REFUSED = {
    "nested": (Nested(torch.strided), ("layer.weight", "layer.bias"), "no rule has seen"),
    "jagged": (Nested(torch.jagged), ("layer.weight", "layer.bias"), "no rule has seen"),
    "experts": (Experts(), tuple(f"experts.{k}.{n}" for k in range(3) for n in ("weight", "bias")), "not 4 examples"),
    "vmap": (Mapped(), ("layer.weight", "layer.bias"), "no rule has seen"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(("model", "names", "reason"), REFUSED.values(), ids=REFUSED)
def test_layers_that_do_not_see_single_examples(model: nn.Module, names: tuple[str, ...], reason: str) -> None:
    squares = assert_exact(model.double(), shares_of(X), not_covered=names)
    assert all(reason in text for text in squares.not_covered().values()), squares.not_covered()

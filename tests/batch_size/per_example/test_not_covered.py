"""A parameter that the rules do not see whole is named with the reason, and has no number."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sonde.batch_size.per_example.covered import PerExampleSquares
from sonde.batch_size.per_example.norms import PerExampleNorms
from tests.batch_size.per_example.oracle import assert_exact, measure, shares_of

B, T, WIDTH = 4, 6, 8


class Model(nn.Module):
    """Two layers, and something done with their output."""

    def __init__(self, then: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, x, self.second(torch.tanh(self.norm(self.first(x)))))


X = torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def slightly(amount: float) -> Callable[[Model, Tensor, Tensor], Tensor]:
    return lambda m, x, y: y + amount * F.linear(x, m.first.weight)


USES: dict[str, tuple[Callable[[Model, Tensor, Tensor], Tensor], tuple[str, ...]]] = {
    "a weight in F.linear": (lambda m, x, y: y + F.linear(x, m.first.weight), ("first.weight",)),
    "a weight in F.linear, weakly": (slightly(1e-3), ("first.weight",)),
    "a transposed weight": (lambda m, x, y: y @ m.second.weight, ("second.weight",)),
    "one element of a weight": (lambda m, x, y: y + m.first.weight[3, 5], ("first.weight",)),
    "a bias": (lambda m, x, y: y * m.first.bias, ("first.bias",)),
    "a parameter of its own": (lambda m, x, y: y * m.scale, ("scale",)),
    "a penalty on the weights": (lambda m, x, y: y + 0.01 * m.norm.weight.square().sum(), ("norm.weight",)),
}


@pytest.mark.parametrize(("then", "names"), USES.values(), ids=USES)
def test_a_use_outside_its_layer(then: Callable[..., Tensor], names: tuple[str, ...]) -> None:
    squares = assert_exact(Model(then).double(), shares_of(X), not_covered=names)
    reason = squares.not_covered()[names[0]]
    assert "Model has no rule" in reason if names == ("scale",) else "is used outside its layer's forward" in reason


def test_without_the_check_such_a_use_would_be_a_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from sonde.batch_size.per_example import piece

    monkeypatch.setattr(piece, "tolerance", lambda dtypes, device: float("inf"))
    model = Model(USES["a weight in F.linear"][0]).double()
    with pytest.raises(AssertionError, match=r"first\.weight"):
        assert_exact(model, shares_of(X), not_covered=())
    assert measure(model, shares_of(X)).not_covered() == {}


@pytest.mark.parametrize("how", ["hook", "pre-hook", "parameter hook"])
def test_hooks_of_the_user(how: str) -> None:
    """A forward hook that changes what a layer takes or returns is no matter. One that changes a gradient is named."""
    model = Model(lambda m, x, y: y).double()
    if how == "hook":
        model.first.register_forward_hook(lambda layer, args, output: 3 * output)
    elif how == "pre-hook":
        model.first.register_forward_pre_hook(lambda layer, args: (torch.sin(args[0]),))
    else:
        model.first.weight.register_hook(lambda grad: grad * 1.01)
        assert set(measure(model, shares_of(X)).not_covered()) == {"first.weight"}
        return
    assert_exact(model, shares_of(X))


def test_a_recurrent_layer_has_no_rule() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x)[0])

    model = Recurrent().double()
    names = tuple(n for n, _ in model.named_parameters() if "lstm" in n)
    squares = assert_exact(model, shares_of(X), not_covered=names)
    assert "LSTM has no rule: give one in rules=" in squares.not_covered()["lstm.weight_ih_l0"]
    assert set(PerExampleNorms(model).without_rule) == set(names)


def test_a_subclass_with_a_forward_of_its_own_has_no_rule() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(2 * x, self.weight, self.bias)

    class Renamed(nn.Linear):
        pass

    model = nn.Sequential(Renamed(WIDTH, WIDTH), nn.Tanh(), Doubled(WIDTH, WIDTH)).double()
    assert_exact(model, shares_of(X), not_covered=("2.weight", "2.bias"))


def test_a_parametrised_weight_is_named() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 3)).double()
    squares = measure(model, shares_of(X))
    assert set(squares.not_covered()) == {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"}


def test_inputs_that_change_in_place_before_backward() -> None:
    class InPlace(nn.Module):
        """Under autocast the layer keeps a copy for backward, so autograd does not object to the change."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.layer(x)
            x.zero_()
            return y.float()

    squares = measure(InPlace(), shares_of(X.float()))
    assert set(squares.not_covered()) == {"layer.weight"}  # the bias's gradient does not depend on the input


class Positions(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(9, WIDTH), nn.Embedding(T, WIDTH)
        self.shape = shape

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        places = {"[T]": places, "[1, T]": places[None], "[B, T]": places.expand_as(ids)}[self.shape]
        return self.embed(ids) + self.position(places)


@pytest.mark.parametrize("shape", ["[T]", "[1, T]", "[B, T]"])
@pytest.mark.parametrize("n_examples", [4, T])
def test_positions_that_all_examples_share(shape: str, n_examples: int) -> None:
    """As many positions as examples look like examples, and the sum over them would not tell."""
    ids = torch.randint(9, (n_examples, T))
    not_covered = () if shape == "[B, T]" else ("position.weight",)
    squares = assert_exact(Positions(shape).double(), shares_of(ids), not_covered=not_covered)
    if not_covered:
        words = "which may be the examples or the positions" if shape == "[T]" and n_examples == T else "not "
        assert words in squares.not_covered()["position.weight"]


def test_a_gradient_penalty_is_named_and_torch_autograd_grad_does_not_count() -> None:
    model = Model(lambda m, x, y: y).double()
    x = X.clone().requires_grad_()

    def measured(penalty: float) -> PerExampleSquares:
        with PerExampleNorms(model) as norms:
            y = shares_of(x)(model)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (y.sum() + penalty * slope.square().sum()).backward()
            return norms.take(B)

    assert measured(0.0).not_covered() == {}
    torch.testing.assert_close(measured(0.0).sq_norms, measure(model, shares_of(X)).sq_norms)
    assert "first.weight" in measured(1.0).not_covered()


def test_gradients_that_are_not_finite_are_named() -> None:
    model = Model(lambda m, x, y: y).double()
    x = X.clone()
    x[2, 3, 1] = float("inf")
    squares = measure(model, shares_of(x))
    assert "not finite" in squares.not_covered()["first.weight"]
    assert squares.sq_norms[squares.names.index("first.weight")].isnan().all()


@pytest.mark.parametrize("scale", [1e-30, 1e22])
def test_squares_out_of_range_are_named(scale: float) -> None:
    """fp32 squares vanish below 1e-19 and overflow above 1e19, where the gradients themselves do not."""
    squares = measure(nn.Linear(WIDTH, WIDTH), lambda m: scale * shares_of(X.float())(m))
    assert all("beyond the range of fp32" in reason for reason in squares.not_covered().values())
    assert squares.sq_norms.isnan().all()


def test_gradients_that_torch_itself_rounds_away_are_named() -> None:
    """On the CPU, torch adds a bf16 layer norm's gradient in bf16. The rule does not, so the two differ."""
    layer, x = nn.LayerNorm(32).bfloat16(), torch.randn(8, 400, 32).bfloat16()
    squares = measure(layer, lambda m: m(x).float().square().flatten(1).sum(1))
    exact = copy.deepcopy(layer).double()
    exact.zero_grad()
    exact(x.double()).square().sum().backward()
    assert layer.weight.grad is not None
    off = float((layer.weight.grad.double() - exact.weight.grad).norm() / exact.weight.grad.norm())
    assert off > 0.1
    assert "lost as much to rounding in 16 bits" in squares.not_covered()["weight"]


BATCH_NORM = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).double()


def test_batch_normalisation_is_named() -> None:
    model, images = copy.deepcopy(BATCH_NORM), shares_of(torch.randn(B, 3, 8, 8))
    model.eval()
    assert_exact(model, images)
    with PerExampleNorms(model) as norms:
        model.train()
        images(model).sum().backward()
        squares = norms.take(B)
        model.eval()
        images(model).sum().backward()
        assert norms.take(B).not_covered() == {}
    assert all(
        "1: batch normalisation in train mode couples the examples" in reason
        for reason in squares.not_covered().values()
    )
    assert squares.sq_norms.isnan().all()


@pytest.mark.parametrize("how", ["model", "submodule", "in place", "wrapped"])
def test_compiled_models_are_refused_by_name(how: str) -> None:
    model: nn.Module = Model(lambda m, x, y: y)
    if how == "model":
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    elif how == "submodule":
        model.first = torch.compile(model.first, backend="aot_eager")  # type: ignore[assignment]
    elif how == "in place":
        model.norm.compile(backend="aot_eager")  # type: ignore[operator]
    else:
        model = nn.Sequential(torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is compiled: measure without that"):
        PerExampleNorms(model).open()


def test_a_compiled_function_around_the_model_is_named() -> None:
    torch._dynamo.reset()
    model = Model(lambda m, x, y: y).double()
    run = torch.compile(lambda x: model(x), backend="aot_eager")
    with PerExampleNorms(model) as norms:
        run(X).square().sum().backward()
        squares = norms.take(B)
    assert {"first.weight", "norm.weight", "second.bias"} <= set(squares.not_covered())
    torch._dynamo.reset()


def test_a_replaced_parameter_is_named() -> None:
    model = Model(lambda m, x, y: y).double()
    norms = PerExampleNorms(model)
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    with pytest.raises(ValueError, match=r"the model has lost 1 parameter \(first.weight\): attach anew"):
        norms.open()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: PerExampleNorms(m, staging_bytes=0), ValueError, "staging_bytes must be positive"),
        (lambda m: PerExampleNorms(m, parameters={}), ValueError, "no parameters to measure"),
        (lambda m: PerExampleNorms(m.requires_grad_(False)), ValueError, "no trainable parameters"),
        (lambda m: PerExampleNorms(m).take(3), RuntimeError, "hooks are not installed"),
        (lambda m: PerExampleNorms(m).__enter__().take(0), ValueError, "n_examples must be a whole number from 1 up"),
        (lambda m: PerExampleNorms(m).__enter__().take(8.5), ValueError, "n_examples .* got 8.5"),
        (lambda m: PerExampleNorms(m).__enter__().open(), RuntimeError, "installed already"),
    ],
)
def test_bad_calls(call: Callable[[nn.Module], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(nn.Linear(2, 2))


def test_a_parameter_without_a_gradient_counts_as_0() -> None:
    model = Model(lambda m, x, y: y).double()  # `scale` is never used
    squares = assert_exact(model, shares_of(X))
    assert squares.sq_norms[squares.names.index("scale")].tolist() == [0.0] * B
    with PerExampleNorms(model) as norms:
        shares_of(X)(model).sum().backward(inputs=[model.second.weight])
        only = norms.take(B)
    assert only.not_covered() == {}
    torch.testing.assert_close(only.sq_norms.sum(0), squares.sq_norms[squares.names.index("second.weight")])


def test_chosen_parameters() -> None:
    model = Model(lambda m, x, y: y * m.scale).double()
    chosen = {name: p for name, p in model.named_parameters() if name.startswith("second")}
    with PerExampleNorms(model, parameters=chosen) as norms:
        shares_of(X)(model).sum().backward()
        squares = norms.take(B)
    assert squares.names == ("second.weight", "second.bias")
    every = measure(model, shares_of(X))
    rows = [every.sq_norms[every.names.index(name)] for name in squares.names]
    torch.testing.assert_close(squares.sq_norms, torch.stack(rows))
    torch.testing.assert_close(squares.sq_norms.sum(0), torch.stack(rows).sum(0))

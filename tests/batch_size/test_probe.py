"""The probe on plain modules: values against whole gradients, whatever a model contains and a loop does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.batch_size.loops import (
    assert_same,
    attached,
    batch,
    flat_grad,
    mean_loss,
    one_window,
    piece_losses,
    small_model,
    train,
)
from tests.oracles import per_example_gradients, population, window_by_hand

# Values.


def test_equal_pieces() -> None:
    model = small_model()
    assert_same(*one_window(model, piece_losses(model, [4, 4, 4, 4]), units=[4, 4, 4, 4]))


def test_double_precision_is_exact() -> None:
    model = small_model(torch.float64)
    losses = piece_losses(model, [4, 8, 2], torch.float64)
    assert_same(*one_window(model, losses, units=[4, 8, 2], weights=[4, 8, 2]), rel=1e-12)


def test_uneven_pieces_weights_and_effective_units() -> None:
    model = small_model()
    losses = piece_losses(model, [3, 7, 5])
    assert_same(*one_window(model, losses, units=[3, 7, 5], weights=[1.5, 7.0, 0.3]))


def test_kish_from_unit_weights() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    skewed, flat = [1.0, 2.0, 3.0, 10.0], [1.0] * 4
    for weights in (skewed, torch.tensor(skewed)):
        with attached(model) as probe:
            for loss, of_units in zip(losses, (weights, flat), strict=True):
                with probe.piece(unit_weights=of_units):
                    loss().backward()
            probe.step()
            reading = probe.reading()
        model.zero_grad()
        gradients = [flat_grad(model, loss()) for loss in losses]
        effective = [16.0**2 / 114, 4.0]
        assert_same(reading, window_by_hand(gradients, [1, 1], effective, gradients[0] + gradients[1]))
        assert reading.effective_units == pytest.approx(4 / (1 / effective[0] + 1 / effective[1]))
        assert reading.units_per_window == 8


def test_counts_may_stay_on_the_device() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 8])
    with attached(model) as probe:
        for loss, n in zip(losses, (4, 8), strict=True):
            with probe.piece(units=torch.tensor(n), weight=torch.tensor(float(n))):
                loss().backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [4, 8], [4, 8], gradients[0] + gradients[1]))


def test_groups_add_up_and_are_what_they_say() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    reading, total = one_window(model, losses, units=[4, 4])
    assert list(reading.groups) == ["0", "2", "3", "4"]
    assert sum(g.trace_cov or 0 for g in reading.groups.values()) == pytest.approx(total[0], rel=1e-5)
    last = model[4]
    model.requires_grad_(False)
    last.requires_grad_(True)
    gradients = [flat_grad(model, loss()) for loss in losses]
    trace_cov, grad_sq = window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1])
    assert reading.groups["4"].trace_cov == pytest.approx(trace_cov, rel=1e-5)
    assert reading.groups["4"].grad_sq == pytest.approx(grad_sq, rel=1e-5)


@pytest.mark.parametrize(
    ("groups", "names"),
    [(None, ["all"]), (lambda name: name.split(".")[-1], ["weight", "bias"]), ("blocks", ["0", "2", "3", "4"])],
)
def test_groups_are_chosen_by_name(groups: Any, names: list[str]) -> None:
    model = small_model()
    reading, expected = one_window(model, piece_losses(model, [4, 4]), units=[4, 4], groups=groups)
    assert list(reading.groups) == names
    assert_same(reading, expected)


SIZES = (24, 40, 64) * 3


@pytest.mark.slow
def test_unbiased_for_the_exact_moments_of_a_population() -> None:
    """Averages over many windows against tr Σ and |G|² of every example's gradient."""
    generator = torch.Generator().manual_seed(0)
    model = small_model(torch.float64)
    inputs, targets = batch(96, generator, torch.float64)
    exact = population(per_example_gradients(model, lambda out, y: (out - y).square().sum(-1).mean(), inputs, targets))
    with attached(model) as probe:
        for _ in range(1_100):
            for n in SIZES:  # uneven, and weighted by their size
                rows = torch.randint(96, (n,), generator=generator)
                with probe.piece(units=n, weight=n):
                    (n * mean_loss(model, inputs[rows], targets[rows])).backward()
            for p in model.parameters():
                p.grad.div_(sum(SIZES))  # type: ignore[union-attr]
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        moments = probe._tracker._averages.total._moments()
    squares = sum(SIZES) ** 2  # they are in units of the sum of the pieces
    for got, true, variance in (
        (reading.trace_cov, exact.trace_cov, moments["var_numerator"]),
        (reading.grad_sq, exact.grad_sq, moments["var_denominator"]),
    ):
        assert got is not None
        error = math.sqrt(variance) / squares
        assert error < 0.01 * true / 2.5  # so that 1 % would be seen
        assert got / squares == pytest.approx(true, rel=0.01)
    assert reading.low is not None
    assert reading.high is not None
    assert reading.low <= exact.b_simple <= reading.high


# What a model may contain.


def test_frozen_parameters_and_adapters() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    assert_same(*one_window(model, piece_losses(model, [4, 4]), units=[4, 4]))


def test_lora() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
            self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.a.T @ self.b.T

    model = small_model().requires_grad_(False)
    model[3] = Lora(model[3])  # type: ignore[arg-type]
    reading, expected = one_window(model, piece_losses(model, [4, 4, 4]), units=[4, 4, 4])
    assert_same(reading, expected)
    assert list(reading.groups) == ["3"]


class Tied(nn.Module):
    """A byte model whose output head is its embedding."""

    def __init__(self, *, sparse: bool = False, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, sparse=sparse)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def token_losses(model: nn.Module, sizes: list[int]) -> list[Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for n in sizes:
        tokens = torch.randint(40, (n, 9), generator=generator)
        losses.append(lambda t=tokens: nn.functional.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()))
    return losses


def test_tied_weights_count_once() -> None:
    model = Tied()
    reading, expected = one_window(model, token_losses(model, [4, 4]), units=[4, 4])
    assert_same(reading, expected)


def test_sparse_embedding_gradients() -> None:
    model = Tied(sparse=True, tie=False)
    reading, expected = one_window(model, token_losses(model, [4, 4]), units=[4, 4])
    assert_same(reading, expected)


def test_parameters_unused_in_a_piece() -> None:
    model = small_model()
    first, second = piece_losses(model, [4, 4])
    x = torch.randn(4, 12)
    losses = [first, second, lambda: model[0](x).square().mean()]  # the third reaches the first layer only
    assert_same(*one_window(model, losses, units=[4, 4, 4]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    batches = [batch(4, generator) for _ in range(3)]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        hidden = model[2](model[1](model[0](x)))
        return (model[4](checkpoint(model[3], hidden, use_reentrant=reentrant)) - y).square().sum(-1).mean()

    with attached(model, units_per_piece=4) as probe:
        for x, y in batches:
            loss(x, y).backward()  # without piece(): backward inside backward must not end the piece
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, mean_loss(model, x, y)) for x, y in batches]
    assert_same(reading, window_by_hand(gradients, [1] * 3, [4] * 3, torch.stack(gradients).sum(0)))


def test_backward_inside_backward_first_is_refused_with_the_way_out() -> None:
    model = small_model().requires_grad_(False)
    model[3].requires_grad_(True)
    x, y = batch(4, torch.Generator().manual_seed(0))
    x.requires_grad_(True)

    def backward() -> None:
        hidden = checkpoint(model[3], model[2](model[1](model[0](x))), use_reentrant=True)
        (model[4](hidden) - y).square().sum(-1).mean().backward()

    with attached(model, units_per_piece=4) as probe:
        for _ in range(2):
            backward()
        probe.step()
        reading = probe.reading()
        assert reading.windows == 0
        assert "wrap each micro-batch in 'with probe.piece():'" in reading.reason
        model.zero_grad()
        for _ in range(2):
            with probe.piece():
                backward()
        probe.step()
        assert probe.reading().windows == 1


@pytest.mark.parametrize("declared", [True, False])
def test_a_gradient_penalty_by_autograd_grad_is_no_backward(declared: bool) -> None:
    """autograd.grad calls the same hooks and adds nothing to `.grad`: the piece is what the penalised loss adds."""
    model = small_model()
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    batches = [batch(4, generator) for _ in range(3)]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        plain = mean_loss(model, x, y)
        slopes = torch.autograd.grad(plain, parameters, create_graph=True)
        return plain + 0.1 * sum((s.square().sum() for s in slopes), torch.zeros(()))

    with attached(model, units_per_piece=4) as probe:
        for x, y in batches:
            with probe.piece() if declared else contextlib.nullcontext():
                loss(x, y).backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss(x, y)) for x, y in batches]
    assert_same(reading, window_by_hand(gradients, [1] * 3, [4] * 3, torch.stack(gradients).sum(0)))


def test_gradients_set_by_hand_are_no_pieces() -> None:
    model = small_model()
    parameters = list(model.parameters())
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                grads = torch.autograd.grad(loss(), parameters)
            for p, g in zip(parameters, grads, strict=True):
                p.grad = g if p.grad is None else p.grad + g
        probe.step()
        reading = probe.reading()
    assert reading.windows == 0
    assert "no backward reached the parameters in a piece" in reading.reason
    assert "gradients set by hand" in reading.reason


def test_compiled_model() -> None:
    torch._dynamo.reset()
    model = small_model()
    compiled = torch.compile(model, backend="aot_eager")
    losses = piece_losses(model, [4, 4, 4])
    generator = torch.Generator().manual_seed(0)
    with attached(compiled) as probe:  # type: ignore[arg-type]
        for _ in range(3):
            with probe.piece(units=4):
                mean_loss(compiled, *batch(4, generator)).backward()  # type: ignore[arg-type]
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [1] * 3, [4] * 3, torch.stack(gradients).sum(0)))
    assert list(reading.groups) == ["0", "2", "3", "4"]


def test_sixteen_bit_gradients_are_squared_in_more() -> None:
    model = small_model().bfloat16()
    losses = piece_losses(model, [4, 4], torch.bfloat16)
    reading, expected = one_window(model, losses, units=[4, 4])
    # .grad itself is added up in 8 bits, so F is H to about 2⁻⁸; squares in bf16 would be off by several %.
    assert_same(reading, expected, rel=2e-2)


@pytest.mark.parametrize(("n_pieces", "windows"), [(64, 2), (192, 2), (3000, 0)])
def test_many_sixteen_bit_gradients_are_sums_until_they_stop_adding_up(n_pieces: int, windows: int) -> None:
    """Rounding grows as the root of the pieces; past some thousand, bf16 sums no longer move, and that is named."""
    model = nn.Linear(12, 3).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with attached(model, units_per_piece=4) as probe:
        for _ in range(2):
            for _ in range(n_pieces):
                mean_loss(model, *batch(4, generator, torch.bfloat16)).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert reading.windows == windows, reading.dropped
    assert windows or "16-bit gradients lost small parts" in reading.reason


# What a loop may do.


def test_without_piece_each_backward_is_one() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4, 4])
    with attached(model, units_per_piece=4) as probe:
        for loss in losses:
            loss().backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [1] * 3, [4] * 3, torch.stack(gradients).sum(0)))


@pytest.mark.parametrize("metric", ["euclidean", "adam"])
@pytest.mark.parametrize("zeroed", ["None", "0"])
def test_several_backwards_in_the_first_piece_need_no_memory(metric: str, zeroed: str) -> None:
    """`.grad` is the piece's gradient so far, so cross terms are at hand, from the first window on."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    losses = piece_losses(model, [4, 4, 4, 4])
    losses[3]().backward()
    optimizer.step()  # a second moment for Adam's metric
    optimizer.zero_grad(set_to_none=zeroed == "None")
    with attached(model, optimizer, metric=metric, staging_mib=0.0) as probe:
        with probe.piece(units=4):
            for loss in losses[:3]:
                loss().backward()
        with probe.piece(units=4):
            losses[3]().backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, losses[0]() + losses[1]() + losses[2]()), flat_grad(model, losses[3]())]
    if metric == "adam":
        second = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()]).double()
        gradients = [g / ((second / 1e-3).sqrt() + 1e-8).sqrt() for g in gradients]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]), rel=3e-5)


def test_several_backwards_in_one_piece() -> None:
    """Cross terms count: the piece's gradient is the sum. The first window finds out, the next are right."""
    model = small_model()
    losses = piece_losses(model, [4, 4, 4, 4])
    with attached(model) as probe:
        for _ in range(2):
            for first, second in (losses[:2], losses[2:]):
                with probe.piece(units=4):
                    first().backward()
                    second().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
        assert sum(reading.dropped.values()) == 1
        assert "several backwards" in next(iter(reading.dropped))
    gradients = [flat_grad(model, a() + b()) for a, b in (losses[:2], losses[2:])]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]))


def test_several_backwards_beyond_the_staging_area_are_refused() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model, staging_mib=0.01) as probe:
        for _ in range(3):
            for _ in range(2):
                with probe.piece(units=4):
                    for loss in losses:
                        loss().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert reading.windows == 0
    assert sum(reading.dropped.values()) == 3
    assert "add the losses and call backward once, raise staging_mib" in reading.reason


def test_summed_backwards_of_large_gradients_are_as_exact() -> None:
    """tr Σ is a small difference here: fp32 norms of a whole 1.4M-element gradient would be off by 1.6e-3 of it."""
    model = nn.Linear(1200, 1200)
    generator = torch.Generator().manual_seed(0)
    inputs = [1 + 0.1 * torch.randn(2, 1200, generator=generator) for _ in range(4)]
    losses = [(lambda x=x: model(x).mean()) for x in inputs]  # type: ignore[misc]
    with attached(model) as probe:
        for _ in range(2):  # the first window finds several backwards in its second piece
            for pair in (losses[:2], losses[2:]):
                with probe.piece(units=4):
                    for loss in pair:
                        loss().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    gradients = [flat_grad(model, a() + b()) for a, b in (losses[:2], losses[2:])]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]), rel=4e-4)


def test_summed_backwards_of_sparse_gradients() -> None:
    model = Tied(sparse=True, tie=False)
    losses = token_losses(model, [4, 4, 4, 4])
    with attached(model) as probe:
        for _ in range(2):
            for pair in (losses[:2], losses[2:]):
                with probe.piece(units=4):
                    for loss in pair:
                        loss().backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    gradients = [flat_grad(model, a() + b()) for a, b in (losses[:2], losses[2:])]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]))


def test_a_function_that_returns_no_gradient_for_a_parameter() -> None:
    class OnlyForInput(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad * 2, None

    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model) as probe:
        for loss in losses:
            with probe.piece(units=4):
                OnlyForInput.apply(loss(), model[0].weight).backward()
        probe.step()
        assert probe.reading().windows == 1


def test_another_default_device_does_not_matter() -> None:
    model = small_model()
    with attached(model) as probe:
        for loss in piece_losses(model, [4, 4]):
            with probe.piece(units=4):
                loss().backward()
        with torch.device("meta"):
            probe.log(loss=1.0)
            probe.step()
            assert probe.reading().windows == 1


@pytest.mark.parametrize("declared", [False, True])
def test_a_backward_that_fails_leaves_no_trace(declared: bool) -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise MemoryError("pretend")

    def failing() -> Tensor:
        return model[4](Fails.apply(model[3](torch.randn(4, 160)))).square().mean()

    with attached(model, units_per_piece=4) as probe:
        piece = probe.piece if declared else contextlib.nullcontext
        with pytest.raises(MemoryError), piece():
            failing().backward()
        model.zero_grad()  # out of memory was caught, and the window is tried again
        for loss in losses:
            with piece():
                loss().backward()
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # torch says so once a process
def test_create_graph() -> None:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    with attached(model) as probe:
        for loss in losses:
            with probe.piece(units=4):
                loss().backward(create_graph=True)
        probe.step()
        reading = probe.reading()
    model.zero_grad()
    gradients = [flat_grad(model, loss()) for loss in losses]
    assert_same(reading, window_by_hand(gradients, [1, 1], [4, 4], gradients[0] + gradients[1]))


# Adam's metric.


@pytest.mark.parametrize("variant", [{}, {"fused": True}, {"amsgrad": True}], ids=str)
def test_adam_metric_is_the_weighted_sum_of_squares(variant: dict[str, bool]) -> None:
    """Σ P_j g_j² with the second moment of the previous step, from the optimizer's own state, by hand."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **variant)
    losses = piece_losses(model, [4, 6])
    with attached(model, optimizer, metric="adam") as probe:
        for _ in range(2):
            weight = []
            for p in model.parameters():
                state = optimizer.state.get(p)
                if state:
                    moment = state["max_exp_avg_sq" if variant.get("amsgrad") else "exp_avg_sq"]
                    corrected = moment.double() / (1 - 0.999 ** float(state["step"]))
                    weight.append(1 / (corrected.sqrt() + 1e-8).flatten())
            gradients = [flat_grad(model, loss()) for loss in losses]
            for loss, n in zip(losses, (4, 6), strict=True):
                with probe.piece(units=n):
                    loss().backward()
            norm = probe.clip_grad_norm_(math.inf)
            optimizer.step()
            optimizer.zero_grad()
        reading = probe.reading()
    # The first window came before any second moment, which is no cause for alarm.
    assert (reading.windows, sum(reading.dropped.values())) == (1, 1)
    assert "the optimizer's second moment, which exists only after its first step" in next(iter(reading.dropped))
    assert probe.alerts == {}
    root = torch.cat(weight).sqrt()
    assert_same(reading, window_by_hand([root * h for h in gradients], [1, 1], [4, 6], root * sum(gradients)))
    assert float(norm) == pytest.approx(float(sum(gradients).norm()), rel=1e-5)  # type: ignore[union-attr]


def test_adam_metric_follows_a_loaded_state() -> None:
    """Resuming: the optimizer's state is loaded after the probe was attached."""
    model = small_model()
    trained = torch.optim.Adam(model.parameters(), lr=0.0)
    piece_losses(model, [4])[0]().backward()
    trained.step()
    trained.zero_grad()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    with attached(model, optimizer, metric="adam") as probe:
        optimizer.load_state_dict(trained.state_dict())
        train(model, probe, optimizer, windows=2)
        assert probe.reading().windows == 2


def test_adam_metric_needs_such_an_optimizer() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="got no optimizer"):
        attached(model, metric="adam")
    with pytest.raises(ValueError, match="got SGD: use Adam"):
        attached(model, torch.optim.SGD(model.parameters(), lr=0.1), metric="adam")
    with pytest.raises(ValueError, match="got Adamax: use Adam"):
        attached(model, torch.optim.Adamax(model.parameters()), metric="adam")
    with pytest.raises(ValueError, match="metric must be"):
        attached(model, metric="sign")

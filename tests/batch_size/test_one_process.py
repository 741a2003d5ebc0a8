"""Whatever a model holds and however its backwards are called, the numbers of a window are those by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.batch_size.loops import assert_same, attached, batch, flat_grad, mean_loss, piece_losses, small_model
from tests.oracles import window_by_hand

Loss = Callable[[], Tensor]


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


@dataclass
class Case:
    """A model, and the losses of each piece, each of which has a backward of its own.

    Attributes:
        backwards: in place of them, what runs a piece's backwards, given its number.
        counts: what each piece is declared with.
        declared: whether pieces are declared; otherwise each backward is a piece of 4 units.
        options: for attach.
        rel: how exact the numbers are.
    """

    model: nn.Module
    pieces: Sequence[Sequence[Loss]]
    backwards: Callable[[int], object] | None = None
    counts: Sequence[dict[str, Any]] = ({"units": 4},) * 4
    declared: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    # fp32 gradients, and the two sides round differently: a few 1e-7 of S and B, amplified by their difference.
    rel: float = 1e-5

    def run(self, probe: Any) -> None:
        for k, losses in enumerate(self.pieces):
            with probe.piece(**self.counts[k]) if self.declared else contextlib.nullcontext():
                if self.backwards is not None:
                    self.backwards(k)
                else:
                    for loss in losses:
                        loss().backward()


def plain(n: int = 3, **more: Any) -> Case:
    model = more.pop("model", None) or small_model()
    return Case(model, [[loss] for loss in piece_losses(model, [4] * n)], **more)


def uneven() -> Case:
    model = small_model(torch.float64)
    losses = [[loss] for loss in piece_losses(model, [3, 7, 5], torch.float64)]
    counts = [{"units": n, "weight": weight} for n, weight in ((3, 1.5), (7, 7.0), (5, 0.3))]
    return Case(model, losses, counts=counts, rel=1e-12)


def counts_in_tensors() -> Case:
    model = small_model()
    losses = [[loss] for loss in piece_losses(model, [4, 8])]
    return Case(model, losses, counts=[{"units": torch.tensor(n), "weight": torch.tensor(float(n))} for n in (4, 8)])


def weights_of_units(as_given: Callable[[list[float]], Any]) -> Case:
    """Kish: units that weigh differently count as fewer."""
    return plain(2, counts=[{"unit_weights": as_given([1.0, 2.0, 3.0, 10.0])}, {"unit_weights": [1.0] * 4}])


def partly_frozen() -> Case:
    model = small_model()
    model[0].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return plain(model=model)


def of_tokens(**options: Any) -> Case:
    model = Tied(**options)
    return Case(model, [[loss] for loss in token_losses(model, [4, 4])])


def unused_in_a_piece() -> Case:
    """The third loss reaches the first layer only."""
    model, x = small_model(), torch.randn(4, 12)
    first, second = piece_losses(model, [4, 4])
    return Case(model, [[first], [second], [lambda: model[0](x).square().mean()]])


class OnlyForInput(torch.autograd.Function):
    """Returns no gradient for a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * 2, None


def without_a_gradient() -> Case:
    model = small_model()
    losses = piece_losses(model, [4, 4])
    return Case(model, [[lambda p=p: OnlyForInput.apply(p(), model[0].weight)] for p in losses])  # type: ignore[misc]


def compiled() -> Case:
    torch._dynamo.reset()
    model = small_model()
    return plain(model=torch.compile(model, backend="aot_eager"))


def in_16_bits() -> Case:
    """`.grad` is added up in 8 bits, so F is H to about 2⁻⁸; squares in bf16 would be off by several %."""
    model = small_model().bfloat16()
    return Case(model, [[loss] for loss in piece_losses(model, [4, 4], torch.bfloat16)], rel=2e-2)


def checkpointed(*, reentrant: bool) -> Case:
    """Without piece(), a backward inside backward must not end the piece."""
    model, generator = small_model(), torch.Generator().manual_seed(0)

    def loss(x: Tensor, y: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        return (model[4](layer(model[2](model[1](model[0](x))))) - y).square().sum(-1).mean()

    batches = [batch(4, generator) for _ in range(3)]
    again = partial(checkpoint, model[3], use_reentrant=reentrant)
    return Case(
        model,
        [[lambda b=b: loss(*b, model[3])] for b in batches],  # type: ignore[misc]
        backwards=lambda k: loss(*batches[k], again).backward(),  # autograd.grad refuses a reentrant one
        declared=False,
    )


def penalised(declared: bool) -> Case:
    """autograd.grad calls the same hooks but adds nothing to `.grad`: only the penalised loss's gradient counts."""
    model = small_model()

    def loss(plain: Loss) -> Tensor:
        of_loss = plain()
        slopes = torch.autograd.grad(of_loss, list(model.parameters()), create_graph=True)
        return of_loss + 0.1 * sum((s.square().sum() for s in slopes), torch.zeros(()))

    losses = piece_losses(model, [4, 4, 4])
    return Case(model, [[lambda p=p: loss(p)] for p in losses], declared=declared)  # type: ignore[misc]


def with_a_graph() -> Case:
    case = plain(2)
    case.backwards = lambda k: case.pieces[k][0]().backward(create_graph=True)  # type: ignore[no-untyped-call]
    return case


def several_backwards(model: nn.Module | None = None) -> Case:
    """Cross terms count: the piece's gradient is the sum."""
    model = model or small_model()
    losses = piece_losses(model, [4] * 4) if isinstance(model, nn.Sequential) else token_losses(model, [4] * 4)
    return Case(model, [losses[:2], losses[2:]])


def several_large_backwards() -> Case:
    """tr Σ is a small difference here: fp32 norms of a whole 1.4M-element gradient would be off by 1.6e-3 of it."""
    model, generator = nn.Linear(1200, 1200), torch.Generator().manual_seed(0)
    inputs = [1 + 0.1 * torch.randn(2, 1200, generator=generator) for _ in range(4)]
    losses = [(lambda x=x: model(x).mean()) for x in inputs]  # type: ignore[misc]
    return Case(model, [losses[:2], losses[2:]], rel=4e-4)


def a_loss_in_chunks() -> Case:
    """The staging area holds the head, whose gradients alone wait, and not the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 180))
    inputs = [1 + 0.5 * torch.randn(4, 200) for _ in range(2)]

    def backwards(k: int) -> None:
        hidden = model[:2](inputs[k])
        leaf = hidden.detach().requires_grad_()
        for chunk in leaf.split(1):
            model[2](chunk).square().sum().backward()
        hidden.backward(leaf.grad)

    losses = [[lambda x=x: model(x).square().sum(), lambda: torch.zeros(())] for x in inputs]  # type: ignore[misc]
    return Case(model, losses, backwards, options={"staging_mib": 1.1 * 201 * 180 * 4 / 2**20})


def one_fails(declared: bool) -> Case:
    """Out of memory is caught, and the window is tried again."""
    case = plain(declared=declared)
    model, failed = case.model, []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            raise MemoryError("pretend")

    run = case.run

    def fails_first(probe: Any) -> None:
        if not failed:
            failed.append(True)
            with pytest.raises(MemoryError), probe.piece(units=4) if declared else contextlib.nullcontext():
                model[4](Fails.apply(model[3](torch.randn(4, 160)))).square().mean().backward()  # type: ignore[index]
            model.zero_grad()
        run(probe)

    case.run = fails_first  # type: ignore[method-assign]
    return case


CASES: dict[str, Callable[[], Case]] = {
    "equal pieces": plain,
    "uneven pieces with weights, in float64": uneven,
    "counts in tensors": counts_in_tensors,
    "weights of units": lambda: weights_of_units(list),
    "weights of units in tensors": lambda: weights_of_units(torch.tensor),
    "each backward a piece": lambda: plain(declared=False),
    "partly frozen": partly_frozen,
    "tied weights": of_tokens,
    "sparse gradients": lambda: of_tokens(sparse=True, tie=False),
    "unused in a piece": unused_in_a_piece,
    "no gradient of a parameter": without_a_gradient,
    "16 bits": in_16_bits,
    "checkpointed": lambda: checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: checkpointed(reentrant=True),
    "a gradient penalty": lambda: penalised(True),
    "a gradient penalty, pieces not declared": lambda: penalised(False),
    "with a graph": with_a_graph,
    "several backwards": several_backwards,
    "several backwards of sparse gradients": lambda: several_backwards(Tied(sparse=True, tie=False)),
    "several backwards of large gradients": several_large_backwards,
    "a loss in chunks": a_loss_in_chunks,
    "a backward that fails": lambda: one_fails(True),
    "a backward that fails, pieces not declared": lambda: one_fails(False),
    "compiled": compiled,
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # torch says so once a process
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # torch.compile says so there
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("compiled", marks=pytest.mark.shows("noise scale", "torch.compile")),
        *(name for name in CASES if name != "compiled"),
    ],
)
def test_a_window_is_as_by_hand(name: str) -> None:
    """Where pieces have several backwards, the first window shows that and is dropped."""
    case = CASES[name]()
    has_several = len(case.pieces[0]) > 1
    options = case.options | ({} if case.declared else {"units_per_piece": 4})
    with attached(case.model, **options) as probe:
        for _ in range(1 + has_several):
            case.run(probe)
            probe.step()
            case.model.zero_grad()
        reading = probe.reading()
        groups = {name.split(".")[0] for name, p in case.model.named_parameters() if p.requires_grad}
    assert ["several backwards" in reason for reason in reading.dropped] == [True] * has_several
    gradients = [flat_grad(case.model, sum(loss() for loss in losses)) for losses in case.pieces]  # type: ignore[arg-type]
    n = len(gradients)
    weights = [float(each.get("weight", 1.0)) for each in case.counts[:n]]
    of_units = [each.get("unit_weights", [1.0] * int(each.get("units", 0))) for each in case.counts[:n]]
    units = [float(sum(of_piece) ** 2 / sum(w**2 for w in of_piece)) for of_piece in of_units]
    expected = window_by_hand(gradients, weights, units, torch.stack(gradients).sum(0))
    assert_same(reading, expected, rel=case.rel)
    assert reading.units_per_window == sum(map(len, of_units))
    effective = sum(weights) ** 2 / sum(w**2 / b for w, b in zip(weights, units, strict=True))
    assert reading.effective_units == pytest.approx(effective)
    if name == "compiled":  # groups are named as in the model inside
        groups = {"0", "2", "3", "4"}
    if isinstance(case.model, nn.Sequential) or name == "compiled":
        assert set(reading.groups) == groups
        total = sum(g.trace_cov or 0.0 for g in reading.groups.values())
        assert total == pytest.approx(expected[0], rel=case.rel)


def test_several_backwards_beyond_the_staging_area_are_refused() -> None:
    case = several_backwards()
    with attached(case.model, staging_mib=0.01) as probe:
        for _ in range(3):
            case.run(probe)
            probe.step()
            case.model.zero_grad()
        reading = probe.reading()
    assert (reading.windows, sum(reading.dropped.values())) == (0, 3)
    assert "add the losses and call backward once, or raise staging_mib" in reading.reason


def test_backward_inside_backward_is_refused_and_the_message_says_what_to_do() -> None:
    model = small_model().requires_grad_(False)
    model[3].requires_grad_(True)
    x, y = batch(4, torch.Generator().manual_seed(0))
    x.requires_grad_(True)

    def backward() -> None:
        hidden = checkpoint(model[3], model[2](model[1](model[0](x))), use_reentrant=True)
        (model[4](hidden) - y).square().sum(-1).mean().backward()

    with attached(model, units_per_piece=4) as probe:
        for declared in (False, True):
            for _ in range(2):
                with probe.piece() if declared else contextlib.nullcontext():
                    backward()
            probe.step()
            reading = probe.reading()
            assert reading.windows == declared
            assert declared or "wrap each micro-batch in 'with probe.piece():'" in reading.reason
            model.zero_grad()


@pytest.mark.parametrize(("n_pieces", "windows"), [(192, 2), (3000, 0)])
def test_many_sixteen_bit_gradients_count_until_their_sum_stops_growing(n_pieces: int, windows: int) -> None:
    """Rounding grows as the root of the pieces. Beyond some thousand pieces, bf16 sums stop growing: that is named."""
    model = nn.Linear(12, 3).bfloat16()
    batches = [batch(4, torch.Generator().manual_seed(k), torch.bfloat16) for k in range(50)]
    with attached(model, units_per_piece=4) as probe:
        for _ in range(max(windows, 1)):
            for k in range(n_pieces):
                mean_loss(model, *batches[k % 50]).backward()
            probe.step()
            model.zero_grad()
        reading = probe.reading()
    assert reading.windows == windows, reading.dropped
    assert windows or "16-bit gradients lost small parts" in reading.reason

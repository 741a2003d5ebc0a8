"""Without fp64, sums are kept as pairs of fp32: B_simple is fp64's even where tr Σ is a millionth of |G|².

The CPU is told to keep its sums in pairs, by the switch that exists for such comparisons. Everything else is as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import sonde
from sonde.batch_size.stats.noise_scale import PieceSums, estimate_window
from sonde.batch_size.taps.squared_norms import add_squares
from sonde.batch_size.taps.tap import GradientSummary, Problem
from sonde.batch_size.taps.window_sums import WindowSums, piece_counts, read_row
from sonde.parallel.devices import KEPT_IN_PAIRS, start_copy_to_host
from sonde.parallel.float_pairs import FloatPairs
from tests.batch_size.loops import attached, batch, mean_loss, small_model
from tests.pretend_device import sonde_functions
from tests.ranks import Ranks, mesh_of

CPU = torch.device("cpu")


ON_THE_HOST = ("parallel/float_pairs.py:joined", "parallel/float_pairs.py:_rest")
"""Functions of sonde whose fp64 numbers are on the host, whatever the device."""


class NoConversionToFloat64(TorchDispatchMode):
    """Refuses what a device without fp64 refuses: that sonde converts a gradient or a sum of it to fp64."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, FloatPairs) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        converts = kwargs.get("dtype") == torch.float64 and args and isinstance(args[0], Tensor)
        if converts and args[0].dtype != torch.float64 and (where := sonde_functions()) and where[0] not in ON_THE_HOST:
            raise TypeError(f"a device without fp64 cannot convert to it: {function} in {where[0]}")
        return function(*args, **kwargs)


@contextlib.contextmanager
def in_pairs(*, on: bool = True) -> Iterator[None]:
    """The CPU keeps sums as a device without fp64 would, and refuses to convert to fp64 as such a device does."""
    if not on:
        yield
        return
    try:
        KEPT_IN_PAIRS.add("cpu")
        with NoConversionToFloat64():
            yield
    finally:
        KEPT_IN_PAIRS.discard("cpu")


N_PARAMETERS, N_WINDOWS, WEIGHTS = 10_000, 12, (1.0, 3.7, 2.2, 0.9)


def windows() -> Iterator[tuple[list[Tensor], Tensor]]:
    """Norms of each parameter's gradient in each piece, and in the whole window; fp32, [10 000].

    Parameters differ in size by 1e4. The pieces' noise is a thousandth of the gradient.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** (4.0 * torch.rand(N_PARAMETERS, 1, generator=generator) - 3.0)
    truth = sizes * torch.randn(N_PARAMETERS, 4, generator=generator)
    for _ in range(N_WINDOWS):
        pieces = [w * truth * (1 + 1e-3 * torch.randn(truth.shape, generator=generator)) for w in WEIGHTS]
        total = torch.stack(pieces).double().sum(0).float()
        yield [piece.norm(dim=1) for piece in pieces], total.norm(dim=1)


def averaged(estimates: Sequence[tuple[float, float]]) -> float:
    trace_cov, grad_sq = (sum(column) for column in zip(*estimates, strict=True))
    return trace_cov / grad_sq


def b_simple_of_sums() -> float:
    """tr Σ over |G|², each averaged over the windows, by the probe's own sums."""
    owners, estimates = tuple(range(N_PARAMETERS)), []
    sums = WindowSums([i % 3 for i in owners], n_groups=3, n_witness=1, device=CPU)
    for pieces, whole in windows():
        for weight, of_piece in zip(WEIGHTS, pieces, strict=True):
            squares = add_squares(N_PARAMETERS, [(owners, of_piece)], CPU)
            sums.add(GradientSummary(squares, squares.new_zeros(1)), piece_counts(weight * 2, weight, None))
        big = start_copy_to_host(sums.per_group(add_squares(N_PARAMETERS, [(owners, whole)], CPU))).values
        row = read_row(start_copy_to_host(sums.pack([0] * len(Problem))).values, big, torch.zeros(1).double(), {})
        of_pieces = PieceSums(
            sq_norm_over_weight=sum(row.sq_norm_over_weight),
            weight=row.weight,
            weight_over_units=row.weight_over_units,
            sq_weight_over_units=row.sq_weight_over_units,
            n_pieces=row.n_pieces,
        )
        window = estimate_window(of_pieces, sum(row.sq_norm_big))
        estimates.append((window.trace_cov, window.grad_sq))
    return averaged(estimates)


def b_simple_in_plain_fp32() -> float:
    """The same with plain fp32 sums: torch's own, which add in pairs."""
    estimates = []
    for pieces, whole in windows():
        small = torch.zeros(N_PARAMETERS)
        for weight, of_piece in zip(WEIGHTS, pieces, strict=True):
            small += of_piece.square() / weight
        weight = sum(WEIGHTS)
        u, v = sum(w / (2 * w) for w in WEIGHTS), sum(w * w / (2 * w) for w in WEIGHTS)
        of_pieces = PieceSums(float(small.sum()), weight, u, v, len(WEIGHTS))
        window = estimate_window(of_pieces, float(whole.square().sum()))
        estimates.append((window.trace_cov, window.grad_sq))
    return averaged(estimates)


def test_cancelling_sums_of_ten_thousand_parameters_are_those_of_fp64() -> None:
    """S and B agree to six digits, so fp32 sums leave at most one digit of their difference."""
    exact = b_simple_of_sums()
    with in_pairs():
        pairs = b_simple_of_sums()
    assert 1e-7 < exact < 1e-3
    assert pairs == pytest.approx(exact, rel=1e-6)
    assert abs(b_simple_in_plain_fp32() / exact - 1) > 1e-3


class Sizes(nn.Module):
    """Parameters of different sizes whose gradients are the input's columns, times their size."""

    def __init__(self, n: int = 30) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(3 + i % 5) for i in range(n)])
        self.widths = [p.numel() for p in self.parts]

    def forward(self, rows: Tensor) -> Tensor:
        per_row: Tensor = sum(  # type: ignore[assignment]
            10.0 ** (-(i % 5)) * (x @ p)
            for i, (x, p) in enumerate(zip(rows.split(self.widths, 1), self.parts, strict=True))
        )
        return per_row


def rows_of(model: Sizes, n: int, generator: torch.Generator) -> Tensor:
    """One direction for all rows, and a hundredth of it as noise; [n, elements]."""
    direction = torch.linspace(-1.0, 2.0, sum(model.widths))
    return direction + 1e-2 * torch.randn(n, sum(model.widths), generator=generator)


def trained(how: str, *, rank: int = 0, n_windows: int = 6) -> dict[str, Any]:
    """A reading and norms of one run; `how` names the set-up."""
    torch.manual_seed(0)
    plain = Sizes()
    model: nn.Module = DistributedDataParallel(plain, bucket_cap_mb=0.001) if how.startswith("ddp") else plain
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11 / 3) if how == "scaled" else None
    generator = torch.Generator().manual_seed(1 + rank)
    tap = {"ddp leaf": "leaf", "ddp buckets": "comm_hook"}.get(how, "auto")
    found: list[float] = []
    with attached(model, optimizer, groups=str, grad_scaler=scaler, tap=tap) as probe:
        for _ in range(n_windows):
            for i, n in enumerate((2, 3, 4, 2 + rank)):
                is_last = i == 3
                sync = contextlib.nullcontext() if is_last or not how.startswith("ddp") else model.no_sync()  # type: ignore[operator]
                weight = torch.tensor(float(n)) if how == "tensors" else float(n)
                with probe.piece(units=weight, weight=weight), sync:
                    loss = model(rows_of(plain, n, generator)).sum()
                    (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
            if how in ("clipped", "ddp leaf", "ddp buckets"):
                found.append(probe.clip_grad_norm_(1.0).item())
            else:
                probe.step()
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            optimizer.zero_grad()
        reading = probe.reading()
        assert not probe.alerts
    return {
        "b_simple": reading.b_simple,
        "low": reading.low,
        "high": reading.high,
        "windows": reading.windows,
        "reason": reading.reason,
        "norms": found,
    } | {
        "groups": [(g.trace_cov, g.grad_sq) for g in reading.groups.values()],
        "weights": torch.cat([p.detach() for p in model.parameters()]),
    }


def compare(exact: dict[str, Any], pairs: dict[str, Any]) -> None:
    assert (pairs["windows"], pairs["reason"]) == (exact["windows"], exact["reason"])
    assert exact["windows"] == 6
    for name in ("b_simple", "low", "high"):  # None, where they are not known
        assert pairs[name] == (None if exact[name] is None else pytest.approx(exact[name], rel=1e-5)), name
    for got, expected in zip(pairs["groups"], exact["groups"], strict=True):
        assert got == pytest.approx(expected, rel=1e-5)
    assert pairs["norms"] == pytest.approx(exact["norms"], rel=1e-7)
    assert torch.allclose(pairs["weights"], exact["weights"], rtol=1e-6)


@pytest.mark.parametrize("how", ["plain", "tensors", "scaled", "clipped"])
def test_a_run_reads_the_same_noise_scale(how: str) -> None:
    exact = trained(how)
    with in_pairs():
        compare(exact, trained(how))


def both_on_rank(how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    exact = trained(how, rank=dist.get_rank())
    with in_pairs():
        return exact, trained(how, rank=dist.get_rank())


@pytest.mark.parametrize(("how", "world"), [("ddp leaf", 3), ("ddp buckets", 2), ("ddp auto", 3)])
def test_ranks_read_the_same_noise_scale(how: str, world: int, request: Any) -> None:
    """One collective sums both halves; every rank gets the same numbers."""
    ranks: Ranks = request.getfixturevalue(f"ranks{world}")
    results = ranks(both_on_rank, how)
    for exact, pairs in results:
        compare(exact, pairs)
        assert pairs["norms"] == results[0][1]["norms"]


def _on_shards(clips: bool) -> Any:
    """FSDP2: B_simple with fp64 and with pairs; or the message of a clip with pairs."""
    readings = []
    for on in (False, True):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)), mesh=mesh_of((2,)))
        generator = torch.Generator().manual_seed(dist.get_rank())
        with in_pairs(on=on), attached(model) as probe:
            for _ in range(4):
                for n in (2, 3):
                    with probe.piece(units=n, weight=n):
                        model(torch.randn(n, 6, generator=generator)).square().sum().backward()
                if on and clips:
                    try:
                        probe.clip_grad_norm_(1.0)
                    except ValueError as error:
                        return str(error)
                else:
                    probe.step()
                model.zero_grad()
            readings.append((probe.reading().trace_cov, probe.reading().grad_sq))
            assert not probe.alerts
    return readings


def test_shards_are_summed_in_pairs_too(ranks2: Ranks) -> None:
    for exact, pairs in ranks2(_on_shards, False):
        assert pairs == pytest.approx(exact, rel=1e-6)


def test_a_norm_over_ranks_without_fp64_is_refused(ranks2: Ranks) -> None:
    """The ranks are compared by whole numbers that pairs cannot add exactly: a false alarm would stop a run."""
    for message in ranks2(_on_shards, True):
        assert "a norm over several ranks needs fp64, which cpu has not: clip by torch.nn.utils" in message


def test_the_switch_reaches_the_sums() -> None:
    """Otherwise the tests above compare fp64 with itself."""
    with in_pairs():
        model = Sizes()
        with attached(model, units_per_piece=2) as probe:
            model(rows_of(model, 2, torch.Generator())).sum().backward()
            window, _ = probe._reader.end_window(reads_grad=False)
    assert isinstance(window.packed, FloatPairs)
    assert isinstance(window.sq_norm_big, FloatPairs)
    assert isinstance(window.witness_final, FloatPairs)


def test_a_clip_alone_is_that_of_fp64() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 700, 100_000)]
    for p, size in zip(parameters, (1e-12, 1.0, 1e3), strict=True):
        p.grad = size * torch.randn(p.shape)
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    for order in (1.0, 2.0, 3.0, 8.0, float("inf")):
        norm_exact = sonde.clip_grad_norm_(parameters, 1.0, order)
        exact = [p.grad.clone() for p in parameters if p.grad is not None]
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g.clone()
        with in_pairs():
            assert sonde.clip_grad_norm_(parameters, 1.0, order).item() == pytest.approx(norm_exact.item(), rel=1e-6)
        for p, e, g in zip(parameters, exact, gradients, strict=True):
            torch.testing.assert_close(p.grad, e, rtol=1e-6, atol=0.0)
            p.grad = g.clone()


@pytest.mark.parametrize("options", [{"per_example": "always"}, {"metric": ("euclidean", "sign")}])
def test_what_reads_gradients_besides_pieces_works_without_fp64(options: dict[str, Any]) -> None:
    """With a loss scale, whose division makes pairs of everything."""

    def run() -> tuple[float | None, float | None]:
        model = small_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        with attached(model, grad_scaler=scaler, **options) as probe:
            for k in range(2):
                x, y = batch(6, torch.Generator().manual_seed(k))
                with probe.piece(units=6):
                    scaler.scale(mean_loss(model, x, y)).backward()
            probe.step()
            reading = probe.reading()
            assert reading.windows == 1, reading.dropped
        return reading.trace_cov, reading.grad_sq

    expected = run()
    with in_pairs():
        found = run()
    assert found == pytest.approx(expected, rel=1e-6)

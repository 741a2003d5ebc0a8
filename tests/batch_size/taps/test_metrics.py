"""Adam's, sign and spectral norms beside plain ones: each gives the numbers of its definition; and squared norms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sonde
from sonde.batch_size.taps.metric import (
    AdamMetric,
    SignMetric,
    add_parts,
    norm_parts,
    norms_of_rows,
    nuclear_norm,
    nuclear_norm_by_iteration,
)
from tests.batch_size import norms_by_hand as by_hand
from tests.batch_size.loops import Recording, attached, mean_loss, piece_losses, small_model, train

ALL = ("euclidean", "adam", "sign", "spectral")
UNITS = [4, 6, 3]


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize("sums", ["waiting", "in .grad"])
def test_several_backwards_of_one_piece_are_one_gradient(sums: str) -> None:
    """The second backward's gradient is added to the first before any norm is taken."""
    torch.manual_seed(0)
    model = nn.Linear(80, 70) if sums == "in .grad" else nn.Linear(12, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(3, 2, 4, model.in_features), torch.randn(3, 2, 4, model.out_features)
    with attached(model, optimizer, metric=ALL) as probe:
        for _ in range(3):  # moments come with the first step; the second may lose a window to learn of the backwards
            pieces = [
                _gradients(model, sum(mean_loss(model, x[k, b], y[k, b]) for b in range(n)))  # type: ignore[arg-type]
                for k, n in ((0, 2), (1, 1), (2, 1))
            ]
            named = dict(model.named_parameters())
            weights = by_hand.adam_weights(optimizer, named) if optimizer.state else {}
            for k, n in ((0, 2), (1, 1), (2, 1)):
                with probe.piece(units=4):
                    for b in range(n):
                        mean_loss(model, x[k, b], y[k, b]).backward()
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
        squares = {"adam": by_hand.adam(weights)} | {n: getattr(by_hand, n) for n in ("euclidean", "sign", "spectral")}
        for name in ALL:
            exact = by_hand.window(pieces, [1.0] * 3, [4] * 3, squares[name])
            window = probe.window(name)
            assert window is not None
            assert (window.total.trace_cov, window.total.grad_sq) == pytest.approx(exact, rel=1e-5, abs=1e-5 * exact[0])


def test_the_first_metric_reads_as_alone_and_a_missing_moment_drops_adam_alone() -> None:
    alone = _readings("euclidean")["euclidean"]
    together = _readings(ALL)
    assert together["euclidean"] == alone
    assert (alone.windows, together["sign"].windows, together["adam"].windows) == (6, 6, 5)
    assert "exists only after its first step" in next(iter(together["adam"].dropped))


def _readings(metric: Any) -> dict[str, sonde.NoiseScaleReading]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with attached(model, optimizer, metric=metric) as probe:
        train(model, probe, optimizer, windows=6)
        assert probe.alerts == {}
        return {name: probe.reading(name) for name in ([metric] if isinstance(metric, str) else metric)}


def test_an_element_without_any_gradient_yet_has_no_weight() -> None:
    """P would be 1/ε there: one new row of an embedding would outweigh the model."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(6, 4))
    model.add_module("head", nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with attached(model, optimizer, metric=("euclidean", "adam")) as probe:
        for tokens in ([[0, 1], [1, 2]], [[0, 5], [5, 2]]):  # 5 is new in the second window
            named = dict(model.named_parameters())
            weights = by_hand.adam_weights(optimizer, named) if optimizer.state else {}
            losses = [lambda ids=ids: model(torch.tensor(ids)).square().sum() for ids in tokens]
            pieces = [_gradients(model, loss()) for loss in losses]  # type: ignore[no-untyped-call]
            for loss in losses:
                with probe.piece(units=2):
                    loss().backward()  # type: ignore[no-untyped-call]
            probe.step()
            optimizer.step()
            optimizer.zero_grad()
        window = probe.window("adam")
    exact = by_hand.window(pieces, [1.0, 1.0], [2, 2], by_hand.adam(weights))
    assert window is not None
    assert (window.total.trace_cov, window.total.grad_sq) == pytest.approx(exact, rel=1e-5, abs=1e-5 * exact[0])
    assert exact[0] < 1e3


def test_the_log_has_every_metric() -> None:
    sink = Recording()
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = sonde.RunLog(sink, every=10, log_windows=True)
    with attached(model, optimizer, metric=ALL, log=log) as probe:
        train(model, probe, optimizer, windows=20)
        readings = {name: probe.reading(name) for name in ALL}
        assert "gns/sign/b_simple" not in probe.metrics()
    header, last = sink.of_kind("header")[0], sink.of_kind("reading")[-1]["metrics"]
    assert header["setup"]["metric"] == "euclidean, adam, sign, spectral"
    assert header["metrics"]["gns/adam/b_simple"]["unit"] == "rows"
    assert header["sections"][0]["metrics"] == ("gns/adam/b_simple", "gns/sign/b_simple", "gns/spectral/b_simple")
    window = sink.of_kind("window")[-1]["metrics"]
    assert last["gns/b_simple_low"] == pytest.approx(readings["euclidean"].low)
    for name in ALL[1:]:
        reading = readings[name]
        finite = [None if x is None or math.isinf(x) else x for x in (reading.low, reading.high)]
        assert [last[f"gns/{name}/b_simple_{end}"] for end in ("low", "high")] == pytest.approx(finite)
        assert last[f"gns/{name}/trace_cov"] == pytest.approx(reading.trace_cov)
        assert window[f"gns/{name}/trace_cov"] > 0


def test_a_restart_goes_on_in_every_metric() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = ("sign", "adam")
    with attached(model, optimizer, metric=names) as probe:
        train(model, probe, optimizer, windows=8)
        state = probe.state_dict()
        readings = [probe.reading(name) for name in names]
    with attached(model, optimizer, metric=names) as again:
        again.load_state_dict(state)
        assert [str(again.reading(name)) for name in names] == [str(reading) for reading in readings]
    with attached(model, optimizer, metric="adam") as other, pytest.raises(ValueError, match="has metric 'adam'"):
        other.load_state_dict(state)


def test_refusals() -> None:
    model, embedding = small_model(), nn.Embedding(4, 3)
    with attached(model) as probe, pytest.raises(ValueError, match="one that this probe measures, 'euclidean', got"):
        probe.reading("sign")
    with pytest.raises(ValueError, match="other than embeddings, got a model without"):
        attached(embedding, metric="spectral")


@pytest.mark.parametrize("n_given", [1, 2])
def test_muons_own_matrices_are_measured(n_given: int) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model = small_model()
    muon = torch.optim.Muon([model[3].weight], lr=1e-3)
    rest = torch.optim.AdamW([p for p in model.parameters() if p is not model[3].weight], lr=1e-3)
    losses = piece_losses(model, UNITS)
    pieces = [{"3.weight": _gradients(model, loss())["3.weight"]} for loss in losses]
    with pytest.raises(ValueError, match="optimizer of Adam's kind that holds every trainable parameter, got AdamW"):
        attached(model, [rest, muon], metric="adam")
    with attached(model, [rest, muon][-n_given:], metric="spectral") as probe:
        for loss, n in zip(losses, UNITS, strict=True):
            with probe.piece(units=n):
                loss().backward()
        probe.step()
        window = probe.window()
    exact = by_hand.window(pieces, [1.0] * 3, UNITS, by_hand.spectral)
    assert window is not None
    assert (window.total.trace_cov, window.total.grad_sq) == pytest.approx(exact, rel=1e-5, abs=1e-5 * exact[0])


@pytest.mark.parametrize("shape", [(3, 200), (200, 3), (40, 40), (70, 300), (1, 5)], ids=str)
@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_nuclear_norms(shape: tuple[int, int], spread: float) -> None:
    """By LAPACK and by iterations, of matrices with alike singular values and with values down to 1e-6 of the first."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values * torch.logspace(0, -spread, len(values), dtype=torch.float64)
    matrix = u @ torch.diag(values) @ v
    exact = float(values.sum())
    assert float(nuclear_norm(matrix)) == pytest.approx(exact, rel=1e-7)
    gram = matrix @ matrix.t() if shape[0] <= shape[1] else matrix.t() @ matrix
    s = float(gram.square().sum() ** 0.25)
    assert exact - 8.2e-5 * s * len(values) - 1e-9 < float(nuclear_norm_by_iteration(gram)) < exact * (1 + 1e-9)
    assert float(nuclear_norm_by_iteration(gram)) == pytest.approx(exact, rel=1e-5 if not spread else 1e-3)
    in_fp32 = nuclear_norm_by_iteration(gram.float())
    assert float(in_fp32) == pytest.approx(exact, rel=1e-4 if not spread else 2e-2)
    assert math.isnan(float(nuclear_norm(matrix * math.inf)))


def absolute_sum(grad: Tensor) -> Tensor:
    return add_parts(1, SignMetric().parts([0], [grad]), torch.device("cpu"), squares=False)


def test_sums_of_absolute_values() -> None:
    """In rows, so that fp32 keeps 7 digits of 20 million numbers; of every layout."""
    many = torch.rand(20_000_001, generator=torch.Generator().manual_seed(0))
    assert float(absolute_sum(many)) == pytest.approx(float(many.sum(dtype=torch.float64)), rel=1e-7)
    indices, values = torch.tensor([[1, 1, 2]]), torch.tensor([1.0, -3.0, 4.0])
    sparse = torch.sparse_coo_tensor(indices, values, (5,), check_invariants=True)
    assert float(absolute_sum(sparse)) == 6.0
    assert float(absolute_sum(torch.tensor([-1.0, 2.0], dtype=torch.bfloat16))) == 3.0
    assert float(absolute_sum(torch.empty(0, 3))) == 0.0


# Adam's metric.


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


def test_sums_are_kept_in_a_dtype_that_the_device_has() -> None:
    """Apple's GPUs have no float64. Fake tensors know a device's dtypes without having the device."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        parameter = nn.Parameter(torch.empty(6, device="mps"))
        optimizer = torch.optim.AdamW([parameter])
        metric, gradient = AdamMetric(optimizer, [parameter]), torch.empty(6, device="mps")
        assert metric.parts([0], [gradient])[0][1].dtype == torch.float32  # before a second moment
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg_sq": torch.empty(6, device="mps")}
        got = metric.parts([0], [gradient])[0][1]
        assert (got.dtype, got.device.type) == (torch.float32, "mps")


def test_the_norm_of_a_whole_gradient_is_that_of_its_ranges() -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 17)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300)).square().sum().backward()
    optimizer.step()
    metric, grad = AdamMetric(optimizer, list(model.parameters())), torch.randn(17, 300)
    of_ranges = [
        part for a, b in [(0, 7), (7, 2000), (2000, 5100)] for part in metric.parts([0], [grad.flatten()[a:b]], a)
    ]
    whole, cut = (add_parts(1, parts, torch.device("cpu")) for parts in (metric.parts([0], [grad]), of_ranges))
    assert float(cut) == pytest.approx(float(whole), rel=1e-12)


def test_a_gradient_without_a_second_moment_has_no_norm_unless_it_is_zero() -> None:
    model = nn.Linear(3, 2)
    metric = AdamMetric(torch.optim.AdamW(model.parameters()), list(model.parameters()))
    for start, shape in ((0, (6,)), (None, (2, 3))):
        assert float(metric.parts([0], [torch.zeros(shape)], start)[0][1]) == 0.0
        assert math.isnan(metric.parts([0], [torch.ones(shape)], start)[0][1])


# Squared norms.


def sq_norm(grad: Tensor) -> float:
    return float(sq_norms([grad])[0])


def sq_norms(grads: list[Tensor]) -> Tensor:
    return add_parts(len(grads), norm_parts(range(len(grads)), grads, 2), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7, 3), (8191,), (8192,), (33, 1000), (3, 5, 7, 200)], ids=str)
def test_norm_is_exact_to_fp32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grad = torch.randn(shape, dtype=torch.float64).to(dtype)
    expected = float(grad.double().norm())
    # 8191 elements added in fp32 lanes are off by a few 1e-7; fp64 gradients are not rounded to fp32.
    rel = 1e-14 if dtype == torch.float64 else 2e-6
    assert sq_norm(grad) == pytest.approx(expected**2, rel=2 * rel)
    assert float(norms_of_rows(grad).double().square().sum()) == pytest.approx(expected**2, rel=2 * rel)


def test_a_large_norm_is_exact() -> None:
    """torch's flat fp32 sum is off by about 8e-4 here."""
    grad = torch.randn(4096, 4096)
    expected = float(grad.double().norm())
    assert sq_norm(grad) == pytest.approx(expected**2, rel=2e-7)
    assert abs(float(torch.linalg.vector_norm(grad)) / expected - 1) > 1e-5  # if this fails, torch has mended it


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "sliced", "expanded"])
def test_any_memory_layout(layout: str) -> None:
    grad = {
        "transposed": lambda: torch.randn(200, 301).t(),
        "channels_last": lambda: torch.randn(4, 8, 32, 33).to(memory_format=torch.channels_last),
        "sliced": lambda: torch.randn(200, 301)[::2, 1:],
        "expanded": lambda: torch.randn(1, 100).expand(300, 100),
    }[layout]()
    assert sq_norm(grad) == pytest.approx(float(grad.double().norm()) ** 2, rel=2e-6)


def test_sparse_duplicates_add_up_before_they_are_squared() -> None:
    grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 3]]), torch.ones(3, 2), (5, 2), check_invariants=True)
    assert sq_norm(grad) == pytest.approx(float(grad.to_dense().norm()) ** 2)
    assert sq_norm(grad) == pytest.approx(10)


def test_non_finite_is_not_lost() -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        for n in (10, 10_000):
            grad = torch.ones(n)
            grad[-1] = bad
            assert not math.isfinite(sq_norm(grad))


def test_norms_of_mixed_gradients_keep_their_order() -> None:
    grads = [torch.ones(3), torch.ones(20_000), torch.ones(5, dtype=torch.float64), torch.ones(0)]
    assert [float(n) for n in sq_norms(grads)] == pytest.approx([3, 20_000, 5, 0])
    assert sq_norms([]).tolist() == []


def test_squares_are_added_by_owner() -> None:
    parts = [
        ((2,), torch.tensor([[1.0, 2.0], [3.0, 0.0]])),
        ((0, 4), torch.tensor([5.0, 6.0])),
        ((2,), torch.tensor(1.0)),
    ]
    assert add_parts(5, parts, torch.device("cpu")).tolist() == [25.0, 0.0, 15.0, 0.0, 36.0]
    assert add_parts(2, [], torch.device("cpu")).tolist() == [0.0, 0.0]

"""One row for every source, metric and cut: each window is held against the definitions, term by term in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size import norms_by_hand
from tests.batch_size.cut_models import last_window, whole_parameters
from tests.batch_size.norms_by_hand import Gradient, Square
from tests.ranks import Ranks

UNITS, WEIGHTS = (4, 5, 6), (1.0, 1.5, 2.0)
"""Of the pieces of a window, on each rank."""
GROUPS = {"all": ("0", "2"), "0": ("0",), "2": ("2",)}
"""The layers of the whole model, and of each group."""


@dataclass(frozen=True)
class Case:
    """One way to measure.

    Attributes:
        model: how it is wrapped or cut.
        source: what fills the row.
        metrics: that are measured together; the first is the headline.
        clips: "torch" clips before the window ends, "sonde" ends it by a clip.
    """

    model: str
    source: str = "pieces"
    metrics: tuple[str, ...] = ("euclidean", "adam", "sign", "spectral")
    clips: str = ""

    def __str__(self) -> str:
        return ", ".join([self.model, self.source, "+".join(self.metrics), self.clips]).removesuffix(", ")


CUT = ("euclidean", "sign")
CASES = [
    *(Case("plain", clips=clips) for clips in ("", "torch", "sonde")),
    Case("plain", metrics=("sign", "adam")),
    *(Case("plain", "examples", ("euclidean",), clips) for clips in ("", "torch", "sonde")),
]
ON_RANKS = [
    *(Case("DDP", clips=clips) for clips in ("", "torch", "sonde")),
    *(Case("DDP", "buckets", clips=clips) for clips in ("", "torch", "sonde")),
    *(Case("FSDP2", metrics=CUT, clips=clips) for clips in ("", "torch", "sonde")),
    *(Case("FSDP2", "examples", ("euclidean",), clips) for clips in ("", "torch", "sonde")),
]


def train(case: Case) -> list[tuple[Any, Any]]:
    """Each window as the probe solved it, and by hand: (tr Σ, |G|²) of the total and of each group, by metric."""
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model: nn.Module = plain
    if case.model == "DDP":
        model = DistributedDataParallel(plain)
    elif case.model == "FSDP2":
        fully_shard(plain, mesh=init_device_mesh("cpu", (n_ranks,)))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    options: dict[str, Any] = {"per_example": "always"} if case.source == "examples" else {}
    if case.source == "buckets":
        options = {"tap": "comm_hook"}
    found = []
    names = dict(plain.named_parameters())
    rank = dist.get_rank() if dist.is_initialized() else 0
    n_pieces = 1 if case.source == "examples" and n_ranks == 1 else len(UNITS)
    with sonde.attach(
        model, optimizer, unit="rows", metric=case.metrics, every=1, groups="blocks", verbose=False, **options
    ) as probe:
        for window in range(4):
            weights, moments = whole_parameters(plain), {}
            if "adam" in case.metrics and window:  # before its first step, Adam has no second moment
                moments = norms_by_hand.adam_weights(optimizer, names)
            for k in range(n_pieces):
                x, y = batch(rank, window, k)
                # DDP's buckets show a rank's gradient once it is reduced, which must be in the last backward alone.
                reduces = case.source != "buckets" or k == n_pieces - 1
                unreduced = contextlib.nullcontext() if reduces else model.no_sync()  # type: ignore[operator]
                with unreduced, probe.piece(units=len(x), weight=WEIGHTS[k]):
                    (WEIGHTS[k] * (model(x) - y).square().mean()).backward()
            if case.clips == "torch":
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            if case.clips == "sonde":
                probe.clip_grad_norm_(0.05)
            else:
                probe.step()
            optimizer.step()
            optimizer.zero_grad()
            if window or "adam" not in case.metrics:
                of_probe = {name: last_window(probe, name) for name in case.metrics}
                found.append((of_probe, by_hand(case, weights, moments, window, n_pieces, n_ranks)))
    return found


def batch(rank: int, window: int, piece: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * window + 10 * piece + rank)
    n = UNITS[piece]
    return (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (8, 4))  # type: ignore[return-value]


def by_hand(
    case: Case, weights: dict[str, Tensor], moments: Gradient, window: int, n_pieces: int, n_ranks: int
) -> dict[str, list[tuple[float, float]]]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model.load_state_dict(weights)
    pieces: list[Gradient] = []
    of_pieces: list[float] = []
    units: list[float] = []
    for rank in range(n_ranks):
        own, own_weights, own_units = [], [], []
        for k in range(n_pieces):
            x, y = batch(rank, window, k)
            rows = range(len(x)) if case.source == "examples" else [slice(None)]
            for row in rows:
                # A piece's loss is a mean: each example has its part of the piece's weight.
                weight = WEIGHTS[k] / len(rows)
                own.append(gradient(model, weight * (model(x[row]) - y[row]).square().mean()))
                own_weights.append(weight)
                own_units.append(len(x) / len(rows))
        if case.source == "buckets":  # a rank's window is one piece
            own = [{name: sum(h[name] for h in own) for name in own[0]}]  # type: ignore[misc]
            total = sum(own_weights)
            own_units = [total**2 / sum(w * w / n for w, n in zip(own_weights, own_units, strict=True))]
            own_weights = [total]
        pieces, of_pieces, units = pieces + own, of_pieces + own_weights, units + own_units
    squares: dict[str, Square] = {
        "euclidean": norms_by_hand.euclidean,
        "sign": norms_by_hand.sign,
        "spectral": norms_by_hand.spectral,
        "adam": norms_by_hand.adam(moments),
    }
    return {
        name: [
            norms_by_hand.window(
                [of_layers(h, layers) for h in pieces], of_pieces, units, squares[name], scale=1 / n_ranks
            )
            for layers in GROUPS.values()
        ]
        for name in case.metrics
    }


def gradient(model: nn.Module, loss: Tensor) -> Gradient:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def of_layers(h: Gradient, layers: Sequence[str]) -> Gradient:
    return {name: g for name, g in h.items() if name.split(".")[0] in layers}


def assert_same(found: list[tuple[Any, Any]], n_windows: int) -> None:
    """In float64, so that the tolerance holds on every processor; |G|² is a small difference of squares."""
    assert len(found) == n_windows
    for of_probe, exact in found:
        assert of_probe.keys() == exact.keys()
        for metric, values in exact.items():
            # Singular values are roots of eigenvalues: those that are 0 keep half of the digits.
            rel = 1e-7 if metric == "spectral" else 1e-9
            for (trace_cov, grad_sq), (exact_trace_cov, exact_grad_sq) in zip(of_probe[metric], values, strict=True):
                assert trace_cov == pytest.approx(exact_trace_cov, rel=rel)
                assert grad_sq == pytest.approx(exact_grad_sq, rel=rel, abs=rel * exact_trace_cov)


def n_known(case: Case) -> int:
    return 3 if "adam" in case.metrics else 4


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        pytest.param(Case("plain", metrics=("adam",)), marks=pytest.mark.shows("adam metric", "one process")),
        pytest.param(Case("plain", metrics=("sign",)), marks=pytest.mark.shows("sign metric", "one process")),
        pytest.param(Case("plain", metrics=("spectral",)), marks=pytest.mark.shows("spectral metric", "one process")),
    ],
    ids=str,
)
def test_a_window_is_as_by_hand(case: Case) -> None:
    assert_same(train(case), n_known(case))


@pytest.mark.parametrize("case", ON_RANKS, ids=str)
def test_a_window_of_ranks_is_as_by_hand(ranks2: Ranks, case: Case) -> None:
    for found in ranks2(train, case):
        assert_same(found, n_known(case))

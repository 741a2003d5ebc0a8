"""Every metric under every wrapper: the numbers of one process with the same pieces, and training unchanged."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.parallel.wrappers import block_of
from tests.batch_size import norms_by_hand as by_hand
from tests.batch_size.sharded_loops import (
    Loop,
    build,
    clip_alone,
    data_rank,
    loss_of,
    n_collectives,
    n_data_ranks,
    shard,
    tokens,
    whole_parameters,
)
from tests.ranks import Ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "amsgrad, one by one": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, foreach=False),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
    "two groups": lambda parameters: _in_two_groups(list(parameters)),
}


def _in_two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rest = {"params": parameters[3:], "betas": (0.8, 0.9), "eps": 1e-3}
    return torch.optim.AdamW([{"params": parameters[:3]}, rest], lr=1e-2)


@dataclass(frozen=True)
class Case:
    """A loop, and what it measures.

    Attributes:
        loop: `cut` may be "ddp" besides.
        metric: as for attach.
        optimizer: by name.
        options: further ones for attach.
        n_more: collectives that the probe adds to a window: its sum unless that rides in the clip's, and under sequence
            parallelism those that sum partial gradients.
        attach_at: window before which the probe is attached.
    """

    loop: Loop
    metric: tuple[str, ...]
    optimizer: str = "AdamW"
    options: tuple[tuple[str, Any], ...] = ()
    n_more: int = 0
    attach_at: int = 0


SIGN, SUMS, ALL = ("euclidean", "sign"), ("euclidean", "adam"), ("euclidean", "adam", "sign", "spectral")
TWO_RANKS = {
    "FSDP2": Case(Loop(clips=False, weighted=True), SIGN, n_more=1),
    "FSDP2, clipped, every piece reduces": Case(Loop(sync="every", reshard=True), SIGN, "fused"),
    "FSDP2, sign alone": Case(Loop(frozen=True), ("sign",)),
    "FSDP2, offloaded": Case(Loop(offload=True, checkpoints=True), SIGN),
    "FSDP2, attached late": Case(Loop(clips=False), SIGN, attach_at=1, n_more=1),
    "FSDP2, two forwards": Case(Loop(forwards=2), SIGN),
    "tensor parallel": Case(Loop(cut="tp", clips=False), SUMS, "NAdam", n_more=1),
    "tensor parallel, clipped": Case(Loop(cut="tp", weighted=True), ("adam",), "RAdam"),
    "sequence parallel": Case(Loop(cut="sp"), SUMS, n_more=3),
    "DDP": Case(Loop(cut="ddp", weighted=True), ALL, "two groups", options=(("tap", "leaf"),), n_more=1),
    "DDP's buckets": Case(Loop(cut="ddp"), ALL, "fused", options=(("tap", "comm_hook"),), n_more=1),
    "DDP, Adam alone": Case(Loop(cut="ddp"), ("adam",), "amsgrad, one by one", options=(("tap", "leaf"),), n_more=1),
    "DDP, attached late": Case(Loop(cut="ddp"), ALL, options=(("tap", "leaf"),), attach_at=1, n_more=1),
    "DDP's buckets, Adam alone": Case(Loop(cut="ddp"), ("adam",), options=(("tap", "comm_hook"),), n_more=1),
    "DDP's buckets, clipped before": Case(Loop(cut="ddp", clips=False), ALL, options=(("tap", "comm_hook"),), n_more=1),
}
FOUR_RANKS = {
    "FSDP2": Case(Loop(), SIGN),
    "HSDP": Case(Loop(mesh=(2, 2), clips=False), SIGN, n_more=1),
}


def _model(loop: Loop) -> nn.Module:
    return DistributedDataParallel(build(loop)) if loop.cut == "ddp" else shard(build(loop), loop)


def _place(loop: Loop) -> tuple[int, int]:
    """This rank's data, of how many."""
    if loop.cut == "ddp":
        return dist.get_rank(), dist.get_world_size()
    return data_rank(loop), n_data_ranks(loop)


def _train(case: Case, probed: bool) -> dict[str, Any]:
    loop, model = case.loop, _model(case.loop)
    optimizer = OPTIMIZERS[case.optimizer](p for p in model.parameters() if p.requires_grad)
    rank, n_ranks = _place(loop)
    probe: Any = None
    if probed and not case.attach_at:
        probe = _attached(case, model, optimizer)
    result: dict[str, Any] = {"windows": [], "by hand": [], "norms": []}
    n_issued = 0
    for window in range(3):
        if probed and window and window == case.attach_at:
            probe = _attached(case, model, optimizer)
        whole = {n.removeprefix("module."): p for n, p in whole_parameters(model).items()} if probed else {}
        named = {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}
        moments = by_hand.adam_weights(optimizer, named) if probed and optimizer.state else {}
        before = n_collectives()
        for k in range(2):
            is_last = k == 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last or loop.sync == "every")
            sync = model.no_sync() if loop.cut == "ddp" and not is_last else contextlib.nullcontext()
            ids = tokens(rank, window, k)
            counts: dict[str, Any] = {"units": len(ids)} | ({"weight": len(ids)} if loop.weighted else {})
            with probe.piece(**counts) if probe else contextlib.nullcontext(), sync:
                loss_of(model, ids, loop).backward()
        result["norms"].append(_end(probe, model, loop))
        optimizer.step()
        optimizer.zero_grad()
        n_issued += n_collectives() - before
        if probe:
            solved = {name: probe.window(name) for name in case.metric}
            result["windows"].append(
                {n: w and [(e.trace_cov, e.grad_sq) for e in (w.total, *w.per_group)] for n, w in solved.items()}
            )
            result["by hand"].append(_by_hand(case, whole, moments, window, n_ranks))
    result["collectives"] = n_issued
    if probed:
        result["readings"] = {name: probe.reading(name) for name in case.metric}
        result["alerts"] = probe.alerts
        probe.close()
    result["weights"] = [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]
    return result


def _attached(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> sonde.NoiseScaleProbe:
    options: dict[str, Any] = {"verbose": False, "every": 1, "log": sonde.RunLog(every=1000), **dict(case.options)}
    return sonde.attach(model, optimizer, unit="sequences", metric=case.metric, **options)  # type: ignore[arg-type]


def _end(probe: Any, model: nn.Module, loop: Loop) -> float:
    """End the window; under DDP it is clipped by torch before `step()` where the probe does not clip."""
    if loop.clips and probe:
        return float(probe.clip_grad_norm_(0.5))
    if loop.cut == "ddp":
        clip = sonde.clip_grad_norm_ if loop.clips else nn.utils.clip_grad_norm_
        norm = clip(model.parameters(), 0.5)
    else:
        norm = clip_alone(list(model.parameters()))(0.5) if loop.clips else torch.zeros(())
    if probe:
        probe.step()
    return float(norm)


def _by_hand(
    case: Case, whole: dict[str, Tensor], moments: dict[str, Tensor], window: int, n_ranks: int
) -> dict[str, list[tuple[float, float]] | None]:
    """tr Σ and |G|² in each metric: of the whole model, and of each group where groups add up to it."""
    model = copy.deepcopy(build(case.loop)).double()
    for name, p in model.named_parameters():
        p.data = whole[name].double()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    in_buckets = dict(case.options).get("tap") == "comm_hook"
    pieces, weights, units = [], [], []
    for rank in range(n_ranks):
        of_rank = []
        for k in range(2):
            ids = tokens(rank, window, k)
            grads = torch.autograd.grad(loss_of(model, ids, case.loop), list(named.values()))
            of_rank.append((dict(zip(named, grads, strict=True)), float(len(ids))))
        if in_buckets:  # a rank's whole window is one piece
            (a, n), (b, m) = of_rank
            pieces.append({name: a[name] + b[name] for name in named})
            weights.append(2.0)
            units.append(4.0 / (1 / n + 1 / m))
            continue
        pieces += [gradient for gradient, _ in of_rank]
        weights += [n if case.loop.weighted else 1.0 for _, n in of_rank]
        units += [n for _, n in of_rank]
    squares = {name: getattr(by_hand, name) for name in ("euclidean", "sign", "spectral")}
    if moments:
        squares["adam"] = by_hand.adam(moments)
    groups: dict[str, list[str]] = {}
    for name in named:
        groups.setdefault(block_of(name), []).append(name)
    parts = [pieces, *([{name: g[name] for name in group} for g in pieces] for group in groups.values())]
    return {
        name: [by_hand.window(part, weights, units, squares[name], 1 / n_ranks) for part in parts]
        if name in squares
        else None
        for name in case.metric
    }


def _check(ranks: Ranks, case: Case) -> None:
    for probed, plain in zip(ranks(_train, case, True), ranks(_train, case, False), strict=True):
        assert probed["alerts"] == {}
        for window, exact in zip(probed["windows"], probed["by hand"], strict=True):
            for name, values in exact.items():
                if values is None:  # before the optimizer's first step
                    assert window[name] is None
                    continue
                assert window[name] is not None, (name, probed["readings"][name].dropped)
                # fp32 gradients: a few 1e-7 of S and B, amplified by their difference.
                for k, (of_part, exact_part) in enumerate(zip(window[name], values, strict=True)):
                    size = exact_part[0] if k == 0 else max(exact_part)  # |G|² of a group may be many times its tr Σ
                    assert of_part == pytest.approx(exact_part, abs=1e-5 * size), name
        n_more = probed["collectives"] - plain["collectives"]
        assert n_more == (3 - case.attach_at) * case.n_more
        assert all(map(torch.equal, probed["weights"], plain["weights"]))
        assert probed["norms"] == plain["norms"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("FSDP2", marks=pytest.mark.shows("sign metric", "FSDP2")),
        pytest.param("tensor parallel", marks=pytest.mark.shows("adam metric", "TP")),
        pytest.param("sequence parallel", marks=pytest.mark.shows("adam metric", "SP")),
        pytest.param(
            "DDP",
            marks=[
                pytest.mark.shows("adam metric", "DDP"),
                pytest.mark.shows("sign metric", "DDP"),
                pytest.mark.shows("spectral metric", "DDP"),
            ],
        ),
        *(name for name in TWO_RANKS if name not in ("FSDP2", "tensor parallel", "sequence parallel", "DDP")),
    ],
)
def test_two_ranks(ranks2: Ranks, name: str) -> None:
    _check(ranks2, TWO_RANKS[name])


def test_three_ranks(ranks3: Ranks) -> None:
    """Shards are uneven, and some are empty."""
    _check(ranks3, Case(Loop(clips=False), SIGN, n_more=1))


@pytest.mark.parametrize(
    "name",
    [
        "FSDP2",
        pytest.param("HSDP", marks=pytest.mark.shows("sign metric", "HSDP")),
    ],
)
def test_four_ranks(ranks4: Ranks, name: str) -> None:
    _check(ranks4, FOUR_RANKS[name])


REFUSED = {
    "Adam's under FSDP2": (Loop(), "adam", "leaves each rank a part, got FSDP2: use metric='sign' or 'euclidean'"),
    "Adam's under FSDP2 of one rank": (Loop(cut="fsdp over tp"), "adam", "no error"),  # which has the whole moment
    "sign under tensor parallelism": (Loop(cut="tp"), "sign", "needs the whole gradient of each piece on one rank"),
    "spectral under FSDP2": (Loop(), "spectral", "needs each matrix whole on one rank, got a model cut by FSDP2"),
}


def _refused(name: str) -> str:
    loop, metric, _ = REFUSED[name]
    model = shard(build(loop), loop)
    try:
        sonde.attach(model, torch.optim.AdamW(model.parameters()), unit="rows", metric=metric, verbose=False).close()  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks2: Ranks, name: str) -> None:
    for message in ranks2(_refused, name):
        assert re.search(REFUSED[name][2], message), message

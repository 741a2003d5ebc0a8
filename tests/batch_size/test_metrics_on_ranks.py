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
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.batch_size.taps.metric import AdamMetric
from sonde.batch_size.taps.second_moments import SecondMoments
from sonde.parallel.gathered import gathered_parameters
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
    train,
    whole_parameters,
)
from tests.ranks import Ranks, mesh_of

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
        n_more: collectives that the probe adds to a window: its sum unless that rides in the clip's, one that gathers
            second moments, and under sequence parallelism those that sum partial gradients.
        attach_at: window before which the probe is attached.
        rounds: second moments are gathered in bf16.
    """

    loop: Loop
    metric: tuple[str, ...]
    optimizer: str = "AdamW"
    options: tuple[tuple[str, Any], ...] = ()
    n_more: int = 0
    attach_at: int = 0
    rounds: bool = False


WHOLE, SUMS, ALL = ("euclidean", "adam", "sign"), ("euclidean", "adam"), ("euclidean", "adam", "sign", "spectral")
TWO_RANKS = {
    "FSDP2": Case(Loop(clips=False, weighted=True), WHOLE, n_more=2),
    "FSDP2, clipped, every piece reduces": Case(Loop(sync="every", reshard=True), WHOLE, "fused", n_more=1),
    "FSDP2, Adam alone": Case(Loop(reshard=False, tied=True), ("adam",), "amsgrad, one by one", n_more=1),
    "FSDP2, sign alone": Case(Loop(frozen=True), ("sign",)),
    "FSDP2, offloaded": Case(Loop(offload=True, checkpoints=True), WHOLE, "NAdam", n_more=1),
    "FSDP2, attached late": Case(Loop(clips=False), WHOLE, attach_at=1, n_more=2),
    "FSDP2, moments in bf16": Case(Loop(), WHOLE, options=(("staging_mib", 2 / 1024),), n_more=1, rounds=True),
    "FSDP2, two groups of parameters": Case(Loop(forwards=2), WHOLE, "two groups", n_more=1),
    "tensor parallel": Case(Loop(cut="tp", clips=False), SUMS, n_more=1),
    "tensor parallel, clipped": Case(Loop(cut="tp", weighted=True), ("adam",), "RAdam"),
    "sequence parallel": Case(Loop(cut="sp"), SUMS, n_more=3),
    "DDP": Case(Loop(cut="ddp", weighted=True), ALL, options=(("tap", "leaf"),), n_more=1),
    "DDP's buckets": Case(Loop(cut="ddp"), ALL, "fused", options=(("tap", "comm_hook"),), n_more=1),
    "DDP, Adam alone": Case(Loop(cut="ddp"), ("adam",), options=(("tap", "leaf"),), n_more=1),
    "DDP's buckets, Adam alone": Case(Loop(cut="ddp"), ("adam",), options=(("tap", "comm_hook"),), n_more=1),
    "DDP's buckets, clipped before": Case(Loop(cut="ddp", clips=False), ALL, options=(("tap", "comm_hook"),), n_more=1),
}
FOUR_RANKS = {
    "FSDP2": Case(Loop(), WHOLE, n_more=1),
    "HSDP": Case(Loop(mesh=(2, 2), clips=False), WHOLE, n_more=2),
    "FSDP2 over tensor parallelism": Case(Loop(cut="fsdp over tp", clips=False), SUMS, n_more=2),
    "FSDP2 over sequence parallelism": Case(Loop(cut="fsdp over sp", weighted=True), SUMS, n_more=3),
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
        rounded = torch.bfloat16 if case.rounds else None
        moments = by_hand.adam_weights(optimizer, named, rounded) if probed and optimizer.state else {}
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
        pytest.param(
            "FSDP2", marks=[pytest.mark.shows("adam metric", "FSDP2"), pytest.mark.shows("sign metric", "FSDP2")]
        ),
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
    _check(ranks3, Case(Loop(clips=False), WHOLE, n_more=2))


@pytest.mark.parametrize(
    "name",
    [
        "FSDP2",
        pytest.param(
            "HSDP", marks=[pytest.mark.shows("adam metric", "HSDP"), pytest.mark.shows("sign metric", "HSDP")]
        ),
        pytest.param("FSDP2 over tensor parallelism", marks=pytest.mark.shows("adam metric", "FSDP2 over TP")),
        pytest.param("FSDP2 over sequence parallelism", marks=pytest.mark.shows("adam metric", "FSDP2 over SP")),
    ],
)
def test_four_ranks(ranks4: Ranks, name: str) -> None:
    _check(ranks4, FOUR_RANKS[name])


def _unchanged(loop: Loop, probed: bool) -> dict[str, Any]:
    return train(loop, probed=probed)


def test_moments_are_gathered_before_measured_windows_alone(ranks2: Ranks) -> None:
    loop = Loop(dropout=True, windows=40, options={"every": 3, "metric": "adam"})  # the first 16, and every third
    for with_probe, without in zip(ranks2(_unchanged, loop, True), ranks2(_unchanged, loop, False), strict=True):
        assert all(map(torch.equal, with_probe["weights"], without["weights"]))
        n_measured = with_probe["reading"].windows + 1  # the first has no moments
        assert 20 <= n_measured <= 30
        # The window after the last one may be a measured one too.
        assert with_probe["collectives"] - without["collectives"] - (n_measured - 1) in (0, 1)


def _resumed() -> dict[str, int]:
    """The optimizer's state is loaded after the probe was attached."""
    model = shard(build(Loop()), Loop())
    trained, optimizer = (torch.optim.AdamW(model.parameters(), lr=0.0) for _ in range(2))
    loss_of(model, tokens(dist.get_rank(), 0, 0), Loop()).backward()
    trained.step()
    model.zero_grad()
    with sonde.attach(model, optimizer, unit="sequences", metric="adam", every=1, verbose=False) as probe:
        optimizer.load_state_dict(trained.state_dict())
        for k in range(2):
            with probe.piece(units=1):
                loss_of(model, tokens(dist.get_rank(), 0, k), Loop()).backward()
        probe.step()
        return {"windows": probe.reading().windows, **probe.reading().dropped}


def test_moments_that_are_loaded_are_gathered(ranks2: Ranks) -> None:
    assert ranks2(_resumed) == [{"windows": 1}] * 2


def _in_turns() -> tuple[int, list[float], list[float], float]:
    """Turns, and in each the squared norm of one whole gradient by its leaf, and by the shards of all ranks."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 251), mesh=mesh_of((dist.get_world_size(),)))  # uneven over ranks and turns
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    leaves = [gathered_parameters(model)[id(p)] for p in parameters]
    moments = SecondMoments(optimizer, parameters, leaves, most_bytes=8 * 1024)
    metric = AdamMetric(moments)
    whole = [p.grad.full_tensor() for p in parameters]  # type: ignore[union-attr]
    by_leaf, by_shards = [], []
    for _ in range(8):
        moments.gather()
        by_leaf.append(float(metric.norms([0, 1], whole).square().sum()))
        shards = [metric.norm_of_shard(i, p.grad.to_local()).square() for i, p in enumerate(parameters)]  # type: ignore[union-attr]
        total = torch.stack(shards).sum()
        dist.all_reduce(total)
        by_shards.append(float(total))
    weights = by_hand.adam_weights(optimizer, dict(model.named_parameters()), torch.bfloat16)
    named = dict(zip(("weight", "bias"), whole, strict=True))
    return len(set(by_leaf)), by_leaf, by_shards, by_hand.adam(weights)(named)


def test_moments_beyond_the_bound_are_gathered_in_turns(ranks2: Ranks) -> None:
    """Each turn weighs the same rows for a piece and for the shards, and the mean of all turns is the whole norm."""
    for n_turns, by_leaf, by_shards, exact in ranks2(_in_turns):
        assert n_turns == 8
        assert by_leaf == pytest.approx(by_shards, rel=1e-6)
        assert sum(by_leaf) / 8 == pytest.approx(exact, rel=1e-6)


REFUSED = {
    "too little memory for Adam's moments": (
        Loop(),
        "adam",
        1,
        "even a 64th of them takes .* MiB on each rank.*staging_mib=1",
    ),
    "sign under tensor parallelism": (Loop(cut="tp"), "sign", 8, "needs the whole gradient of each piece on one rank"),
    "spectral under FSDP2": (Loop(), "spectral", 8, "needs each matrix whole on one rank, got a model cut by FSDP2"),
}


def _refused(name: str) -> str:
    loop, metric, kib, _ = REFUSED[name]
    model = shard(build(loop), loop)
    try:
        sonde.attach(model, torch.optim.AdamW(model.parameters()), unit="rows", metric=metric, staging_mib=kib / 1024)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks2: Ranks, name: str) -> None:
    for message in ranks2(_refused, name):
        assert re.search(REFUSED[name][3], message), message

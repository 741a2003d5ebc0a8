"""Training of models that are cut over ranks, with a probe and without; and the same windows by hand in float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import sonde
from sonde.parallel.wrappers import block_of
from tests.batch_size import norms_by_hand
from tests.batch_size.cut_models import (
    Values,
    assert_same_values,
    joined,
    last_window,
    n_collectives,
    reshard,
    whole_parameters,
    with_total,
)
from tests.batch_size.cuts import OPTIMIZERS, Cut, made
from tests.batch_size.set_ups import IGNORED, N_MICRO, Loop, build, counts, loss_of, loss_of_stages, of_window, tokens
from tests.mutants import Mutant
from tests.ranks import Ranks, mesh_of

CHUNK = 1024
"""Elements of a chunk of gradients that ranks sum together, the least: these loops ask for no staging area."""


def attached(cut: Cut, optimizer: torch.optim.Optimizer | None, **more: Any) -> sonde.NoiseScaleProbe:
    loop = cut.loop
    options: dict[str, Any] = {"unit": "sequences", "verbose": False, "every": 1, "log": sonde.RunLog(every=1000)}
    options |= {"per_example": "never", "metric": loop.metric} | ({} if loop.declared else {"units_per_piece": 4})
    options |= {"staging_mib": 0.0} if loop.has("cp") else {}
    options |= {"groups": group_of} if loop.has("ep", "pp") else {}
    options |= {"grad_scaler": cut.scaler}
    return sonde.attach(cut.model, optimizer, **(options | cut.arguments | loop.options | more))


def group_of(name: str) -> str:
    """The router and the experts are one layer, so that a group has parameters of both kinds."""
    first = name.split(".")[0]
    return "layer" if first in ("router", "experts") else first


def run_pieces(cut: Cut, probe: Any, window: int) -> None:
    """All backwards of one window on this rank."""
    loop = cut.loop
    if loop.idle == loop.data_rank:
        fill_up(cut, window)
        return
    of_pieces = counts(loop, loop.data_rank, window)
    if loop.has("pp"):
        units, weights = zip(*of_pieces, strict=True)
        with probe.pieces(N_MICRO, units=units, weights=weights) if probe else contextlib.nullcontext():
            cut.run_schedule(window)
        return
    merges = loop.merges and dist.get_rank() == 0
    with contextlib.ExitStack() as merged:
        for k, (units, weight) in enumerate(of_pieces):
            piece: Any = contextlib.nullcontext()
            if probe and loop.declared and not (merges and k):
                piece = probe.piece(units=units, weight=weight)
            with contextlib.nullcontext(merged.enter_context(piece)) if merges else piece:
                for _ in range(1 + loop.twice):
                    cut.backward(window, k, is_last=k == len(of_pieces) - 1)


def fill_up(cut: Cut, window: int) -> None:
    """What a rank without data does, so that its peers can reduce: a schedule in which no target counts, or zeros."""
    if cut.loop.has("pp"):
        cut.run_schedule(window, torch.full_like(of_window(cut.loop.data_rank, window)[1], IGNORED))
    for p in cut.averaged_by_loop:
        p.grad = torch.zeros_like(p)


def end_window(cut: Cut, probe: Any, parameters: list[nn.Parameter]) -> float:
    if cut.loop.clips == "torch":
        norm = nn.utils.clip_grad_norm_(parameters, 0.05)
        return float(norm) + (probe.step() or 0.0 if probe else 0.0)
    if probe:
        return float(probe.clip_grad_norm_(0.5)) if cut.loop.clips else probe.step() or 0.0
    return float(clip_alone(cut, parameters)) if cut.loop.clips else 0.0


def clip_alone(cut: Cut, parameters: list[nn.Parameter]) -> Tensor:
    """The clip of a run without a probe: over all ranks, as the probe's."""
    loop = cut.loop
    arguments: dict[str, Any] = {name: cut.arguments[name] for name in ("mesh", "pp_mesh") if name in cut.arguments}
    if loop.has("cp"):
        arguments = {"mesh": mesh_of((dist.get_world_size() // 2, 2), ("dp", "cp"))}
    elif loop.has("ep") and not arguments:
        arguments = {"mesh": mesh_of((2, 2), ("dp", "tp")) if loop.has("tp") else mesh_of((4,))}
    elif not arguments and (meshes := [p.device_mesh for p in parameters if isinstance(p, DTensor)]):
        arguments = {"mesh": max(meshes, key=lambda m: m.size())}
    return sonde.clip_grad_norm_(parameters, 0.5, **arguments)


def evaluate(cut: Cut, window: int) -> None:
    cut.model.eval()
    with torch.no_grad():
        cut.loss(window, 0)
    cut.model.train()


def train(loop: Loop, *, probed: bool, compares: bool = True) -> dict[str, Any]:
    """Train on this rank.

    Returns:
        All that a probe could disturb (weights after each window, norms, the optimizer's state, random state, modes),
        and the collectives of each window; with a probe its reading and alerts; if it `compares`, also each window in
        each metric, and on the first rank the same by hand, of the data of all ranks.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if loop.compiled:
        torch._dynamo.reset()
    cut = made(loop)
    model, parameters = cut.model, list(cut.model.parameters())  # FSDP2 may show others after a forward
    stepped = [p for name, p in model.named_parameters() if p.requires_grad and name.startswith(loop.part)]
    optimizer = OPTIMIZERS[loop.optimizer](stepped)
    probe: Any = None
    result: dict[str, Any] = {
        "norms": [],
        "windows": [],
        "by hand": [],
        "collectives": [],
        "weights": [],
        "measured": [],
    }
    torch.manual_seed(11 + loop.data_rank)
    for window in range(-loop.late, loop.windows + loop.after):
        if window == 0 and probed:
            probe = attached(cut, optimizer)
        if window == loop.windows and probe:
            result |= ended(probe)
            probe = None
        if compares and window >= 0:
            reshard(model)  # as `whole_parameters` does, in a run without a probe too
        whole = of_all_stages(cut, whole_parameters(model)) if compares and probe else {}
        squares = squares_of(cut, optimizer) if compares and probe else {}
        before = n_collectives()
        result["measured"] += [probe._pace.is_measured] if probe else []
        if loop.evaluates == "before":
            evaluate(cut, window)
        run_pieces(cut, probe, max(window, 0))
        if loop.evaluates == "end":
            evaluate(cut, window)
        cut.reduce()
        cut.scaler.unscale_(optimizer)
        result["norms"].append(end_window(cut, probe, stepped if loop.part else parameters))
        cut.scaler.step(optimizer)
        cut.scaler.update()
        optimizer.zero_grad(loop.set_to_none)
        if compares and probe:
            result["windows"].append({metric: last_window(probe, metric) for metric in loop.metric})
        result["collectives"] += [n_collectives() - before] if window >= 0 else []
        if compares and probe and is_first:
            result["by hand"].append(by_hand(loop, whole, window, squares, probe._tracker.groups))
        result["weights"].append(joined(model.parameters()))
    result |= ended(probe) if probe else {}
    result["optimizer"] = joined(t for t in tree_leaves(optimizer.state_dict()["state"]) if isinstance(t, Tensor))
    result["random state"] = torch.empty(0) if compares else torch.get_rng_state()  # models by hand draw numbers
    modes = [m.training for m in model.modules()], [p.requires_grad for p in parameters]
    result["modes"] = *modes, cut.scaler.get_scale()
    result["hooks"] = n_hooks(model, optimizer)
    return result


def ended(probe: Any) -> dict[str, Any]:
    """Close a probe. What it said."""
    said = {"reading": probe.reading(), "alerts": dict(probe.alerts), "setup": probe._setup()}
    said["tap"] = probe._reader.tap_name
    probe.close()
    return said


def n_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of parameters, modules and the optimizer's step."""
    of_parameters = sum(len(p._backward_hooks or ()) for p in model.parameters())
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return of_parameters + of_modules + len(optimizer._optimizer_step_pre_hooks)


def both(loop: Loop, compares: bool = True, mutant: Mutant | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """With a probe, in which a function of sonde's may be broken on purpose, and without."""
    compares = compares and not (loop.dropout or loop.autocast)
    with mutant.applied() if mutant else contextlib.nullcontext():
        probed = train(loop, probed=True, compares=compares)
    return probed, without_a_probe(loop, compares)


_PLAIN: dict[tuple[str, bool], dict[str, Any]] = {}  # what this process has trained so


def without_a_probe(loop: Loop, compares: bool) -> dict[str, Any]:
    """The training without a probe, which is the same for all loops that differ only in what a probe is told."""
    loop = replace(loop, options={}, metric=())
    if (key := (repr(loop), compares)) not in _PLAIN:
        _PLAIN[key] = train(loop, probed=False, compares=compares)
    return _PLAIN[key]


# By hand.


def of_all_stages(cut: Cut, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the name of their parameter in the whole model, on all ranks."""
    if not cut.loop.has("pp"):
        return own
    mesh = cut.arguments["pp_mesh"]
    gathered: list[Any] = [None] * mesh.size()
    renamed = {name.split(".", 1)[1].removeprefix("module."): tensor for name, tensor in own.items()}
    dist.all_gather_object(gathered, renamed, group=mesh.get_group())
    return {name: tensor for stage in gathered for name, tensor in stage.items()}


def squares_of(cut: Cut, optimizer: torch.optim.Optimizer) -> dict[str, norms_by_hand.Square]:
    """The squared norm of a gradient in each metric; in Adam's, once there are moments. (All ranks take part.)"""
    squares = {name: getattr(norms_by_hand, name) for name in ("euclidean", "sign", "spectral")}
    named = {n.removeprefix("module."): p for n, p in cut.model.named_parameters() if optimizer.state.get(p)}
    if "adam" in cut.loop.metric and named:
        weights = norms_by_hand.adam_weights(optimizer, named)
        squares["adam"] = norms_by_hand.adam(of_all_stages(cut, weights))
    return {name: square for name, square in squares.items() if name in cut.loop.metric}


Piece = tuple[dict[str, Tensor], float, float]
"""The gradient of each parameter, the weight, and the units."""


def by_hand(
    loop: Loop, whole: dict[str, Tensor], window: int, squares: dict[str, norms_by_hand.Square], groups: Sequence[str]
) -> dict[str, Values | None]:
    """(tr Σ, |G|²) of the total and of each group in each metric, by whole gradients; None before Adam has moments."""
    model = copy.deepcopy(build(loop)).to(torch.bfloat16 if loop.bf16 == "parameters" else torch.float64)
    for name, p in model.named_parameters():
        p.data = whole[name].to(p.dtype)
    pieces = pieces_of(loop, model, window)
    names = list(pieces[0][0])
    group = {"parameters": str}.get(loop.options.get("groups", ""), group_of if loop.has("ep", "pp") else block_of)
    parts = [[n for n in names if group(n) == each] for each in groups]
    found: dict[str, Values | None] = dict.fromkeys(loop.metric)
    for metric, square in squares.items():
        of_groups = [solved(loop, pieces, each, square) for each in parts]
        # Norms that add up before they are squared do not add up over groups.
        adds = metric in ("euclidean", "adam")
        found[metric] = with_total(of_groups) if adds else [solved(loop, pieces, names, square), *of_groups]
    return found


def solved(loop: Loop, pieces: list[Piece], names: list[str], square: norms_by_hand.Square) -> tuple[float, float]:
    """tr Σ and |G|² of some parameters. Experts' pieces are what the ranks that feed them have sent in one backward."""
    trace_cov = grad_sq = 0.0
    n_feeding = min(loop.n_feeding, loop.n_data)
    for is_expert in (False, True):
        part = [n for n in names if n.startswith("experts.") == is_expert]
        if not part:
            continue
        own, divisor = pieces, float(loop.n_data)
        if is_expert:
            n = loop.n_pieces
            first = [rank * n + k for rank in range(0, loop.n_data, n_feeding) for k in range(n)]
            own = [merged([pieces[i + n * r] for r in range(n_feeding)]) for i in first]
            # Below tensor parallelism, both ranks of a pair send the same tokens.
            divisor *= 1.0 if loop.averaged else 1.0 / loop.n_feeding
        gradients = [{n: g[n] for n in part} for g, _, _ in own]
        t, g = norms_by_hand.window(gradients, [w for _, w, _ in own], [n for _, _, n in own], square, 1 / divisor)
        trace_cov, grad_sq = trace_cov + t, grad_sq + g
    return trace_cov, grad_sq


def merged(pieces: list[Piece]) -> Piece:
    """One piece of several, with Kish's number of their units."""
    weight = sum(w for _, w, _ in pieces)
    units = weight**2 / sum(w * w / n for _, w, n in pieces)
    return {name: torch.stack([g[name] for g, _, _ in pieces]).sum(0) for name in pieces[0][0]}, weight, units


def gradient_of(model: nn.Module, loss: Tensor, part: str = "") -> dict[str, Tensor]:
    """By name, in float64, of parameters whose names begin so."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad and n != "unused" and n.startswith(part)}
    return {n: g.double() for n, g in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)}


def pieces_of(loop: Loop, model: nn.Module, window: int) -> list[Piece]:
    """Every piece of every rank: examples or micro-batches."""
    pieces: list[Piece] = []
    for rank in range(loop.n_data):
        if rank == loop.idle:
            continue
        own = []
        for k, (units, weight) in enumerate(counts(loop, rank, window)):
            parts = 1
            if loop.has("pp"):
                x, y = (t.chunk(N_MICRO)[k] for t in of_window(rank, window))
                losses = [loss_of_stages(model(x), y, loop.weighted)]
            else:
                ids = tokens(loop, rank, window, k)
                rows = ids.split(1) if loop.options.get("per_example") == "always" else [ids]
                parts = len(rows)
                losses = [
                    loss_of(loop, model, row) * (1.0 if loop.weighted or parts == 1 else 1 / parts) for row in rows
                ]
            own += [(gradient_of(model, loss, loop.part), weight / parts, units / parts) for loss in losses]
        pieces += own
    return pieces


# What is compared.


def n_chunks(loop: Loop, size: int = CHUNK) -> int:
    """How many chunks of a size hold the gradients, the last first, if only those that are longer are cut."""
    numels = [p.numel() for p in reversed(list(build(loop).parameters()))]
    parts = [min(size, n - start) for n in numels for start in range(0, n, size)]
    n = room = 0
    for numel in parts:
        if numel > room:
            n, room = n + 1, size
        room -= numel
    return n


def more_collectives(loop: Loop) -> int:
    """What the probe adds to a window: its sum, unless that rides in the clip's; and sums of parts of gradients."""
    rides = loop.has("one") or (loop.clips is True and loop.cut != "ddp")
    own = 0 if rides else 1
    if loop.has("ep"):
        own += loop.n_feeding > 1
    if loop.has("cp"):
        own += 2 * (n_chunks(loop) + 1)
    if loop.has("sp"):  # each piece, and once more at the end of a window if all of its pieces are partial
        own += N_MICRO + 1 if loop.has("pp") else 2 + (loop.cut == "sp")
    return own


def assert_exact(found: Values, exact: Values, metric: str) -> None:
    """In float64; |G|² is a small difference of squares. Singular values that are 0 keep half of the digits."""
    rel = 1e-7 if metric == "spectral" else 1e-9
    for (trace_cov, grad_sq), (exact_trace_cov, exact_grad_sq) in zip(found, exact, strict=True):
        assert trace_cov == pytest.approx(exact_trace_cov, rel=rel), metric
        assert grad_sq == pytest.approx(exact_grad_sq, rel=rel, abs=rel * exact_trace_cov), metric


def check(ranks: Ranks | None, loop: Loop, mutant: Mutant | None = None) -> list[dict[str, Any]]:
    """Values are those by hand and alike on all ranks, and training is bit for bit that of a run without a probe."""
    results = ranks(both, loop, True, mutant) if ranks else [both(loop, True, mutant)]
    exact_windows = results[0][0]["by hand"]
    for probed, plain in results:
        assert (probed["alerts"], probed["reading"].doubts) == ({}, {})
        assert len(probed["windows"]) == (0 if loop.dropout else loop.windows)
        for window, exact in zip(probed["windows"], exact_windows, strict=True):
            for metric, values in exact.items():
                if values is None:  # before the optimizer's first step
                    assert window[metric] is None
                    continue
                assert window[metric] is not None, probed["reading"].dropped
                assert_near(loop, metric, window[metric], values, probed["reading"].effective_units)
        assert_untouched(probed, plain)
        more = [a - b for a, b in zip(probed["collectives"], plain["collectives"], strict=True)]
        assert more == [more_collectives(loop)] * loop.windows
    assert len({str(probed["windows"]) for probed, _ in results}) == 1
    return [probed for probed, _ in results]


def assert_near(loop: Loop, metric: str, found: Values, exact: Values, effective_units: float) -> None:
    """As near as the precision of gradients allows."""
    if loop.exact:
        assert_exact(found, exact, metric)
    elif loop.hook == "bf16":  # rounds each element by up to 2⁻⁸: B moves by the square of that, κ by its mean
        assert found[0] == pytest.approx(exact[0], abs=3e-3 * exact[0][0])
    # Where a rank's whole window is one piece, S and B differ by less.
    elif metric == "euclidean" and loop.n_pieces > 1:
        assert_same_values(found, exact, effective_units)
    else:
        # fp32 gradients: a few 1e-7 of S and B, amplified by their difference. A group's |G|² may be many times its
        # tr Σ.
        for k, (own, by_definition) in enumerate(zip(found, exact, strict=True)):
            size = by_definition[0] if k == 0 else max(by_definition)
            assert own == pytest.approx(by_definition, abs=1e-5 * size), metric


def assert_untouched(probed: dict[str, Any], plain: dict[str, Any]) -> None:
    """Training is bit for bit that without a probe, and no hook is left."""
    assert len(probed["weights"]) == len(plain["weights"]) > 0
    assert all(map(torch.equal, probed["weights"], plain["weights"]))
    for what in ("optimizer", "random state"):
        assert torch.equal(probed[what], plain[what]), what
    for what in ("norms", "modes", "hooks"):
        assert probed[what] == plain[what], what

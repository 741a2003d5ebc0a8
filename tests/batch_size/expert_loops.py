"""Training loops of a mixture of experts whose tokens travel between ranks, and the same pieces on one process."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import sonde
from tests.batch_size import norms_by_hand
from tests.batch_size.cut_models import Values, last_window, local_weights, n_collectives, whole_parameters, with_total
from tests.gradient_norm.routed_experts import LENGTH, VOCABULARY, Mixture, build
from tests.ranks import mesh_of

UNITS = ((4, 2), (3, 5), (1, 6), (2, 2))
"""Units of the two pieces of each rank."""


@dataclass(frozen=True)
class Loop:
    """How a mixture of experts is cut over four ranks and trained.

    Attributes:
        n_feeding: ranks over which experts are spread; 1 as of a configuration that does not spread them.
        dense: "fsdp" cuts the other parameters over all ranks; "plain" leaves them whole, and the loop averages them;
            "fsdp over tp" has two data-parallel ranks of two ranks each, and experts are spread over all four.
        averaged: experts are divided by the number of all ranks, as the other parameters; otherwise only by the number
            of ranks that hold the same experts.
        clips: the probe clips, rather than only ending windows.
        weighted: pieces weigh by their units.
        n_pieces: of each rank and window.
        merges: rank 0 takes both backwards for one piece.
        says_so: `expert_mesh=` is given where it is needed.
        declared: whether pieces are declared; otherwise each backward is a piece of 4 units.
        windows: how many windows.
    """

    n_feeding: int = 2
    dense: str = "fsdp"
    averaged: bool = True
    clips: bool = True
    weighted: bool = False
    n_pieces: int = 2
    merges: bool = False
    says_so: bool = True
    declared: bool = True
    windows: int = 2

    @property
    def n_data(self) -> int:
        """Ranks with data of their own."""
        return 2 if self.dense == "fsdp over tp" else 4

    options: dict[str, Any] = field(default_factory=dict)


def group_of(name: str) -> str:
    """The router and the experts are one layer, so that a group has parameters of both kinds."""
    first = name.split(".")[0]
    return "layer" if first in ("router", "experts") else first


def cut(loop: Loop) -> tuple[Mixture, dict[str, Any]]:
    """The model, and the arguments that tell the probe how it is cut."""
    n_same = 4 // loop.n_feeding
    both = mesh_of((n_same, loop.n_feeding), ("dp", "ep"))
    needed: dict[str, Any] = {"mesh": both, "expert_mesh": both["ep"]}
    model = build()
    model.ep = both["ep"]
    model.experts.w = nn.Parameter(distribute_tensor(model.experts.w.detach(), both["ep"], [Shard(0)]))
    if loop.dense == "plain":
        return model, needed if loop.says_so else {"mesh": both}
    if loop.dense == "fsdp over tp":
        mesh = mesh_of((2, 2), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["dp"], ignored_params={model.experts.w})
        return model, {}
    everyone = mesh_of((4,))
    if n_same == 1:
        fully_shard(model, mesh=everyone, ignored_params={model.experts.w})
        return model, {}
    fully_shard(model.experts, mesh=both["dp"], shard_placement_fn=lambda _: Shard(1))
    if loop.averaged:
        experts: Any = model.experts
        experts.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        experts.set_gradient_divide_factor(4.0)
    fully_shard(model, mesh=everyone)
    return model, needed if loop.n_feeding == 1 else {}


def reduce_by_hand(model: Mixture, loop: Loop) -> None:
    """What FSDP2 leaves to the loop: plain gradients, and experts that FSDP2 does not cut."""
    n_same = 4 // loop.n_feeding
    if loop.dense == "plain":
        for p in model.parameters():
            assert p.grad is not None
            if not isinstance(p, DTensor):
                dist.all_reduce(p.grad)
                p.grad /= 4
    if loop.dense == "plain" or n_same == 1:
        grad: Any = model.experts.w.grad
        if n_same > 1:
            dist.all_reduce(grad._local_tensor, group=mesh_of((n_same, loop.n_feeding), ("dp", "ep")).get_group("dp"))
        grad._local_tensor.div_(4 if loop.averaged else n_same)


def tokens(rank: int, window: int, piece: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * window + 10 * rank + piece)
    return torch.randint(VOCABULARY, (UNITS[rank][piece], LENGTH), generator=generator)


def loss_of(model: nn.Module, ids: Tensor, loop: Loop) -> Tensor:
    logits = model(ids).double()
    loss = nn.functional.cross_entropy(logits, ids.roll(1, 1).flatten())
    return loss * (len(ids) / 3.0 if loop.weighted else 1.0)


def train(loop: Loop, *, probed: bool = True, values: bool = False) -> dict[str, Any]:
    """Train on this rank; see `sharded_loops.train`."""
    model, arguments = cut(loop)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, probe, before = dist.get_rank() // (4 // loop.n_data), None, 0
    result: dict[str, Any] = {"norms": [], "windows": [], "by hand": [], "adam": []}
    if probed:
        options: dict[str, Any] = {"unit": "sequences", "verbose": False, "every": 1, "groups": group_of}
        options |= {} if loop.declared else {"units_per_piece": 4}
        log = sonde.RunLog(every=1000)
        probe = sonde.attach(model, optimizer, log=log, **(options | arguments | loop.options))
    before = n_collectives()
    for window in range(loop.windows):
        whole, moments = whole_parameters(model) if values else {}, {}
        if values and optimizer.state and "adam" in loop.options.get("metric", ()):
            moments = norms_by_hand.adam_weights(optimizer, dict(model.named_parameters()))
        with contextlib.ExitStack() as merged:
            for k in range(loop.n_pieces):
                ids = tokens(rank, window, k)
                counts: dict[str, Any] = {"units": len(ids)} | ({"weight": len(ids)} if loop.weighted else {})
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(k == loop.n_pieces - 1)
                if probe is not None and loop.merges and rank == 0:
                    if k == 0:
                        merged.enter_context(probe.piece(**counts))
                    loss_of(model, ids, loop).backward()
                    continue
                with probe.piece(**counts) if probe is not None and loop.declared else contextlib.nullcontext():
                    loss_of(model, ids, loop).backward()
        reduce_by_hand(model, loop)
        result["norms"].append(_end(probe, model, arguments, loop))
        optimizer.step()
        optimizer.zero_grad()
        if values and probe is not None:
            result["windows"].append(last_window(probe))
            result["by hand"].append(by_hand(whole, loop, window, norms_by_hand.euclidean))
            if moments:
                exact = by_hand(whole, loop, window, norms_by_hand.adam(moments))
                result["adam"].append((last_window(probe, "adam"), exact))
    result["collectives"] = n_collectives() - before
    if probe is not None:
        result |= {"reading": probe.reading(), "alerts": dict(probe.alerts), "setup": probe._setup()}
        probe.close()
    result["weights"] = local_weights(model)
    return result


def _end(probe: Any, model: nn.Module, arguments: dict[str, Any], loop: Loop) -> float:
    if not loop.clips:
        return probe.step() or 0.0 if probe else 0.0
    if probe:
        return float(probe.clip_grad_norm_(0.5))
    mesh = arguments.get("mesh") or (mesh_of((2, 2), ("dp", "tp")) if loop.n_data == 2 else mesh_of((4,)))
    return float(sonde.clip_grad_norm_(list(model.parameters()), 0.5, mesh=mesh))


def by_hand(whole: dict[str, Tensor], loop: Loop, window: int, square: norms_by_hand.Square) -> Values:
    """(tr Σ, |G|²) of the total and of each group, from every rank's whole gradients in float64.

    An expert's piece is the sum of what the ranks that feed it have sent in one backward, with their joint weight and
    Kish's number of their units.
    """
    model = copy.deepcopy(build()).double()
    for name, p in model.named_parameters():
        p.data = whole[name].double()
    names = [n for n, _ in model.named_parameters()]
    h: dict[tuple[int, int], dict[str, Tensor]] = {}
    for rank in range(loop.n_data):
        for k in range(loop.n_pieces):
            grads = torch.autograd.grad(loss_of(model, tokens(rank, window, k), loop), list(model.parameters()))
            h[rank, k] = dict(zip(names, grads, strict=True))
    n = {(rank, k): float(UNITS[rank][k]) if loop.declared else 4.0 for rank, k in h}
    w = {key: n[key] if loop.weighted else 1.0 for key in h}
    n_feeding = min(loop.n_feeding, loop.n_data)
    feeding = [range(first, first + n_feeding) for first in range(0, loop.n_data, n_feeding)]
    # Expert pieces: which pieces of single ranks each of them holds.
    joint = [[(rank, k) for rank in ranks] for ranks in feeding for k in range(loop.n_pieces)]
    groups = list(dict.fromkeys(map(group_of, names)))
    solved = []
    for group in groups:
        trace_cov = grad_sq = 0.0
        for is_expert, pieces in ((False, [[key] for key in h]), (True, joint)):
            part = [n for n in names if group_of(n) == group and n.startswith("experts") == is_expert]
            if not part:
                continue
            gradients = [{n: torch.stack([h[key][n] for key in piece]).sum(0) for n in part} for piece in pieces]
            weights = [sum(w[key] for key in piece) for piece in pieces]
            units = [sum(w[key] for key in p) ** 2 / sum(w[key] ** 2 / n[key] for key in p) for p in pieces]
            divisor = float(loop.n_data)
            if is_expert:
                # Below tensor parallelism, both ranks of a pair send the same tokens.
                divisor = (4.0 if loop.averaged else 4.0 / loop.n_feeding) * loop.n_data / 4
            t, g = norms_by_hand.window(gradients, weights, units, square, 1 / divisor)
            trace_cov, grad_sq = trace_cov + t, grad_sq + g
        solved.append((trace_cov, grad_sq))
    return with_total(solved)

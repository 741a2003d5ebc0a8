"""Training loops whose ranks share sequences, each with a part of the tokens; and the same pieces on one process."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.parallel.wrappers import block_of
from tests.batch_size import norms_by_hand
from tests.batch_size.cut_models import Values, last_window, local_weights, n_collectives, whole_parameters, with_total
from tests.ranks import mesh_of

VOCABULARY, WIDTH, HIDDEN, LENGTH = 13, 16, 512, 8
UNITS = ((4, 2), (3, 5))
"""Units of the two pieces of each data-parallel rank."""


class Gather(torch.autograd.Function):
    """All tokens of a sequence, from the parts of all ranks; [rows, tokens, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Attention(nn.Module):
    """Causal attention of this rank's tokens to those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        first = 0
        if self.group is not None:
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
            first = self.group.rank() * x.shape[1]
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        hidden = torch.arange(k.shape[1]) > first + torch.arange(x.shape[1])[:, None]
        out: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return out


class LM(nn.Module):
    """A language model whose largest layer comes in another order in backward than it is defined in."""

    def __init__(self, *, in_order: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.attention = Attention()
        if in_order:
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        else:
            self.down, self.up = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Logits of tokens whose first is at this place of the sequence."""
        x = self.embed(tokens) + self.place[first : first + tokens.shape[1]]
        x = x + self.attention(x)
        logits: Tensor = self.head(x + self.down(torch.relu(self.up(x))))
        return logits


@dataclass(frozen=True)
class Loop:
    """How a model is trained by ranks that share sequences.

    Attributes:
        cut: "fsdp" over all ranks in one axis, "hsdp" over both axes, "ddp", or "plain", whose gradients the loop
            averages over all ranks.
        n_sharing: ranks that share a sequence.
        clips: the probe clips, rather than only ending windows.
        weighted: pieces weigh by their units.
        in_order: layers are defined in the order of forward.
        twice: a piece has two backwards.
        declared: whether pieces are declared; otherwise each backward is a piece of 4 units.
        windows: how many windows.
    """

    cut: str = "fsdp"
    n_sharing: int = 2
    clips: bool = True
    weighted: bool = False
    in_order: bool = True
    twice: bool = False
    declared: bool = True
    windows: int = 2
    options: dict[str, Any] = field(default_factory=lambda: {"staging_mib": 0.0})


def build(loop: Loop) -> LM:
    torch.manual_seed(5)
    return LM(in_order=loop.in_order)


def whole_mesh(loop: Loop) -> Any:
    return mesh_of((dist.get_world_size() // loop.n_sharing, loop.n_sharing), ("dp", "cp"))


def cut(loop: Loop) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the arguments that tell the probe how it is cut."""
    mesh = whole_mesh(loop)
    model = build(loop)
    model.attention.group = mesh["cp"].get_group()
    if loop.cut == "plain":  # where all ranks share sequences, cp_mesh= is the mesh of all ranks
        return model, {"cp_mesh": mesh["cp"]} | ({"mesh": mesh} if mesh["dp"].size() > 1 else {})
    if loop.cut == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        return wrapped, {"mesh": mesh, "cp_mesh": mesh["cp"]}
    fsdp_mesh = mesh if loop.cut == "hsdp" else mesh_of((dist.get_world_size(),))
    fully_shard(model.up, mesh=fsdp_mesh)
    fully_shard(model, mesh=fsdp_mesh)
    return model, {"cp_mesh": mesh["cp"]} | ({"mesh": mesh} if loop.cut == "fsdp" else {})


def tokens(rank: int, window: int, piece: int) -> Tensor:
    """[units, LENGTH + 1] of one data-parallel rank's piece."""
    generator = torch.Generator().manual_seed(1000 * window + 10 * rank + piece)
    return torch.randint(VOCABULARY, (UNITS[rank][piece], LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, ids: Tensor, loop: Loop, part: int = 0, n_parts: int = 1) -> Tensor:
    """The mean over the tokens of one of the parts."""
    inputs, targets = (x.chunk(n_parts, 1)[part] for x in (ids[:, :-1], ids[:, 1:]))
    logits = model(inputs, part * LENGTH // n_parts).double()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss * (len(ids) / 3.0 if loop.weighted else 1.0)


def train(loop: Loop, *, probed: bool = True, values: bool = False) -> dict[str, Any]:
    """Train on this rank; see `sharded_loops.train`."""
    model, arguments = cut(loop)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, part = divmod(dist.get_rank(), loop.n_sharing)
    probe: Any = None
    result: dict[str, Any] = {"norms": [], "windows": [], "by hand": [], "further": [], "further by hand": []}
    if probed:
        options: dict[str, Any] = {"unit": "sequences", "verbose": False, "every": 1, "log": sonde.RunLog(every=1000)}
        options |= {} if loop.declared else {"units_per_piece": 4}
        probe = sonde.attach(model, optimizer, **(options | arguments | loop.options))
    before = n_collectives()
    for window in range(loop.windows):
        whole = whole_parameters(model) if values else {}
        squares = further_squares(model, optimizer, loop) if values and probed else {}
        for k in range(2):
            ids = tokens(rank, window, k)
            counts: dict[str, Any] = {"units": len(ids)} | ({"weight": len(ids)} if loop.weighted else {})
            no_sync = contextlib.nullcontext()
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(k == 1)
            elif k == 0 and loop.cut == "ddp":
                no_sync = model.no_sync()  # type: ignore[operator]
            with probe.piece(**counts) if probe and loop.declared else contextlib.nullcontext(), no_sync:
                for _ in range(1 + loop.twice):
                    loss_of(model, ids, loop, part, loop.n_sharing).backward()
        if loop.cut == "plain":
            _average(model)
        result["norms"].append(_end(probe, model, loop))
        optimizer.step()
        optimizer.zero_grad()
        if values and probe:
            result["windows"].append(last_window(probe))
            result["by hand"].append(by_hand(whole, loop, window, norms_by_hand.euclidean))
            result["further"].append({name: last_window(probe, name) for name in squares})
            exact = {name: by_hand(whole, loop, window, square) for name, square in squares.items()}
            result["further by hand"].append(exact)
    result["collectives"] = n_collectives() - before
    if probe:
        result |= {"reading": probe.reading(), "alerts": dict(probe.alerts), "setup": probe._setup()}
        probe.close()
    result["weights"] = local_weights(model)
    return result


def _average(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def _end(probe: Any, model: nn.Module, loop: Loop) -> float:
    if not loop.clips:
        return probe.step() or 0.0 if probe else 0.0
    if probe:
        return float(probe.clip_grad_norm_(0.5))
    return float(sonde.clip_grad_norm_(list(model.parameters()), 0.5, mesh=whole_mesh(loop)))


def further_squares(model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> dict[str, norms_by_hand.Square]:
    """The squared norm of a gradient in each further metric, with the optimizer's present moments; once there are any.

    (All ranks take part.)
    """
    metrics = loop.options.get("metric", ())
    named = {n.removeprefix("module."): p for n, p in model.named_parameters() if "exp_avg_sq" in optimizer.state[p]}
    squares = {"sign": norms_by_hand.sign}
    if "adam" in metrics and named:
        squares["adam"] = norms_by_hand.adam(norms_by_hand.adam_weights(optimizer, named))
    return {name: square for name, square in squares.items() if name in metrics}


def by_hand(whole: dict[str, Tensor], loop: Loop, window: int, square: norms_by_hand.Square) -> Values:
    """(tr Σ, |G|²) from the gradients of whole sequences in float64: of the total and of each group.

    In a metric whose norms add up before they are squared, groups do not add up to the whole model.
    """
    model = copy.deepcopy(build(loop)).double()
    for name, p in model.named_parameters():
        p.data = whole[name].double()
    names = [n for n, _ in model.named_parameters()]
    n_data = dist.get_world_size() // loop.n_sharing
    pieces, units = [], []
    for rank in range(n_data):
        for k in range(2):
            ids = tokens(rank, window, k)
            loss = loss_of(model, ids, loop) + 0.0 * model.unused.sum()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            pieces.append({n: g for n, g in zip(names, grads, strict=True) if n != "unused"})
            units.append(float(len(ids)) if loop.declared else 4.0)
    weights = units if loop.weighted else [1.0] * len(units)
    groups = [[n for n in names if block_of(n) == group] for group in dict.fromkeys(map(block_of, names))]
    solved = []
    for group in (names, *groups):
        parts = [{n: piece[n] for n in group if n in piece} for piece in pieces]
        solved.append(norms_by_hand.window(parts, weights, units, square, 1 / n_data))
    return solved if square is norms_by_hand.sign else with_total(solved[1:])

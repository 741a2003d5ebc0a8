"""Training of low-rank adapters, and the same pieces on one process in float64.

The adapters are written here, or PEFT's. What makes adapters after the model was sharded leaves them plain: each rank
holds them whole, and hooks or the loop average their gradients.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.parallel.wrappers import block_of
from tests.batch_size.cut_models import (
    Values,
    assert_same_values,
    last_window,
    local_weights,
    n_collectives,
    whole_parameters,
    with_total,
)
from tests.batch_size.norms_by_hand import adam_weights
from tests.oracles import window_by_hand
from tests.ranks import mesh_of

WIDTH, RANK = 10, 3
UNITS = ((4, 2), (3, 5), (1, 6), (2, 2))
"""Rows of the two pieces of each rank."""
WINDOWS = 3


class Adapted(nn.Module):
    """A frozen layer, and an update of low rank that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, WIDTH) / 3)
        self.b = nn.Parameter(torch.randn(WIDTH, RANK) / 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return out


@dataclass(frozen=True)
class Loop:
    """How adapters are held and trained.

    Attributes:
        adapters: "sharded" with the rest by FSDP2; or plain below FSDP2, and averaged by "hooks" once a gradient is
            accumulated, or by the "loop" before the step; or below "ddp"; or of "one process".
        peft: the adapters are PEFT's. Those that are plain below FSDP2 are made after the model was sharded.
        head: whether a layer without adapters is trained too; with PEFT it is a copy of the model's own.
        mesh: shape of the mesh of FSDP2; None for all ranks.
        tp: pairs of ranks also cut the frozen layers by tensor parallelism; FSDP2 has the others.
        clips: the probe clips, rather than only ending windows.
        weighted: pieces weigh by their units.
        metric: as for attach.
        options: of the probe.
    """

    adapters: str
    peft: bool = False
    head: bool = True
    mesh: tuple[int, ...] | None = None
    tp: bool = False
    clips: bool = True
    weighted: bool = False
    metric: tuple[str, ...] = ("euclidean",)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def n_data_ranks(self) -> int:
        return 1 if self.adapters == "one process" else dist.get_world_size() // (1 + self.tp)

    @property
    def data_rank(self) -> int:
        return 0 if self.adapters == "one process" else dist.get_rank() // (1 + self.tp)


def build(loop: Loop) -> nn.Module:
    torch.manual_seed(3)
    if loop.peft:
        return with_peft(without_adapters(), loop)
    head = nn.Linear(WIDTH, 3).requires_grad_(loop.head)
    return nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Tanh(), head)


def without_adapters() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def with_peft(model: Any, loop: Loop) -> nn.Module:
    """The model with PEFT's adapters in both hidden layers. One of the two matrices of each is 0 at first."""
    from peft import LoraConfig, get_peft_model  # takes seconds

    saved = ["4"] if loop.head else None
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=RANK, target_modules=["0", "2"], modules_to_save=saved))
    return adapted


def wrapped(loop: Loop) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model as this rank trains it, and the adapters that FSDP2 leaves plain."""
    if loop.adapters == "one process":
        return build(loop), []
    if loop.adapters == "ddp":
        return DistributedDataParallel(build(loop)), []
    return sharded(loop)


def sharded(loop: Loop) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model, and its plain adapters."""
    comes_later = loop.peft and loop.adapters != "sharded"
    model: Any = without_adapters().requires_grad_(False) if comes_later else build(loop)
    layers = model.get_submodule("base_model.model") if loop.peft and not comes_later else model
    plain = [] if loop.adapters == "sharded" else [p for n, p in model.named_parameters() if n.endswith((".a", ".b"))]
    shape = loop.mesh or (dist.get_world_size(),)
    # PEFT takes an axis of any other name for tensor parallelism.
    names = ("fsdp",) if loop.peft else ("replicate", "shard")[2 - len(shape) :]
    mesh = mesh_of((2, 2), ("dp", "tp")) if loop.tp else mesh_of(shape, names)
    if loop.tp:
        cut = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"0.base": cut, "2.base": cut})
    options: dict[str, Any] = {"mesh": mesh["dp"] if loop.tp else mesh}
    options |= {"ignored_params": set(plain)} if plain else {}
    for layer in (layers[0], layers[2], model):
        fully_shard(layer, **options)
    if comes_later:
        model = with_peft(model, loop)
        plain = [p for n, p in model.named_parameters() if ".lora_" in n]
    if loop.adapters == "hooks":
        for p in plain:
            p.register_post_accumulate_grad_hook(average)
    return model, plain


def average(p: Tensor) -> None:
    """Average a gradient over all ranks. What has been averaged before stays as it is."""
    assert p.grad is not None
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def rows(rank: int, window: int, piece: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * window + 10 * rank + piece)
    return torch.randn(UNITS[rank][piece], WIDTH, generator=generator)


def loss_of(model: nn.Module, x: Tensor, loop: Loop) -> Tensor:
    """The mean over rows, or their sum over a constant where pieces weigh by their rows."""
    loss: Tensor = (model(x) - x[:, :3]).square().sum(-1).mean()
    return loss * (len(x) / 3.0 if loop.weighted else 1.0)


def train(loop: Loop, probed: bool) -> dict[str, Any]:
    """Train on this rank: its weights, norms and collectives; with a probe also its windows, and the same by hand."""
    model, plain = wrapped(loop)
    named = {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, foreach=False)
    probe, n_issued = None, 0
    result: dict[str, Any] = {"norms": [], "windows": [], "by hand": []}
    if probed:
        options: dict[str, Any] = {"unit": "rows", "verbose": False, "every": 1, "per_example": "never"} | loop.options
        probe = sonde.attach(model, optimizer, metric=loop.metric, log=sonde.RunLog(every=1000), **options)
    for window in range(WINDOWS):
        whole = whole_parameters(model)
        squares = {"euclidean": None, "adam": adam_weights(optimizer, named) if window else {}}
        before = n_collectives()
        for k in range(2):
            x = rows(loop.data_rank, window, k)
            counts: dict[str, Any] = {"units": len(x)} | ({"weight": len(x)} if loop.weighted else {})
            with probe.piece(**counts) if probe else contextlib.nullcontext(), reducing(model, k == 1):
                loss_of(model, x, loop).backward()
        if loop.adapters == "loop":
            for p in plain:
                average(p)
        if loop.clips:
            result["norms"].append(float(probe.clip_grad_norm_(0.5) if probe else clip_alone(model)))
        elif probe:
            probe.step()
        optimizer.step()
        optimizer.zero_grad()
        n_issued += n_collectives() - before
        if probe:
            result["windows"].append({metric: last_window(probe, metric) for metric in loop.metric})
            exact = {m: None if squares[m] == {} else by_hand(whole, loop, window, squares[m]) for m in loop.metric}
            result["by hand"].append(exact)
    result |= {"collectives": n_issued, "weights": local_weights(model)}
    if probe:
        result |= {"reading": probe.reading(), "alerts": dict(probe.alerts), "setup": probe._setup()}
        probe.close()
    return result


def reducing(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Gradients are averaged over ranks in the last piece alone."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()  # type: ignore[no-any-return]
    if outermost := next((m for m in model.modules() if isinstance(m, FSDPModule)), None):
        outermost.set_requires_gradient_sync(is_last)
    return contextlib.nullcontext()


def clip_alone(model: nn.Module) -> Tensor:
    """The clip of a run without a probe: over all ranks, as the probe's."""
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    return sonde.clip_grad_norm_(list(model.parameters()), 0.5, **({"mesh": mesh} if mesh else {}))


def by_hand(whole: dict[str, Tensor], loop: Loop, window: int, moments: dict[str, Tensor] | None = None) -> Values:
    """(tr Σ, |G|²) of the total and of each group, from the whole gradient of every piece of every rank in float64.

    With `moments`, each element is weighted by its P, as in Adam's metric.
    """
    model = copy.deepcopy(build(loop)).double()
    model.load_state_dict({name: value.double() for name, value in whole.items()})
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    pieces, units = [], []
    for rank in range(loop.n_data_ranks):
        for k in range(2):
            x = rows(rank, window, k).double()
            grads = torch.autograd.grad(loss_of(model, x, loop), list(named.values()))
            roots = [moments[n].sqrt() if moments else 1.0 for n in named]
            weighted = ((g * root).flatten() for g, root in zip(grads, roots, strict=True))
            pieces.append(dict(zip(named, weighted, strict=True)))
            units.append(float(len(x)))
    weights = units if loop.weighted else [1.0] * len(units)
    if loop.options.get("tap") == "comm_hook":  # a rank's whole window is one piece
        pieces = [{n: a[n] + b[n] for n in named} for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
        units = [4.0 / (1 / n + 1 / m) for n, m in zip(units[::2], units[1::2], strict=True)]
        weights = [2.0] * len(units)
    solved = []
    for group in dict.fromkeys(map(block_of, named)):
        gradients = [torch.cat([piece[n] for n in named if block_of(n) == group]) for piece in pieces]
        solved.append(window_by_hand(gradients, weights, units, torch.stack(gradients).sum(0) / loop.n_data_ranks))
    return with_total(solved)


def check(probed: list[dict[str, Any]], plain: list[dict[str, Any]], n_more: int) -> None:
    """Values are those by hand and alike on all ranks, training is unchanged, and a window adds so many collectives."""
    for result, without in zip(probed, plain, strict=True):
        assert result["alerts"] == {}
        for window, by_metric in zip(result["windows"], result["by hand"], strict=True):
            for metric, exact in by_metric.items():
                if exact is None:  # before the optimizer's first step
                    assert window[metric] is None
                    continue
                assert window[metric] is not None, result["reading"].dropped
                assert_same_values(window[metric], exact, result["reading"].effective_units)
        assert all(map(torch.equal, result["weights"], without["weights"]))
        assert result["norms"] == without["norms"]
        assert result["collectives"] - without["collectives"] == WINDOWS * n_more
    assert len({str(result["windows"]) for result in probed}) == 1

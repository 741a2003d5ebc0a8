"""Low-rank adapters beside weights that FSDP2 shards: with the numbers of one process, and training unchanged.

What makes adapters after the model was sharded leaves them plain: each rank holds them whole, and hooks or the loop
average their gradients.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

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
from tests.oracles import window_by_hand
from tests.ranks import Ranks, mesh_of

WIDTH, RANK = 10, 3
UNITS = ((4, 2), (3, 5), (1, 6), (2, 2))
"""Rows of the two pieces of each rank."""


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
        adapters: "sharded" with the rest; or plain and averaged by "hooks" once a gradient is accumulated, or by the
            "loop" before the step.
        head: whether a sharded layer is trained too.
        mesh: shape of the mesh of FSDP2; None for all ranks.
        tp: pairs of ranks also cut the frozen layers by tensor parallelism; FSDP2 has the others.
        clips: the probe clips, rather than only ending windows.
        weighted: pieces weigh by their units.
        options: of the probe.
    """

    adapters: str
    head: bool = True
    mesh: tuple[int, ...] | None = None
    tp: bool = False
    clips: bool = True
    weighted: bool = False
    options: dict[str, Any] = field(default_factory=dict)


WINDOWS = 3


def build(loop: Loop) -> nn.Sequential:
    torch.manual_seed(3)
    head = nn.Linear(WIDTH, 3).requires_grad_(loop.head)
    return nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Tanh(), head)


def sharded(loop: Loop) -> tuple[nn.Sequential, list[nn.Parameter]]:
    """The model, and its plain adapters."""
    model = build(loop)
    plain = [p for n, p in model.named_parameters() if n.endswith((".a", ".b"))] if loop.adapters != "sharded" else []
    shape = loop.mesh or (dist.get_world_size(),)
    mesh = mesh_of((2, 2), ("dp", "tp")) if loop.tp else mesh_of(shape, ("replicate", "shard")[2 - len(shape) :])
    if loop.tp:
        cut = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"0.base": cut, "2.base": cut})
    options: dict[str, Any] = {"mesh": mesh["dp"] if loop.tp else mesh}
    options |= {"ignored_params": set(plain)} if plain else {}
    for layer in (model[0], model[2], model):
        fully_shard(layer, **options)
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
    model, plain = sharded(loop)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    rank, probe, n_issued = dist.get_rank() // (1 + loop.tp), None, 0
    result: dict[str, Any] = {"norms": [], "windows": [], "by hand": []}
    if probed:
        options: dict[str, Any] = {"unit": "rows", "verbose": False, "every": 1, "per_example": "never"} | loop.options
        probe = sonde.attach(model, optimizer, log=sonde.RunLog(every=1000), **options)
    for window in range(WINDOWS):
        whole = whole_parameters(model)
        before = n_collectives()
        for k in range(2):
            model.set_requires_gradient_sync(k == 1)  # type: ignore[operator]
            x = rows(rank, window, k)
            counts: dict[str, Any] = {"units": len(x)} | ({"weight": len(x)} if loop.weighted else {})
            with probe.piece(**counts) if probe else contextlib.nullcontext():
                loss_of(model, x, loop).backward()
        if loop.adapters == "loop":
            for p in plain:
                average(p)
        if loop.clips and probe:
            result["norms"].append(float(probe.clip_grad_norm_(0.5)))
        elif loop.clips:
            frozen: Any = model[0].get_parameter("base.weight")
            norm = sonde.clip_grad_norm_(list(model.parameters()), 0.5, mesh=frozen.device_mesh)
            result["norms"].append(float(norm))
        elif probe:
            probe.step()
        optimizer.step()
        optimizer.zero_grad()
        n_issued += n_collectives() - before
        if probe:
            result["windows"].append(last_window(probe))
            result["by hand"].append(by_hand(whole, loop, window))
    result |= {"collectives": n_issued, "weights": local_weights(model)}
    if probe:
        result |= {"reading": probe.reading(), "alerts": dict(probe.alerts), "setup": probe._setup()}
        probe.close()
    return result


def by_hand(whole: dict[str, Tensor], loop: Loop, window: int) -> Values:
    """(tr Σ, |G|²) of the total and of each group, from the whole gradient of every piece of every rank in float64."""
    model = copy.deepcopy(build(loop)).double()
    model.load_state_dict({name: value.double() for name, value in whole.items()})
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    n_ranks, pieces, units = dist.get_world_size() // (1 + loop.tp), [], []
    for rank in range(n_ranks):
        for k in range(2):
            x = rows(rank, window, k).double()
            grads = torch.autograd.grad(loss_of(model, x, loop), list(named.values()))
            pieces.append(dict(zip(named, (g.flatten() for g in grads), strict=True)))
            units.append(float(len(x)))
    weights = units if loop.weighted else [1.0] * len(units)
    solved = []
    for group in dict.fromkeys(map(block_of, named)):
        gradients = [torch.cat([piece[n] for n in named if block_of(n) == group]) for piece in pieces]
        solved.append(window_by_hand(gradients, weights, units, torch.stack(gradients).sum(0) / n_ranks))
    return with_total(solved)


LOOPS = {
    "sharded": (2, Loop("sharded")),
    "sharded, HSDP, no clip": (4, Loop("sharded", mesh=(2, 2), clips=False, weighted=True)),
    "averaged in hooks": (2, Loop("hooks")),
    "averaged in hooks, weights, no clip": (2, Loop("hooks", weighted=True, clips=False)),
    "averaged in hooks, HSDP": (4, Loop("hooks", mesh=(2, 2), weighted=True)),
    "averaged by the loop": (2, Loop("loop", weighted=True)),
    "adapters alone, sharded": (2, Loop("sharded", head=False)),
    "adapters alone, averaged in hooks": (2, Loop("hooks", head=False, weighted=True)),
    "adapters alone, averaged in hooks, no clip": (2, Loop("hooks", head=False, clips=False)),
    "adapters alone, FSDP2 over TP": (4, Loop("hooks", tp=True, head=False, weighted=True)),
    "adapters alone, HSDP": (4, Loop("hooks", mesh=(2, 2), head=False)),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.shows("noise scale", "LoRA below FSDP2")
def test_values_and_training_unchanged(request: pytest.FixtureRequest, name: str) -> None:
    """Bit for bit, and one collective a window, which the clip shares. The hooks' own are the same without a probe."""
    n_ranks, loop = LOOPS[name]
    ranks: Ranks = request.getfixturevalue(f"ranks{n_ranks}")
    results = ranks(train, loop, True)
    for result, without in zip(results, ranks(train, loop, False), strict=True):
        assert result["alerts"] == {}
        assert result["setup"]["ranks"] == n_ranks // (1 + loop.tp)
        for window, exact in zip(result["windows"], result["by hand"], strict=True):
            assert window is not None, result["reading"].dropped
            assert_same_values(window, exact, result["reading"].effective_units)
        assert all(map(torch.equal, result["weights"], without["weights"]))
        assert result["norms"] == without["norms"]
        assert result["collectives"] - without["collectives"] == (0 if loop.clips else WINDOWS)
    assert len({str(result["windows"]) for result in results}) == 1


def measured(model: nn.Module, batches: list[Tensor]) -> tuple[float | None, float | None]:
    """tr Σ and |G|² at fixed weights, from all batches."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return loss_of(model, x, Loop("sharded"))

    reading = sonde.measure(model, loss, batches, unit="rows", until=0.01, verbose=False).reading
    return reading.trace_cov, reading.grad_sq


def measured_on_rank(loop: Loop) -> tuple[float | None, float | None]:
    model, _ = sharded(loop)
    return measured(model, [rows(dist.get_rank(), window, k) for window in range(6) for k in range(2)])


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.shows("measure", "LoRA below FSDP2")
def test_a_measurement_is_that_of_one_process(ranks2: Ranks, head: bool) -> None:
    loop = Loop("hooks", head=head)
    batches = [rows(rank, window, k) for window in range(6) for k in range(2) for rank in range(2)]
    expected = measured(build(loop), batches)
    for found in ranks2(measured_on_rank, loop):
        assert found == pytest.approx(expected, rel=1e-6)  # gradients are of fp32

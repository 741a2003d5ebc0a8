"""A policy cut over ranks, its prompts dealt to the ranks unevenly, and its noise scale by hand."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from sonde.policy.scoring.rollouts import Rollouts
from tests.ranks import mesh_of
from tests.small_policy import N_TOKENS, STATISTICS, drawn, policy

WIDTH = 12


class BlockPolicy(nn.Module):
    """Logits of the next token; layers of every kind that tensor and sequence parallelism cut, and a tiny parameter."""

    def __init__(self, *, scaled: bool = True) -> None:
        super().__init__()
        self.token = nn.Embedding(N_TOKENS + 1, WIDTH)
        self.scale = nn.Parameter(torch.ones(1)) if scaled else None
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, N_TOKENS + 1, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[responses, length] → [responses, length, tokens]."""
        x = self.token(input_ids)
        x = x if self.scale is None else x * self.scale
        logits: Tensor = self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))
        return logits


def block_policy(*, scaled: bool = True) -> BlockPolicy:
    torch.manual_seed(3)
    model = BlockPolicy(scaled=scaled)
    with torch.no_grad():
        model.head.weight.mul_(3.0)
    return model


def responses() -> Rollouts:
    """Seven prompts with 1, 4, 4, 2, 4, 4 and 3 completions."""
    everything = drawn(policy(), 0, 7, seed=1)
    n_kept = {0: 1, 3: 2, 6: 3}
    kept = [i for i in range(len(everything)) if i % 4 < n_kept.get(int(everything.prompt[i]), 4)]
    # One completion alone has an advantage of its own; a mean of 0 in its group would leave it none.
    advantage = torch.linspace(-1.0, 1.5, len(kept))
    return dataclasses.replace(everything.rows(torch.tensor(kept)), advantage=advantage)


def own_responses(data_rank: int, n_data_ranks: int) -> Rollouts:
    """The first rank has two prompts, one of them with a single completion, and the last rank has all that remain."""
    everything = responses()
    first = {1: [0], 2: [0, 2], 4: [0, 1, 2, 4]}[n_data_ranks]
    end = [*first[1:], 7]
    chosen = (everything.prompt >= first[data_rank]) & (everything.prompt < end[data_rank])
    return everything.rows(chosen.nonzero()[:, 0])


def cut(kind: str) -> tuple[BlockPolicy, Any, int, int]:
    """A policy cut over all ranks; its mesh, this rank's data, and how many ranks have data of their own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = block_policy(scaled="sp" not in kind)
    n_data = world if "sdp" in kind and "over" not in kind else world // 2
    mesh: Any = mesh_of((world,)) if n_data == world else mesh_of((n_data, 2), ("dp", "tp"))
    if "hsdp" in kind:
        mesh = mesh_of((world // 2, 2), ("replicate", "shard"))
    fsdp_mesh = mesh
    if n_data < world:
        tensor_parallel(model, mesh["tp"], in_sequence="sp" in kind)
        fsdp_mesh = mesh["dp"]
    if "sdp" in kind:
        options: dict[str, Any] = {"mesh": fsdp_mesh}
        if "bf16" in kind:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if "ignored" in kind:
            assert model.scale is not None
            options["ignored_params"] = {model.scale}
        fully_shard(model.up, **options)
        fully_shard(model, **options)
    return model, mesh, rank // (world // n_data), n_data


def tensor_parallel(model: nn.Module, mesh: Any, *, in_sequence: bool) -> None:
    between = Shard(1) if in_sequence else Replicate()
    plan: dict[str, Any] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan | ({"norm": SequenceParallel()} if in_sequence else {}))


def by_hand(kind: str) -> tuple[float, float, float]:
    """tr Σ, |G|² and the completions' part, from one backward of every prompt and of every half in one process.

    In fp64; in bf16 the gradients are those of a bf16 model, and only the sums are in fp64.
    """
    model: nn.Module = copy.deepcopy(block_policy(scaled="sp" not in kind))
    model = model.bfloat16() if "bf16" in kind else model.double()
    rollouts = responses()
    credit = rollouts.credit()

    def gradient(rows: Tensor) -> Tensor:
        s, _ = STATISTICS(model, rollouts.rows(rows))
        total = (credit[rows].to(s) * torch.where(rollouts.mask[rows].bool(), s, 0.0)).sum()
        return torch.cat([g.flatten().double() for g in torch.autograd.grad(total, list(model.parameters()))])

    prompts = rollouts.order(1)
    h = torch.stack([gradient(rows) for rows in prompts])
    w = torch.tensor([float(len(rows)) for rows in prompts], dtype=torch.float64)
    a = w / w.sum()
    small, big = float((h.square().sum(1) / a).sum()), float(h.sum(0).square().sum())
    u, v = 1.0, float(a.square().sum())
    trace_cov, grad_sq = (small - big) / (u - v), (u * big - v * small) / (u - v)
    return trace_cov, grad_sq, _within(gradient, prompts, w)


def _within(gradient: Any, prompts: list[Tensor], w: Tensor) -> float:
    """The variance of g_p given its prompt: q|m₁ − m₂|²/(q₁ + q₂), over prompts with two completions or more."""
    split = [(rows, float(weight)) for rows, weight in zip(prompts, w, strict=True) if len(rows) > 1]
    total = 0.0
    for rows, weight in split:
        n1, n2 = len(rows[::2]), len(rows[1::2])
        difference = gradient(rows[::2]) / n1 - gradient(rows[1::2]) / n2
        q = ((n1 / weight) ** 2 / n1 + (n2 / weight) ** 2 / n2) / (1 / n1 + 1 / n2)
        # In units of g_p = h_p/a_p, whose weight is w/Σw.
        total += weight * q * float(difference.square().sum()) * float(w.sum()) ** 2
    return total / sum(weight for _, weight in split)

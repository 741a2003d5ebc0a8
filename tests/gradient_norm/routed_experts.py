"""A fully sharded mixture of experts whose tokens travel to the rank of their expert."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.ranks import mesh_of
from tests.sharded import Cut

WIDTH, N_EXPERTS, VOCABULARY, LENGTH, BATCH = 8, 4, 13, 6, 8


class Experts(nn.Module):
    """One matrix for each expert: all experts, or those of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(N_EXPERTS, WIDTH, WIDTH))

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Tokens sorted by expert; `counts` says how many each expert gets."""
        w = self.w.to_local() if isinstance(self.w, DTensor) else self.w
        return torch.cat([torch.relu(part @ w[k]) for k, part in enumerate(tokens.split(counts))])


class Mixture(nn.Module):
    """Each token goes to the expert that the router ranks first; some experts get no token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, N_EXPERTS)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.ep: DeviceMesh | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=N_EXPERTS)
        outputs = self._local(x[order], counts) if self.ep is None else self._routed(x[order], counts, self.ep)
        mixed = x + weight[:, None] * torch.zeros_like(x).index_copy(0, order, outputs)
        out: Tensor = self.head(mixed)
        return out

    def _local(self, x: Tensor, counts: Tensor) -> Tensor:
        out: Tensor = self.experts(x, counts.tolist())
        return out

    def _routed(self, x: Tensor, counts: Tensor, ep: DeviceMesh) -> Tensor:
        """Send tokens to their experts' ranks, and the outputs back."""
        n_ranks, n_local = ep.size(), N_EXPERTS // ep.size()
        n_sent = counts.view(n_ranks, n_local).sum(1).tolist()
        # [from each rank, for each local expert]
        arriving = all_to_all_single(counts, None, None, ep.get_group()).view(n_ranks, n_local)
        n_received = arriving.sum(1).tolist()
        received = all_to_all_single_autograd(x, n_received, n_sent, ep.get_group())
        expert = torch.arange(n_local).repeat(n_ranks).repeat_interleave(arriving.flatten())
        order = expert.argsort(stable=True)
        outputs = self.experts(received[order], arriving.sum(0).tolist())
        back = torch.zeros_like(received).index_copy(0, order, outputs)
        out: Tensor = all_to_all_single_autograd(back, n_sent, n_received, ep.get_group())
        return out


def build() -> Mixture:
    torch.manual_seed(3)
    return Mixture()


def backward(model: nn.Module, part: int = 0, n_parts: int = 1) -> None:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(4)).chunk(n_parts)[part]
    nn.functional.cross_entropy(model(tokens), tokens.flatten()).backward()


@functools.cache
def exact_gradients() -> dict[str, Tensor]:
    """The gradients of one process in float64, by name."""
    model = build().double()
    backward(model)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def experts_and_fsdp(*, dim: int | None) -> Cut:
    """Dense parameters cut over all four ranks; experts cut over two ranks (ep), and over the other two along `dim`.

    Without `dim` the other two ranks (dp) hold copies of the experts.
    """
    both = mesh_of((2, 2), ("dp", "ep"))
    everyone = both._flatten("dp_ep")
    model = build()
    model.ep = both["ep"]
    model.experts.w = nn.Parameter(distribute_tensor(model.experts.w.detach(), both["ep"], [Shard(0)]))
    if dim is not None:
        fully_shard(model.experts, mesh=both["dp"], shard_placement_fn=lambda _: Shard(dim))
        fsdp: Any = model.experts
        fsdp.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        fsdp.set_gradient_divide_factor(float(everyone.size()))  # an expert gets tokens from all ranks' data
        fully_shard(model, mesh=everyone)
    else:
        fully_shard(model, mesh=everyone, ignored_params={model.experts.w})
    backward(model, dist.get_rank(), 4)
    if dim is None:
        gradient = cast(DTensor, model.experts.w.grad)._local_tensor
        dist.all_reduce(gradient, group=both.get_group("dp"))
        gradient /= everyone.size()
    return Cut(dict(model.named_parameters()), both, collectives=1 if dim is not None else 2, keep=model)

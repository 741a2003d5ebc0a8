"""Whether a hook divides by the number of ranks as DDP does, bit for bit; tried on a bucket of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_VALUES = 65_536
"""Values of each dtype that are divided, of all ranks together."""
_EXPONENTS = {torch.float16: (-10, 10)}
_USUAL_EXPONENTS = (-60, 60)


def divided(buffer: Tensor, n_ranks: int) -> Tensor:
    """A bucket of dense gradients divided by the number of ranks, in place, as DDP divides what it copies into one."""
    return buffer.mul_(1.0 / n_ranks)


@torch.enable_grad()
def why_division_differs(model: DistributedDataParallel, parameters: Sequence[Tensor]) -> str:
    """Let DDP average known gradients, and compare them bit for bit. All ranks of the model have to call this.

    DDP divides in one way where it copies a gradient into its bucket, and with gradient_as_bucket_view in another where
    the gradient lies there already. Both are tried.

    Args:
        model: whose process group and options are used; it is not touched.
        parameters: whose dtypes and devices are used.

    Returns:
        Where DDP and `divided` differ, in words; empty if they agree. The same on all ranks.
    """
    group = model.process_group
    n_ranks, rank, device = group.size(), group.rank(), parameters[0].device
    n_each = max(_VALUES // n_ranks, 16)
    dtypes = list(dict.fromkeys(p.dtype for p in parameters))
    values = [_values(n_ranks * n_each, dtype, device) for dtype in dtypes]
    # Each rank adds its own values to zeros, so that the sum over ranks is exact in any order.
    own = [torch.zeros_like(v) for v in values]
    for part, whole in zip(own, values, strict=True):
        part[rank * n_each : (rank + 1) * n_each] = whole[rank * n_each : (rank + 1) * n_each]
    module = _Products(values)
    averaging = DistributedDataParallel(
        module, process_group=group, gradient_as_bucket_view=model.gradient_as_bucket_view
    )
    for which in ("that it copies into its buckets", "that lie in its buckets already"):
        averaging(own).backward()
        for p, whole in zip(module.factors, values, strict=True):
            assert p.grad is not None
            if not torch.equal(p.grad, divided(whole.clone(), n_ranks)):
                return f"on {n_ranks} ranks DDP rounds the average of gradients {which} in another way"
            p.grad.zero_()
    return ""


class _Products(nn.Module):
    """A sum of products, whose gradient is what the factors are multiplied by."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.zeros_like(v)) for v in like)

    def forward(self, values: Sequence[Tensor]) -> Tensor:
        # The dtype of the sums does not matter, since each factor's gradient is converted to the factor's own dtype:
        # fp32, which every device has.
        products = [(p * v).sum().float() for p, v in zip(self.factors, values, strict=True)]
        return torch.stack(products).sum()


def _values(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of many sizes, the same on all ranks; [n]."""
    generator = torch.Generator(device="cpu").manual_seed(3)
    low, high = _EXPONENTS.get(dtype, _USUAL_EXPONENTS)
    exponents = torch.randint(low, high, (n,), generator=generator, device="cpu")
    mantissas = torch.randn(n, generator=generator, dtype=torch.float64, device="cpu")
    return (mantissas * 2.0**exponents).to(dtype).to(device)

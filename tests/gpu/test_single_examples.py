"""On a GPU, 16-bit factors are multiplied by its tensor cores: as exactly as copies of them in float64."""

from __future__ import annotations

import pytest
import torch

from sonde.batch_size.per_example.gradients import OuterProducts, inner_products, sq_norms
from sonde.parallel.devices import default_device

pytestmark = pytest.mark.skipif(default_device().type == "cpu", reason="needs an accelerator")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("positions", [3, 500], ids=["Gram matrices", "formed"])
@pytest.mark.parametrize("groups", [(), (2,)], ids=["", "groups"])
@pytest.mark.parametrize("staging_bytes", [2**16, 2**27])
def test_squares_and_products(dtype: torch.dtype, positions: int, groups: tuple[int, ...], staging_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        OuterProducts(*(torch.randn(5, *groups, positions, width, generator=generator).to(dtype) for width in (48, 80)))
        for _ in range(2)
    )

    def on(factors: OuterProducts, device: torch.device) -> OuterProducts:
        wider = {} if device.type != "cpu" else {"dtype": torch.float64}
        return OuterProducts(factors.left.to(device, **wider), factors.right.to(device, **wider))

    device, cpu = default_device(), torch.device("cpu")
    squares = sq_norms(on(x, cpu), staging_bytes)
    products = inner_products(on(x, cpu), on(y, cpu), staging_bytes)
    torch.testing.assert_close(sq_norms(on(x, device), staging_bytes).cpu(), squares, rtol=1e-5, atol=0.0)
    atol = 1e-5 * float(squares.max())
    found = inner_products(on(x, device), on(y, device), staging_bytes).cpu()
    torch.testing.assert_close(found, products, rtol=0.0, atol=atol)

"""The noise scale of low-rank adapters: with the numbers of one process, and training unchanged."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import sonde
from tests.batch_size.lora_loops import Loop, build, check, loss_of, rows, sharded, train
from tests.ranks import Ranks

TOO, ALONE = ("euclidean", "adam"), ("adam",)
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
    "adapters alone, Adam's metric, no clip": (2, Loop("hooks", head=False, clips=False, metric=TOO)),
    "adapters alone, averaged by the loop, Adam's metric alone": (
        2,
        Loop("loop", head=False, weighted=True, metric=ALONE),
    ),
    "adapters alone, FSDP2 over TP, Adam's metric": (4, Loop("hooks", tp=True, head=False, weighted=True, metric=TOO)),
}
ADAM = "adapters alone, Adam's metric, no clip"


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in LOOPS if name != ADAM),
        pytest.param(ADAM, marks=pytest.mark.shows("adam metric", "LoRA below FSDP2")),
    ],
)
@pytest.mark.shows("noise scale", "LoRA below FSDP2")
def test_values_and_training_unchanged(request: pytest.FixtureRequest, name: str) -> None:
    """Bit for bit, and one collective a window, which the clip shares. The hooks' own are the same without a probe."""
    n_ranks, loop = LOOPS[name]
    ranks: Ranks = request.getfixturevalue(f"ranks{n_ranks}")
    results = ranks(train, loop, True)
    check(results, ranks(train, loop, False), not loop.clips)
    assert {result["setup"]["ranks"] for result in results} == {n_ranks // (1 + loop.tp)}


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

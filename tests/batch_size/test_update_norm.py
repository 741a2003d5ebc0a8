"""The norm of the update against the whole difference of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.batch_size.taps.update import UpdateSample
from tests.ranks import Ranks, mesh_of


def distance(now: Iterable[Tensor], before: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in zip(now, before, strict=True)))


def mixed_model(width: int) -> nn.Module:
    """A convolution in another memory format, a parameter that is a strided view, two dtypes."""
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.Linear(width, width), nn.Linear(width, 4).bfloat16())
    model[0].weight = nn.Parameter(torch.randn(width, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    model[1].weight = nn.Parameter(torch.randn(width, 2 * width)[:, ::2])
    return model


@pytest.mark.parametrize(("width", "tolerance"), [(32, 1e-12), (256, 0.05)])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_sample_stands_for_all_elements(
    optimizer: Callable[..., torch.optim.Optimizer], width: int, tolerance: float
) -> None:
    """Of 16,384 elements, all are read. Of 74,000 random ones, one in 4 shows the norm to 1 %."""
    torch.manual_seed(0)
    model = mixed_model(width)
    sample = UpdateSample([*model.parameters()], None, torch.device("cpu"))
    assert float(sample.take()) == 0.0
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        sample.before()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer(model.parameters(), lr=1e-2).step()
        sample.after()
        norm = distance((p.detach() for p in model.parameters()), before)
        assert float(sample.take()) ** 0.5 == pytest.approx(norm, rel=tolerance)
    sample.after()  # no step was read since
    assert float(sample.take()) == 0.0


def trained(model: nn.Module, folder: str, rank: int = 0, every: int = 1) -> list[float]:
    """The norms of the steps of a few windows, and those in the log."""
    generator, optimizer = torch.Generator().manual_seed(rank), torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms: list[float] = []
    with sonde.attach(
        model, optimizer, unit="rows", units_per_piece="first dim", every=every,
        log=sonde.RunLog(folder, every=1), verbose=False,
    ) as probe:  # fmt: skip
        for _ in range(8):
            for _ in range(2):
                model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            probe.step()
            before = [_whole(p).clone() for p in model.parameters()]
            optimizer.step()
            norms.append(distance(map(_whole, model.parameters()), before))
            optimizer.zero_grad()
    return norms


def _whole(p: Any) -> Tensor:
    whole: Tensor = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return whole


def logged(folder: Path) -> list[float | None]:
    return [reading.metrics["update/norm"] for reading in sonde.read_run(folder).readings]


def test_the_log_has_the_norm_of_each_step_with_the_window_after_it(tmp_path: Path) -> None:
    norms = trained(nn.Linear(6, 5), str(tmp_path))
    assert logged(tmp_path)[0] is None
    assert logged(tmp_path)[1:] == pytest.approx(norms[:-1], rel=1e-6)


def test_a_window_that_is_not_measured_may_follow(tmp_path: Path) -> None:
    """All optimizers have stepped when the next window ends. The next one that is measured brings the norm."""
    norms = trained(nn.Linear(6, 5), str(tmp_path), every=3)
    measured = [reading.window for reading in sonde.read_run(tmp_path).readings]
    assert measured == [1, 2, 5, 8]  # the last one was not: it is the end
    assert logged(tmp_path)[1:3] == pytest.approx([norms[0], norms[1]], rel=1e-6)


def cut_and_trained(folder: str) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))  # neither can be cut evenly
    fully_shard(model, mesh=mesh_of((4,)))
    return trained(model, f"{folder}/{dist.get_rank()}" if dist.get_rank() else folder, dist.get_rank())


def test_the_shards_of_fsdp2_add_up(ranks4: Ranks, tmp_path: Path) -> None:
    norms, *others = ranks4(cut_and_trained, str(tmp_path))
    assert all(other == norms for other in others)
    assert logged(tmp_path)[1:] == pytest.approx(norms[:-1], rel=1e-6)


@pytest.mark.parametrize("disturbed", ["", "state", "batch"])
def test_a_spike_of_the_update_alone_is_an_alert(disturbed: str, tmp_path: Path) -> None:
    """Adam whose moments are lost takes a first step again: all elements move by the whole rate.

    A batch with a large loss is a spike of the gradient first, which momentum carries on.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, betas=(0.9, 0.95))
    with sonde.attach(
        model, optimizer, unit="rows", units_per_piece="first dim", every=1, log=str(tmp_path), verbose=False
    ):
        for step in range(1, 130):
            x = torch.randn(2, 64, 6)
            y = x[..., :1] + torch.randn(2, 64, 1)
            for k in range(2):
                loss = (model(x[k]) - y[k]).square().mean()
                (loss * (100.0 if disturbed == "batch" and step == 120 else 1.0)).backward()
            if disturbed == "state" and step == 120:
                optimizer.state.clear()
            optimizer.step()
            optimizer.zero_grad()
    alerts = sonde.read_run(tmp_path).alerts
    assert [alert.name for alert in alerts] == (["update_spike"] if disturbed == "state" else [])
    assert all("the step of window 120 moved the parameters" in alert.message for alert in alerts)

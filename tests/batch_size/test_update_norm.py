"""The norm of the update against the whole difference of the parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.batch_size.taps.update import UpdateSample
from tests.ranks import Ranks, mesh_of


def exact(model: nn.Module, step: torch.optim.Optimizer) -> float:
    """Take a step, and return by how far it moves the parameters."""
    before = [p.detach().clone() for p in model.parameters()]
    step.step()
    return (
        float(
            sum(
                (p.detach().double() - b.double()).square().sum()
                for p, b in zip(model.parameters(), before, strict=True)
            )
        )
        ** 0.5
    )


def mixed_model(width: int) -> nn.Module:
    """A convolution in another memory format, a parameter that is a strided view, two dtypes."""
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.Linear(width, width), nn.Linear(width, 4).bfloat16())
    model[0].to(memory_format=torch.channels_last)
    model[1].weight = nn.Parameter(torch.randn(width, 2 * width)[:, ::2])
    return model


@pytest.mark.parametrize(("width", "tolerance"), [(32, 1e-12), (256, 0.05)])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_sample_stands_for_all_elements(
    optimizer: type[torch.optim.Optimizer], width: int, tolerance: float
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
        norm = exact(model, optimizer(model.parameters(), lr=1e-2))
        sample.after()
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
            pairs = zip(map(_whole, model.parameters()), before, strict=True)
            norms.append(float(sum((p - b).double().square().sum() for p, b in pairs)) ** 0.5)
            optimizer.zero_grad()
    return norms


def _whole(p: Tensor) -> Tensor:
    return p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()


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
    assert measured == [1, 2, 5, 8]
    assert logged(tmp_path)[1:] == pytest.approx([norms[window - 1] for window in measured[:-1]], rel=1e-6)


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

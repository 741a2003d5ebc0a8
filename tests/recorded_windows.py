"""Two runs whose windows were recorded before the house was rebuilt: the same numbers must come out of it.

    python -m tests.recorded_windows      # records them anew, which needs a reason

Weights and gradients are float64, so another processor rounds far below what the comparison allows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sonde
from tests.batch_size.loops import Recording

PATH = Path(__file__).parent / "recorded_windows.json"
WINDOWS = 12
SIZES = ([5, 3, 4, 8], [4, 6])
"""Units in each piece of a window: of the plain run, and of each of the two ranks."""
Row = dict[str, Any]


def _batch(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :3] + 0.5 * torch.randn(n, 3, generator=generator, dtype=torch.float64)


def _windows(sizes: list[int], wrap: type[nn.Module] | None, seed: int) -> list[Row]:
    """A row for each window: tr Σ and |G|² of the model, in two metrics, and of its groups; κ and the norm."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 3)).double()
    model = model if wrap is None else wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sink, generator = Recording(), torch.Generator().manual_seed(seed)
    log = sonde.RunLog(sink, every=1, log_windows=True)
    metric = ("euclidean", "sign")
    with sonde.attach(model, optimizer, unit="rows", every=1, metric=metric, log=log, verbose=False) as probe:
        for _ in range(WINDOWS):
            for n in sizes:
                x, y = _batch(n, generator)
                with probe.piece(units=n, weight=float(n)):
                    # Half the mean, as where the loop divides by something else than sonde assumes: κ must show it.
                    (0.5 * n * (model(x) - y).square().sum(-1).mean()).backward()
            probe.clip_grad_norm_(30.0)
            optimizer.step()
            optimizer.zero_grad()
    return [
        {
            "groups": window["groups"],
            "total": {k: v for k, v in window["metrics"].items() if k.endswith(("/trace_cov", "/grad_sq"))},
            "reading": {name: reading["metrics"][name] for name in ("gns/scale", "grad/norm")},
        }
        for window, reading in zip(sink.of_kind("window"), sink.of_kind("reading"), strict=True)
    ]


def plain() -> list[Row]:
    """One process, windows of four unequal pieces."""
    return _windows(SIZES[0], None, seed=1)


def on_ranks() -> list[Row]:
    """One of two DDP ranks, with two unequal pieces each; rank 0 has the rows."""
    return _windows(SIZES[1], DistributedDataParallel, seed=2 + dist.get_rank())


def main() -> None:
    """Record both runs."""
    from tests.ranks import Ranks

    ranks = Ranks(2)
    rows, _ = ranks(on_ranks)
    ranks.stop()
    PATH.write_text(json.dumps({"plain": plain(), "two DDP ranks": rows}) + "\n")


if __name__ == "__main__":
    main()

"""What is held besides the model's own tensors stays within the staging area, or a single example's activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sonde.batch_size.per_example import piece
from sonde.batch_size.per_example.norms import PerExampleNorms
from tests.mutants import Mutant

STAGING = 2**17
"""Bytes. The results themselves, some vectors of the number of examples, come on top: an eighth of it is allowed."""


class LiveMemory(TorchDispatchMode):
    """Watches every operator: the storages that it makes, until nothing holds them any more.

    Attributes:
        peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and (reference := StorageWeakRef(t.untyped_storage())) not in given:
                self._alive[reference] = t.untyped_storage().nbytes()
        self._alive = {reference: n for reference, n in self._alive.items() if not reference.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most memory that was alive in each call of a hook."""
    found: list[int] = []
    for name in ("add_use", "add_whole"):
        original = getattr(piece.PieceSums, name)

        def watched(self: Any, *args: Any, original: Any = original) -> None:
            with LiveMemory() as memory:
                original(self, *args)
            found.append(memory.peak)

        monkeypatch.setattr(piece.PieceSums, name, watched)
    return found


def run(model: nn.Module, x: Tensor, *, covered: bool = True, **options: Any) -> None:
    with PerExampleNorms(model, **options) as norms:
        model(x).float().square().mean().backward()
        squares = norms.take(len(x))
    assert not covered or squares.not_covered() == {}


# Weight gradients are 2 to 16 times the staging area, and so are the activations of all examples together.
CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear, formed in blocks of rows": (nn.Linear(256, 300), (8, 400, 256)),
    "linear, by Gram matrices": (nn.Linear(512, 512), (16, 60, 512)),
    "linear, rows": (nn.Linear(512, 512), (64, 512)),
    "layer norm": (nn.LayerNorm(256), (8, 800, 256)),
    "rms norm": (nn.RMSNorm(256), (8, 800, 256)),
    "group norm": (nn.GroupNorm(4, 16), (64, 16, 20, 20)),
    "convolution": (nn.Conv2d(8, 64, 3), (64, 8, 12, 12)),
    "convolution, few places": (nn.Conv2d(128, 128, 3), (32, 128, 4, 4)),
}


@pytest.mark.parametrize(("model", "shape"), CASES.values(), ids=CASES)
def test_a_layer(peaks: list[int], model: nn.Module, shape: tuple[int, ...]) -> None:
    run(model, torch.randn(shape), staging_bytes=STAGING)
    of_one_example = 4 * torch.Size(shape[1:]).numel()
    largest = max(p.numel() for p in model.parameters()) * 4
    assert max(peaks) < max(STAGING, 4 * of_one_example if isinstance(model, nn.GroupNorm) else 0) * 1.125 + 4 * 4096
    if isinstance(model, nn.Linear):
        assert max(peaks) < largest


def test_the_default_staging_area_holds_a_layer_of_a_large_model(peaks: list[int]) -> None:
    """A weight gradient of 36 MB is never formed whole."""
    model = nn.Linear(3000, 3000, bias=False)
    run(model, torch.randn(1, 2000, 3000))
    assert max(peaks) < 8 * 2**20 * 1.125


def test_16_bit_factors_are_copied_in_blocks(peaks: list[int]) -> None:
    run(nn.Linear(256, 300, bias=False).bfloat16(), torch.randn(8, 2000, 256).bfloat16(), staging_bytes=STAGING)
    kept = 4 * (256 + 300) * 2  # the vectors of the projections, in 16 bits too
    assert max(peaks) < STAGING * 1.25 + kept


def test_lookups(peaks: list[int]) -> None:
    ids = torch.randint(2000, (16, 200))
    run(nn.Embedding(2000, 128), ids, staging_bytes=STAGING)
    assert max(peaks) < STAGING * 1.25


@pytest.mark.parametrize("n_positions", [16, 200])
def test_a_tied_head_keeps_less_than_a_weight_gradient(peaks: list[int], n_positions: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4000, 64), nn.Linear(64, 4000, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    ids = torch.randint(4000, (16, n_positions))
    run(Tied(), ids, staging_bytes=STAGING)
    kept = ids.numel() * 64 * 4  # one row of 64 for each lookup, where the logits' gradient takes 62 times as much
    assert kept < max(peaks) < kept + STAGING * 1.25 < 4000 * 64 * 4 + STAGING * 1.25


def test_the_check_sees_a_layer_that_forms_all_gradients_at_once(peaks: list[int]) -> None:
    mutant = Mutant(
        "all examples at once",
        "sonde.batch_size.per_example.gradients:chunks",
        "size = max(1, staging_bytes // max(n_bytes_each, 1))",
        "size = n",
    )
    with mutant.applied():
        run(nn.Linear(256, 300), torch.randn(8, 400, 256), staging_bytes=STAGING)
    assert max(peaks) > 2 * STAGING

"""Activation checkpoints: the numbers are the same, and no activation is kept that they throw away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from sonde.batch_size.per_example.norms import PerExampleNorms
from tests.batch_size.per_example.oracle import assert_as, assert_exact, exact_squares, shares_of

B, T, WIDTH, VOCABULARY = 4, 6, 8, 11


class Checkpointed(nn.Module):
    """Blocks in checkpoints, nested if `depth` is 2: [B, T] → [B, T, vocabulary]."""

    def __init__(self, *, reentrant: bool, depth: int = 1, shared: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        blocks = [
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(dropout),
                nn.Linear(WIDTH, WIDTH),
            )
            for _ in range(3)
        ]  # fmt: skip
        self.blocks = nn.ModuleList([blocks[0]] * 3 if shared else blocks)
        self.reentrant, self.depth, self.is_on = reentrant, depth, True

    def run(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant) if self.is_on else block(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.depth == 2:
                x = x + self.run(lambda y, block=block: self.run(block[2:], self.run(block[:2], y)), x)
            else:
                x = x + self.run(block, x)
        return self.head(x)


def shares(model: Any) -> Tensor:
    """Runs the measured model with checkpoints, and the oracle's copy without: autograd.grad refuses reentrant ones."""
    ids = torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(0))
    return shares_of(ids)(model)


def without_checkpoints(model: Checkpointed) -> Callable[[nn.Module], Tensor]:
    def either(m: Any) -> Tensor:
        m.is_on = m is model
        return shares(m)

    return either


@pytest.mark.parametrize(
    ("reentrant", "depth"), [(False, 1), (False, 2), (True, 1)], ids=["non-reentrant", "nested", "reentrant"]
)
def test_checkpointed_blocks(reentrant: bool, depth: int) -> None:
    model = Checkpointed(reentrant=reentrant, depth=depth).double()
    assert_exact(model, without_checkpoints(model))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_that_is_shared_by_checkpoints(depth: int) -> None:
    model = Checkpointed(reentrant=False, depth=depth, shared=True).double()
    assert_exact(model, without_checkpoints(model))


def test_a_block_shared_by_reentrant_checkpoints_is_covered_from_the_second_piece_on() -> None:
    """A reentrant checkpoint hides how often a layer is called until backward has begun."""
    model = Checkpointed(reentrant=True, shared=True).double()
    exact = exact_squares(model, without_checkpoints(model))
    model.is_on = True
    found = []
    with PerExampleNorms(model) as norms:
        for _ in range(2):
            shares(model).sum().backward()
            found.append(norms.take(B))
    assert "used again after its first use" in found[0].not_covered()["blocks.0.1.weight"]
    assert_as(found[1], exact)


def test_a_model_that_is_one_reentrant_checkpoint() -> None:
    """All of its backward then runs inside another one."""
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    x = torch.randn(B, T, WIDTH, dtype=torch.float64, requires_grad=True)
    exact = exact_squares(inner, shares_of(x))
    with PerExampleNorms(inner) as norms:
        shares_of(x)(Wrapped(inner)).sum().backward()
        squares = norms.take(B)
    assert_as(squares, exact)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


def activations_alive(model: Checkpointed, *, measured: bool) -> int:
    """How many inputs of linear layers in blocks are still in memory between forward and backward."""
    inputs: list[StorageWeakRef] = []
    layers = [layer for block in model.blocks for layer in block if isinstance(layer, nn.Linear)]
    watches = [
        layer.register_forward_hook(
            lambda layer, args, output: inputs.append(StorageWeakRef(args[0].untyped_storage()))
        )
        for layer in layers
    ]
    norms = PerExampleNorms(model)
    if measured:
        norms.open()
    loss = shares(model).sum()
    alive = sum(not reference.expired() for reference in inputs)
    loss.backward()
    if measured:
        assert norms.take(B).not_covered() == {}
    norms.close()
    for watch in watches:
        watch.remove()
    return alive


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_what_checkpoints_throw_away_is_not_kept(reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    assert activations_alive(model, measured=True) == activations_alive(model, measured=False) == 0
    model.is_on = False
    assert activations_alive(model, measured=True) == activations_alive(model, measured=False) == 6


def test_several_backwards_through_a_checkpoint() -> None:
    model = Checkpointed(reentrant=False).double()
    exact = exact_squares(model, lambda m: 3 * without_checkpoints(model)(m))
    model.is_on = True
    with PerExampleNorms(model, several_backwards=True) as norms:
        loss = shares(model).sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        squares = norms.take(B)
    assert_as(squares, exact)


def test_checkpoints_of_overlapping_pieces_are_right_or_named() -> None:
    model = Checkpointed(reentrant=False).double()
    exact = exact_squares(model, without_checkpoints(model))
    model.is_on = True
    with PerExampleNorms(model) as norms:
        losses = [shares(model).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
            squares = norms.take(B)
            assert_as(squares, exact, not_covered=squares.not_covered())


def test_guard_the_functions_of_torchs_checkpoints_are_on_the_stack() -> None:
    """`stage` reads these names: without them, inputs in checkpoints are kept, and layers run again are counted."""
    from sonde.batch_size.per_example.norms import stage

    seen: dict[bool, list[str]] = {True: [], False: []}
    for reentrant, stages in seen.items():

        def block(x: Tensor, stages: list[str] = stages) -> Tensor:
            stages.append(stage())
            return torch.sin(x)

        checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=reentrant).sum().backward()
    assert seen[False] == ["first", "again"]
    assert seen[True] == ["first", "plain"]  # the first runs without gradients, and is not counted
    assert stage() == "plain"

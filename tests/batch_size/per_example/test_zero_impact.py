"""A measured backward is bit for bit a plain one, and nothing is left behind. `test_zero_impact.py` has DDP."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from sonde.batch_size.per_example.norms import PerExampleNorms

B, T, WIDTH, VOCABULARY, STEPS = 6, 5, 16, 13, 5


class Everything(nn.Module):
    """A bit of everything: a tied head, attention, dropout, convolution, checkpoint, activation in place."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if not sparse:
            self.head.weight = self.embed.weight

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.relu_(self.up(self.other_norm(x)))))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = self.block(self.block(x))
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def train(*, measured: bool, autocast: bool = False, scaled: bool = False) -> Any:
    """Everything that a measurement could have disturbed, after each step."""
    torch.manual_seed(3)
    model = Everything(sparse=not autocast and not scaled)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    generator = torch.Generator().manual_seed(1)
    norms = PerExampleNorms(model) if measured else None
    seen: list[Any] = []
    for step in range(STEPS):
        ids = torch.randint(VOCABULARY, (B, T), generator=generator)
        with norms if norms is not None and step != 2 else contextlib.nullcontext():
            for part in ids.split(B // 2):  # two micro-batches
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    output = model(part)
                scaler.scale(torch.tanh(output.float()).square().mean()).backward()
                if norms is not None and step != 2:
                    squares = norms.take(B // 2)
                    assert squares.not_covered() == {}
                with torch.no_grad():
                    seen.append(model(part))
            seen.append(output.detach().clone())
            seen += [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        seen.append(torch.get_rng_state())
    return seen + [p.detach() for p in model.parameters()]


def assert_same_bits(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) > 20
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{}, {"autocast": True}, {"scaled": True}], ids=["fp32", "autocast", "GradScaler"])
def test_training_is_bit_for_bit_the_same(options: dict[str, bool]) -> None:
    assert_same_bits(train(measured=False, **options), train(measured=True, **options))


def nodes_of(output: Tensor) -> list[str]:
    """Names of the graph's nodes, in the order of a walk."""
    found, waiting, known = [], [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        found.append(node.name())
        waiting += [following for following, _ in node.next_functions]
    return found


def test_no_node_is_added_to_the_graph() -> None:
    torch.manual_seed(0)
    model, ids = Everything().eval(), torch.randint(VOCABULARY, (B, T))
    plain = nodes_of(model(ids))
    with PerExampleNorms(model):
        assert nodes_of(model(ids)) == plain


def hooks_of(model: nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    of_modules = [len(getattr(m, kind)) for m in model.modules() for kind in kinds]
    return of_modules + [len(p._backward_hooks or {}) for p in model.parameters()]


@pytest.mark.parametrize("error", [False, True])
def test_every_hook_is_removed(error: bool) -> None:
    model, ids = Everything(), torch.randint(VOCABULARY, (B, T))
    before = hooks_of(model)
    with contextlib.suppress(KeyError), PerExampleNorms(model) as norms:
        assert hooks_of(model) != before
        loss = model(ids).sum()
        if error:
            raise KeyError
        loss.backward()
        norms.take(B)
    assert hooks_of(model) == before
    loss = model(ids).sum()
    loss.backward()


def test_a_graph_that_outlives_the_window_measures_nothing() -> None:
    model, ids = Everything(), torch.randint(VOCABULARY, (B, T))
    norms = PerExampleNorms(model)
    with norms:
        loss = model(ids).sum()
    loss.backward()
    with norms:
        squares = norms.take(B)
    assert all("no backward has added" in reason for reason in squares.not_covered().values())
    assert squares.sq_norms.isnan().all()


@contextlib.contextmanager
def collected_at_once() -> Iterator[None]:
    """Without the garbage collector: what is in a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_nothing_is_kept_after_backward_though_the_loss_lives() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), torch.randn(B, WIDTH)
    inputs: list[StorageWeakRef] = []
    with collected_at_once(), PerExampleNorms(model) as norms:
        watch = model[2].register_forward_pre_hook(lambda m, a: inputs.append(StorageWeakRef(a[0].untyped_storage())))
        loss = model(x).square().sum()
        watch.remove()
        assert not inputs[0].expired()
        loss.backward()
        assert inputs[0].expired()
        assert norms.take(B).not_covered() == {}

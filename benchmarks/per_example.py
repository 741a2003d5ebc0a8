"""What norms of each example's gradient add to a backward, and how exact they are.

    python -m benchmarks.per_example                # a GPT of 3.3M parameters, 8 sequences of 128 tokens, one thread
    python -m benchmarks.per_example --blocks 40 --sequences 16 --tied

One model runs forward and backward, in turn without and with hooks, in blocks that go plain, measured, measured, plain.
Leave the machine alone meanwhile. Only the measured windows pay: at one window in N, training pays an N-th.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.machine import describe
from benchmarks.timing import Cost, cost
from sonde.batch_size.per_example.norms import PerExampleNorms

WARM_UP = 3


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        blocks: pairs of measured and plain backwards, two of each.
        sequences: examples in a backward.
        width: of the model.
        depth: blocks of the model.
        context: tokens in a sequence.
        vocabulary: tokens to choose from.
        tied: whether the head is the embedding.
        threads: of the CPU.
    """

    blocks: int = 20
    sequences: int = 8
    width: int = 256
    depth: int = 4
    context: int = 128
    vocabulary: int = 256
    tied: bool = False
    threads: int = 1


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm_attention(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))
        return out


class LayerGpt(nn.Module):
    """A GPT whose parameters are all used through layers; `forward` returns each sequence's part of the mean loss."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embed, self.position = (nn.Embedding(n, options.width) for n in (options.vocabulary, options.context))
        self.blocks = nn.Sequential(*[_Block(options.width) for _ in range(options.depth)])
        self.norm, self.head = nn.LayerNorm(options.width), nn.Linear(options.width, options.vocabulary, bias=False)
        if options.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:  # ids: [sequences, context + 1]
        seen = ids[:, :-1]
        places = torch.arange(seen.shape[1], device=ids.device).expand_as(seen)
        logits = self.head(self.norm(self.blocks(self.embed(seen) + self.position(places))))
        losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return losses.view(len(ids), -1).mean(1) / len(ids)


def build(options: Options) -> tuple[LayerGpt, Tensor]:
    """The model with random weights, and random tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(options.vocabulary, (options.sequences, options.context + 1))
    return LayerGpt(options), tokens


def largest_error(model: LayerGpt, tokens: Tensor) -> float:
    """The largest relative error of |h_b|², compared with one backward for each example in float64."""
    with PerExampleNorms(model) as norms:
        model(tokens).sum().backward()
        squares = norms.take(len(tokens))
    if missing := squares.not_covered():
        raise RuntimeError(f"not covered: {missing}")
    exact = copy.deepcopy(model).double()
    truth = []
    for share in exact(tokens):
        grads = torch.autograd.grad(share, list(exact.parameters()), retain_graph=True)
        truth.append(sum(g.square().sum() for g in grads))
    return float((squares.totals() / torch.stack(truth) - 1).abs().max())


def time_blocks(model: LayerGpt, tokens: Tensor, n_blocks: int) -> list[tuple[float, float]]:
    """Seconds of a forward and backward without and with hooks, in blocks of two of each: [blocks]."""
    norms = PerExampleNorms(model)

    def plain() -> None:
        model(tokens).sum().backward()

    def measured() -> None:
        with norms:
            plain()
            norms.take(len(tokens))

    for _ in range(WARM_UP):
        _seconds(model, plain)
        _seconds(model, measured)
    blocks = []
    gc.disable()
    for k in range(n_blocks):
        gc.collect()
        outer, inner = (plain, measured) if k % 2 == 0 else (measured, plain)
        before, between = _seconds(model, outer), _seconds(model, inner) + _seconds(model, inner)
        around = before + _seconds(model, outer)
        blocks.append((around / 2, between / 2) if k % 2 == 0 else (between / 2, around / 2))
    gc.enable()
    return blocks


def _seconds(model: nn.Module, run: Callable[[], None]) -> float:
    model.zero_grad()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def run(options: Options) -> tuple[float, Cost]:
    """The largest relative error, and what a measured backward costs."""
    model, tokens = build(options)
    return largest_error(model, tokens), cost([time_blocks(model, tokens, options.blocks)])


def main() -> None:
    """Print the result."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(options.threads)
    for name, value in describe("cpu", ()).items():
        print(f"{name}: {value}")
    print(options)
    error, found = run(options)
    print(f"largest relative error of an example's squared norm, compared with float64: {error:.1e}")
    print(
        f"a measured forward and backward: {100 * found.median:+.0f} % "
        f"[{100 * found.low:.0f}, {100 * found.high:.0f}] of {1000 * found.window_seconds:.0f} ms "
        f"({found.n_blocks} blocks)"
    )
    if found.median > 0:
        print(f"1 % of the time: one window in {max(1, round(found.median / 0.01))}")


if __name__ == "__main__":
    main()

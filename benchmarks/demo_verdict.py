"""The demo's reading and verdict beside the exact noise scale of its weights, while it trains.

    python -m benchmarks.demo_verdict [--out benchmarks/results]

Trains the demo's model on the demo's data, with the pieces of its two ranks in one process. At some windows training
stops, and the gradients of many fresh sequences give tr Σ and |G|² of the present weights, far more exactly than a
window can: "exact" below, with its own standard error. A verdict is right if it allows the verdict of that value. It
has decided if it allows no other. A reading without an interval holds nothing, and the verdict "unknown" is neither
right nor wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import sonde
from benchmarks.machine import describe
from sonde.batch_size.stats.critical_batch import Estimate, Kind
from sonde.demos.byte_lm.data import draw_windows, find_sources, read_corpus, window_generator
from sonde.demos.byte_lm.model import ByteTransformer
from sonde.demos.byte_lm.options import DemoOptions, Setup, decide
from sonde.demos.byte_lm.train import MAX_GRAD_NORM, next_byte_loss, rate_at

CHECKPOINTS = (25, 50, 75, 100, 125, 150, 200)
N_BLOCKS, SEQUENCES_PER_BLOCK, SEQUENCES_PER_PIECE = 8, 128, 8
"""Fresh sequences behind an exact value, in blocks that give its error."""
ALLOWS: dict[Kind, tuple[Kind, ...]] = {
    "about_right_or_too_small": ("about_right", "too_small"),
    "about_right_or_too_large": ("about_right", "too_large"),
}
"""What a verdict allows besides itself."""


@dataclass(frozen=True)
class Checkpoint:
    """One window of the run.

    Attributes:
        window: its number.
        exact: B_simple of the present weights, in sequences.
        exact_error: its standard error.
        reading: the probe's, in words.
        holds: whether the reading's interval holds the exact value; None without an interval.
        average: the ratio of plain averages over about the last half of the run.
        verdict: kind of the verdict.
        exact_verdict: kind of the verdict on the exact value.
    """

    window: int
    exact: float
    exact_error: float
    reading: str
    holds: bool | None
    average: float
    verdict: Kind
    exact_verdict: Kind

    @property
    def is_right(self) -> bool | None:
        """Whether the verdict allows that of the exact value; None if it says nothing."""
        return None if self.verdict == "unknown" else self.exact_verdict in ALLOWS.get(self.verdict, (self.verdict,))

    @property
    def has_decided(self) -> bool:
        """Whether the verdict is a single one."""
        return self.verdict != "unknown" and self.verdict not in ALLOWS


def run(
    setup: Setup,
    *,
    checkpoints: Sequence[int] = CHECKPOINTS,
    n_blocks: int = N_BLOCKS,
    sequences_per_block: int = SEQUENCES_PER_BLOCK,
) -> Iterator[Checkpoint]:
    """Train as the demo does, and look at the checkpoints; `exact_noise_scale` explains the rest."""
    corpus = read_corpus(find_sources())
    torch.manual_seed(setup.seed)
    model = ByteTransformer(context=setup.context)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    log = sonde.RunLog(every=setup.log_every)
    with sonde.attach(model, optimizer, unit="sequences", log=log, verbose=False, every=1) as probe:
        for step in range(max(checkpoints)):
            for group in optimizer.param_groups:
                group["lr"] = setup.learning_rate * rate_at(step, setup.n_steps)
            n_pieces = setup.n_ranks * setup.n_micro_batches
            for rank in range(setup.n_ranks):
                generator = window_generator(setup.seed, step, rank)
                windows = draw_windows(corpus, setup.batch // setup.n_ranks, setup.context, generator)
                for micro in windows.chunk(setup.n_micro_batches):
                    with probe.piece(units=len(micro)):
                        (next_byte_loss(model, micro) / n_pieces).backward()
            probe.clip_grad_norm_(MAX_GRAD_NORM)
            if step + 1 in checkpoints:
                exact = exact_noise_scale(
                    model,
                    corpus,
                    setup.context,
                    seed=1000 + step + 1,
                    n_blocks=n_blocks,
                    sequences_per_block=sequences_per_block,
                )
                yield compare(setup.batch, exact, probe.reading(), step + 1)
            optimizer.step()
            optimizer.zero_grad()


def compare(
    batch: int, exact_with_error: tuple[float, float], reading: sonde.NoiseScaleReading, window: int
) -> Checkpoint:
    """Compare a reading with the exact value at the same weights."""
    exact, error = exact_with_error
    now = Estimate(reading.b_simple, reading.low, reading.high)
    verdict = sonde.judge_batch(batch, unit="sequences", now=now, reason=reading.reason)
    exact_verdict = sonde.judge_batch(batch, unit="sequences", now=Estimate(exact, exact, exact))
    return Checkpoint(
        window,
        exact,
        error,
        str(reading),
        None if reading.low is None or reading.high is None else reading.low <= exact <= reading.high,
        (reading.trace_cov or math.nan) / (reading.grad_sq or math.nan),
        verdict.kind,
        exact_verdict.kind,
    )


def exact_noise_scale(
    model: ByteTransformer,
    corpus: torch.Tensor,
    context: int,
    *,
    seed: int,
    n_blocks: int = N_BLOCKS,
    sequences_per_block: int = SEQUENCES_PER_BLOCK,
) -> tuple[float, float]:
    """B_simple of the present weights from fresh sequences, and its standard error from blocks of them."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    squares: list[float] = []
    blocks = []
    for _ in range(n_blocks):
        block = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        sequences = draw_windows(corpus, sequences_per_block, context, generator)
        for piece in sequences.split(SEQUENCES_PER_PIECE):
            grads = torch.autograd.grad(next_byte_loss(model, piece), parameters)
            squares.append(sum(float(g.double().square().sum()) for g in grads))
            for into, grad in zip(block, grads, strict=True):
                into.add_(grad.double(), alpha=SEQUENCES_PER_PIECE / sequences_per_block)
        blocks.append(block)
        for into, mean in zip(total, block, strict=True):
            into.add_(mean, alpha=1 / n_blocks)
    n = n_blocks * sequences_per_block
    small, big = sum(squares) / len(squares), sum(float(t.square().sum()) for t in total)
    whole = sonde.noise_scale(small, big, n_small=SEQUENCES_PER_PIECE, n_big=n)
    # Leave one block out at a time.
    per_block = len(squares) // n_blocks
    left = []
    for i, block in enumerate(blocks):
        rest = [(t - b / n_blocks) * n_blocks / (n_blocks - 1) for t, b in zip(total, block, strict=True)]
        kept = [s for j, s in enumerate(squares) if j // per_block != i]
        part = sonde.noise_scale(
            sum(kept) / len(kept),
            sum(float(t.square().sum()) for t in rest),
            n_small=SEQUENCES_PER_PIECE,
            n_big=n - sequences_per_block,
        )
        left.append(part.trace_cov / part.grad_sq)
    mean = sum(left) / len(left)
    error = math.sqrt((n_blocks - 1) / n_blocks * sum((value - mean) ** 2 for value in left))
    return whole.trace_cov / whole.grad_sq, error


def in_words(holds: bool | None, unknown: str) -> str:
    """A cell of the table."""
    return unknown if holds is None else "yes" if holds else "no"


def as_table(found: Sequence[Checkpoint]) -> str:
    """One row for each checkpoint."""
    lines = [
        "| window | exact B_simple | reading | held | old average | verdict | by the exact value | right | decided |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {at.window} | {at.exact:.0f} ± {at.exact_error:.0f} | {at.reading} | {in_words(at.holds, 'no interval')} | "
        f"{at.average:.0f} | {at.verdict} | {at.exact_verdict} | {in_words(at.is_right, 'says nothing')} | "
        f"{in_words(at.has_decided, '')} |"
        for at in found
    ]
    return "\n".join(lines)


def summary(found: Sequence[Checkpoint]) -> str:
    """The whole table in two sentences."""
    n = len(found)
    return (
        f"The interval held the exact value in {sum(at.holds is True for at in found)} of {n} windows. The verdict was "
        f"right in {sum(at.is_right is True for at in found)} of {n}, and had decided in "
        f"{sum(at.has_decided for at in found)}."
    )


def as_page(found: Sequence[Checkpoint], setup: Setup, machine: Mapping[str, str], n_fresh: int) -> str:
    """The page of results."""
    where = ", ".join(f"{name}: {value}" for name, value in machine.items())
    return (
        "# The demo's reading and verdict beside the exact noise scale\n\n"
        f"`python -m benchmarks.demo_verdict`, {where}. Batch {setup.batch} sequences. "
        f"Exact values come from {n_fresh:,} fresh sequences, and have standard errors of their own. The average "
        "is the ratio of averages over about the last half of the run.\n\n"
        f"{summary(found)}\n\n{as_table(found)}\n"
    )


def main() -> None:
    """Run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    setup = decide(DemoOptions(device="cpu"), Path("unused"), n_gpus=0, n_cores=2)
    found = []
    for at in run(setup):
        found.append(at)
        print(as_table([at]).splitlines()[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    page = as_page(found, setup, describe("cpu", ()), N_BLOCKS * SEQUENCES_PER_BLOCK)
    (options.out / "demo_verdict.md").write_text(page)
    (options.out / "demo_verdict.json").write_text(json.dumps([dataclasses.asdict(at) for at in found], indent=1))


if __name__ == "__main__":
    main()

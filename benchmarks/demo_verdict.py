"""The demo's reading and verdict beside the exact noise scale of its weights, while it trains.

    python -m benchmarks.demo_verdict [--out benchmarks/results]

Trains the demo's model on the demo's data, with the pieces of its two ranks in one process. At some windows training
stops, and the gradients of many fresh sequences give tr Σ and |G|² of the present weights, far more exactly than a
window can: "exact" below, with its own standard error. The verdict is right where it allows the verdict of that value.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import sonde
from benchmarks.machine import describe
from sonde.batch_size.stats.critical_batch import Kind
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
    "unknown": ("too_small", "about_right", "too_large"),
}


@dataclass(frozen=True)
class Checkpoint:
    """One window of the run.

    Attributes:
        window: its number.
        exact: B_simple of the present weights, in sequences.
        exact_error: its standard error.
        reading: the probe's, in words.
        holds: whether the reading's interval holds the exact value.
        average: the ratio of plain averages over the horizon, which sonde reported before.
        verdict: kind of the verdict.
        exact_verdict: kind of the verdict on the exact value.
    """

    window: int
    exact: float
    exact_error: float
    reading: str
    holds: bool
    average: float
    verdict: Kind
    exact_verdict: Kind

    @property
    def is_right(self) -> bool:
        """Whether the verdict allows that of the exact value."""
        return self.exact_verdict in ALLOWS.get(self.verdict, (self.verdict,))


def run(setup: Setup) -> Iterator[Checkpoint]:
    """Train as the demo does, and look at the checkpoints."""
    corpus = read_corpus(find_sources())
    torch.manual_seed(setup.seed)
    model = ByteTransformer(context=setup.context)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    log = sonde.RunLog(every=setup.log_every)
    with sonde.attach(model, optimizer, unit="sequences", horizon=setup.horizon, log=log, verbose=False) as probe:
        for step in range(max(CHECKPOINTS)):
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
            if step + 1 in CHECKPOINTS:
                yield look(setup, model, corpus, probe.reading(), step + 1)
            optimizer.step()
            optimizer.zero_grad()


def look(
    setup: Setup, model: ByteTransformer, corpus: torch.Tensor, reading: sonde.NoiseScaleReading, window: int
) -> Checkpoint:
    """Compare a reading with the exact value at the same weights."""
    exact, error = exact_noise_scale(model, corpus, setup.context, seed=1000 + window)
    known = {"unit": "sequences", "reason": "", "status": "resolved"}
    verdict = sonde.judge_batch(
        setup.batch,
        unit="sequences",
        status=reading.status,
        b_simple=reading.b_simple,
        low=reading.low,
        high=reading.high,
        reason=reading.reason,
    )
    exact_verdict = sonde.judge_batch(setup.batch, b_simple=exact, low=exact, high=exact, **known)  # type: ignore[arg-type]
    return Checkpoint(
        window,
        exact,
        error,
        str(reading),
        reading.low is None or reading.high is None or reading.low <= exact <= reading.high,
        (reading.trace_cov or math.nan) / (reading.grad_sq or math.nan),
        verdict.kind,
        exact_verdict.kind,
    )


def exact_noise_scale(model: ByteTransformer, corpus: torch.Tensor, context: int, *, seed: int) -> tuple[float, float]:
    """B_simple of the present weights from fresh sequences, and its standard error from blocks of them."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    squares: list[float] = []
    blocks = []
    for _ in range(N_BLOCKS):
        block = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        sequences = draw_windows(corpus, SEQUENCES_PER_BLOCK, context, generator)
        for piece in sequences.split(SEQUENCES_PER_PIECE):
            grads = torch.autograd.grad(next_byte_loss(model, piece), parameters)
            squares.append(sum(float(g.double().square().sum()) for g in grads))
            for into, grad in zip(block, grads, strict=True):
                into.add_(grad.double(), alpha=SEQUENCES_PER_PIECE / SEQUENCES_PER_BLOCK)
        blocks.append(block)
        for into, mean in zip(total, block, strict=True):
            into.add_(mean, alpha=1 / N_BLOCKS)
    n = N_BLOCKS * SEQUENCES_PER_BLOCK
    small, big = sum(squares) / len(squares), sum(float(t.square().sum()) for t in total)
    whole = sonde.noise_scale(small, big, n_small=SEQUENCES_PER_PIECE, n_big=n)
    # Leave one block out at a time.
    per_block = len(squares) // N_BLOCKS
    left = []
    for i, block in enumerate(blocks):
        rest = [(t - b / N_BLOCKS) * N_BLOCKS / (N_BLOCKS - 1) for t, b in zip(total, block, strict=True)]
        kept = [s for j, s in enumerate(squares) if j // per_block != i]
        part = sonde.noise_scale(
            sum(kept) / len(kept),
            sum(float(t.square().sum()) for t in rest),
            n_small=SEQUENCES_PER_PIECE,
            n_big=n - SEQUENCES_PER_BLOCK,
        )
        left.append(part.trace_cov / part.grad_sq)
    mean = sum(left) / len(left)
    error = math.sqrt((N_BLOCKS - 1) / N_BLOCKS * sum((value - mean) ** 2 for value in left))
    return whole.trace_cov / whole.grad_sq, error


def main() -> None:
    """Run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    setup = decide(DemoOptions(device="cpu"), Path("unused"), n_gpus=0, n_cores=2)
    lines = [
        "| window | exact B_simple | reading | held | old average | verdict | by the exact value | right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = []
    for at in run(setup):
        found.append(at)
        lines.append(
            f"| {at.window} | {at.exact:.0f} ± {at.exact_error:.0f} | {at.reading} | {'yes' if at.holds else 'no'} | "
            f"{at.average:.0f} | {at.verdict} | {at.exact_verdict} | {'yes' if at.is_right else 'no'} |"
        )
        print(lines[-1], flush=True)
    machine = ", ".join(f"{name}: {value}" for name, value in describe("cpu", ()).items())
    text = (
        "# The demo's reading and verdict beside the exact noise scale\n\n"
        f"`python -m benchmarks.demo_verdict`, {machine}. Batch {setup.batch} sequences, horizon {setup.horizon:g}. "
        f"Exact values come from {N_BLOCKS * SEQUENCES_PER_BLOCK:,} fresh sequences. The old average is the ratio of "
        "averages over the horizon.\n\n" + "\n".join(lines) + "\n"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo_verdict.md").write_text(text)
    (options.out / "demo_verdict.json").write_text(json.dumps([dataclasses.asdict(at) for at in found], indent=1))


if __name__ == "__main__":
    main()

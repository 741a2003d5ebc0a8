"""Accuracy and cost of forecasts of a policy's entropy: `python -m benchmarks.entropy`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.entropy_accuracy import WAYS, Plan, summary, trials
from benchmarks.entropy_cost import OURS, TINY, Size, costs, peaks
from benchmarks.entropy_lengths import Lengths, coverage_by_length
from benchmarks.machine import describe
from benchmarks.truncated_policies import Truncations, coverage_by_truncation

QUICK = Plan(steps=(0,), batches=2, prompts=6, truths=2, responses=2)
LENGTHS_QUICK = Lengths((8,), (1.0,), batches=2, trained_for=2, seeds=(0,))
TRUNCATED_QUICK = Truncations((("top_p", 0.8),), (1.0,), seeds=1, batches=2)
BY_BACKWARDS = "gradient, three backwards for every prompt"


def measure(*, quick: bool) -> dict[str, Any]:
    """All measurements: accuracy, cost and memory."""
    start = time.monotonic()
    warnings.simplefilter("ignore")  # warnings of other packages
    size = TINY if quick else Size()
    _say(start, "accuracy, along a GRPO run")
    accuracy = summary(trials(QUICK if quick else Plan()))
    _say(start, "long responses")
    lengths = coverage_by_length(LENGTHS_QUICK if quick else Lengths())
    _say(start, "truncated sampling")
    truncated = coverage_by_truncation(TRUNCATED_QUICK if quick else Truncations())
    _say(start, "cost")
    cost = costs(size, 1 if quick else 8)
    _say(start, "memory")
    memory = peaks(size, [OURS], apart=False) if quick else peaks(size)
    return {
        "machine": describe("cpu", compared=("trl", "transformers")),
        "quick": quick,
        "accuracy": accuracy,
        "lengths": lengths,
        "truncated": truncated,
        "cost": cost,
        "memory": memory,
    }


def markdown(found: dict[str, Any], command: str) -> str:
    """The results as a page."""
    lines = ["# Forecasts of a policy's entropy: accuracy and cost", ""]
    lines += [f"- {name}: {value}" for name, value in found["machine"].items()]
    lines += [f"- again: `{command}`", ""]
    if found["quick"]:
        lines += ["**Quick: these numbers mean nothing.**", ""]
    lines += [*_accuracy(found["accuracy"]), *_lengths(found["lengths"]), *truncated_table(found["truncated"])]
    return "\n".join([*lines, *_cost(found["cost"]), *_memory(found)])


def _accuracy(found: dict[str, Any]) -> list[str]:
    lines = [
        "## Accuracy",
        "",
        "The run of `sonde demo entropy` (TRL's GRPOTrainer, dr_grpo, AdamW at 3e-3). Before steps 20, 25, … 120, the "
        "step is forecast from 8 independent batches of 32 prompts with 8 responses each, drawn with replacement from "
        "the hundred sums. This is done for the whole step and for a tenth of it. The truth comes from fresh rollouts "
        "to all sums before and after the step, 8 times 16 responses each, with common random numbers. An interval "
        "holds the truth if the two agree within the truth's own 95 % interval. All intervals are by the standard "
        "error alone.",
        "",
        "| | whole steps: finite step | first order | a tenth: finite step | first order | goal, finite step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    cells_of = [found["by_scale"][scale][how] for scale in ("1.0", "0.1") for how in WAYS]
    rows = [
        ("forecasts", "forecasts", "{:.0f}", ""),
        ("forecasts to be trusted, by their own report", "trusted", "{:.0f}", ""),
        ("change, median size, nats a token", "median_size", "{:.1e}", ""),
        ("standard error of the forecast, median", "median_se", "{:.1e}", ""),
        ("standard error of the truth, median", "median_truth_se", "{:.1e}", ""),
        ("same sign as the truth, for changes above 2 standard errors", "sign_agreement", "{:.1%}", "≥ 99 %"),
        ("correlation with the truth", "correlation", "{:.3f}", "≥ 0.98"),
        ("intervals that hold the truth", "coverage", "{:.1%}", "93–97 %"),
    ]
    for title, name, form, goal in rows:
        cells = ["–" if of[name] is None else form.format(of[name]) for of in cells_of]
        lines.append(f"| {title} | {' | '.join(cells)} | {goal} |")
    first = found["at_step_0"]
    held = "–" if first["coverage"] is None else f"{first['coverage']:.0%}"
    lines += [
        "",
        f"At step 0, where the policy is nearly uniform, the finite step's intervals held the truth in {held} of "
        f"{first['forecasts']} forecasts of the whole step.",
        "",
    ]
    return lines


def _lengths(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Long responses",
        "",
        "Four tiny policies whose next token depends on the prompt and the last token, so that the change is known "
        "exactly; after 10 steps of AdamW by a policy gradient. A forecast is from new responses, 24 prompts with 4 "
        "each. Support is the effective sample size of the prefix weights, a mean over positions; whole responses "
        "have less.",
        "",
        "| tokens | step | truth, median size, nats a token | SE of a forecast, median | support | whole responses | "
        "held, all | held, trusted | trusted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        trusted = "–" if row["coverage_of_trusted"] is None else f"{row['coverage_of_trusted']:.1%}"
        lines.append(
            f"| {row['tokens']} | {row['scale']:g} × | {row['truth']:.1e} | {row['median_se']:.1e} | "
            f"{row['support']:.2f} | "
            f"{row['whole']:.2f} | {row['coverage']:.1%} of {row['batches']} | {trusted} | {row['trusted']:.0%} |"
        )
    return [*lines, ""]


def truncated_table(found: list[dict[str, Any]]) -> list[str]:
    """How right forecasts are of truncated policies, as lines of the page."""
    lines = [
        "## Truncated sampling",
        "",
        "Forty tiny policies, whose next token depends on the prompt, the place and the last token; sampled "
        "by top-p, min-p or top-k, and after 10 steps of AdamW. The truth is the truncated policy's exact entropy. A "
        "forecast is from new responses, 24 prompts with 4 each. By itself: "
        "`python -m benchmarks.truncated_policies`.",
        "",
        "| sampling | step | truth, median size, nats a token | SE of a forecast, median | support | held, all | "
        "held, trusted | trusted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        trusted = "–" if row["coverage_of_trusted"] is None else f"{row['coverage_of_trusted']:.1%}"
        lines.append(
            f"| {row['way']} | {row['scale']:g} × | {row['truth']:.1e} | {row['median_se']:.1e} | "
            f"{row['support']:.2f} | {row['coverage']:.1%} of {row['forecasts']} | {trusted} | {row['trusted']:.0%} |"
        )
    return [*lines, ""]


def _cost(found: dict[str, Any]) -> list[str]:
    size, said = found["size"], found["said"]
    lines = [
        "## Cost",
        "",
        f"A Qwen2 of {found['parameters'] / 1e6:.1f}M parameters with random weights; {size['prompts']} evaluation "
        "prompts and as many to learn from, 8 responses of 48 tokens each. The optimizer is SGD: its step is the mean "
        "gradient, so all contestants forecast the same change. Contestants run in turn in one process, on new batches "
        "in each of 8 rounds: median seconds, the first round's forecast, root mean squares of the standard errors. "
        "Seconds at equal standard error are seconds times the square of the standard error over that of the finite "
        "step, since twice as many prompts halve the variance. The gradients' own standard error, by V_X + V_Y, counts "
        "the noise of both batches twice: the standard error of sonde's gradients replaces it.",
        "",
        "| | seconds | forecast, nats a token | its SE | seconds at equal SE | over the finite step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    ours = said[OURS]["se"]
    # V_X + V_Y counts noise common to both batches twice. Sonde's standard error of the same estimate does not.
    se = {n: said["sonde, update='gradient'"]["se"] if n == BY_BACKWARDS else of["se"] for n, of in said.items()}
    at_equal = {n: statistics.median(s) * (se[n] / ours) ** 2 for n, s in found["seconds"].items()}
    for name, seconds in found["seconds"].items():
        lines.append(
            f"| {name} | {statistics.median(seconds):.2f} | {said[name]['delta']:.4g} | {said[name]['se']:.2g} | "
            f"{at_equal[name]:.2f} | {at_equal[name] / at_equal[OURS]:.2f} |"
        )
    phases = {name: statistics.median([p[name] for p in found["phases"]]) for name in found["phases"][0]}
    phase_times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())
    lines += [
        "",
        f"Goal: 4.5 times faster than gradients with a backward for every prompt, at equal standard error and with the "
        f"truth on the same prefixes: {at_equal[BY_BACKWARDS] / at_equal[OURS]:.2f} times. Phases: {phase_times}.",
        "",
    ]
    return lines


def _memory(found: dict[str, Any]) -> list[str]:
    memory, direction = found["memory"], 4 * found["cost"]["parameters"]
    allowed = memory["training micro-batch"] + direction
    lines = [
        "## Memory",
        "",
        "Growth of a process's peak memory after parameters and their gradients exist; micro-batches of 2 prompts.",
        "",
        "| | MB |",
        "| --- | --- |",
        *(f"| {name} | {size / 1e6:,.0f} |" for name, size in memory.items()),
        "",
        f"Goal: a training micro-batch and one direction of {direction / 1e6:,.0f} MB, {allowed / 1e6:,.0f} MB in all; "
        f"sonde's step takes {memory[OURS] / 1e6:,.0f} MB.",
        "",
    ]
    return lines


def _say(start: float, text: str) -> None:
    print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write `entropy_cpu.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.entropy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half a minute, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    options = parser.parse_args(arguments)
    found = measure(quick=options.quick)
    page = markdown(found, "python -m benchmarks.entropy" + " --quick" * options.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / "entropy_cpu"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    stem.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()

"""Does the advice hold, in time? Six tasks, three optimizers, three seeds: what is said beside what was measured.

    python -m benchmarks.advice [--only gru-adamw …] [--seeds 3] [--jobs 1] [--out benchmarks/results]

Of each case, a reference is trained with sonde's log, and `sonde advise LOG --try -- …` times its steps and decides.
Then the same script trains at a quarter, 4 and 16 times the batch, and at the advised one, each at the rate that advise
prints for it, until its held-out loss is that of the reference's end. Beside each other stand:

- the time that was said for each batch, and steps to that loss × seconds of a step, timed at all sizes in turn;
- how the advised batch ends after as many steps as were said, and how far apart the seeds of the reference end;
- the time of the advised batch, and that of the fastest that was tried.

What is finished is kept in a file beside the page, and not trained again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.advice_training import LOOKS, OPTIMIZERS, TASKS
from benchmarks.machine import page
from sonde.decision.kept_trial import TRIAL_NAME

SEEDS = 3
TIMES = (0.25, 4.0, 16.0)
"""Batches that are trained, over the reference's, beside it and the advised one."""
LONGER = 4.0
"""A training ends at so many times the steps that were said, if it does not reach the loss."""
SMOOTHED = 5
"""Looks at the held-out loss whose median is the loss at the middle one: at high rates single looks scatter."""
CLOSE, NEAR_FASTEST = 0.25, 1.3
RESULTS = "advice.jsonl"
OF_ADVISE = {"learning rate": "lr", "β₁": "beta1", "β₂": "beta2", "ε": "eps", "weight decay": "weight-decay"}
"""Options of the script, by the name of the setting."""


def script(*options: object) -> list[str]:
    """The command of the training script."""
    return [sys.executable, "-m", "benchmarks.advice_training", *map(str, options)]


def run(command: Sequence[str]) -> str:
    """Run a command on one thread; its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} …: {ended.stderr[-800:]}")
    return ended.stdout


def trained(case: Sequence[object], place: Path, *options: object) -> list[tuple[float, float]]:
    """Train, and read the held-out losses with their steps."""
    losses = place / "losses.json"
    run(script(*case, *options, "--losses", losses))
    found: list[tuple[float, float]] = json.loads(losses.read_text())
    return found


def smooth(losses: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The running median."""
    half = SMOOTHED // 2
    values = [loss for _, loss in losses]
    return [(step, statistics.median(values[max(k - half, 0) : k + half + 1])) for k, (step, _) in enumerate(losses)]


def steps_to(losses: Sequence[tuple[float, float]], target: float) -> float | None:
    """Steps until the smoothed loss is down to the target, between looks by a line; None if it never is."""
    curve = smooth(losses)
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= target:
            return before + (after - before) * (high - target) / (high - low) if high > target else before
    return None


def settings_of(found: Mapping[str, Any], optimizer: str) -> list[str]:
    """The options of the script for the rates that advise has printed."""
    options = []
    for row in found["changes"][0]["rates"]:
        for setting in row["settings"]:
            if setting["then"] is not None and setting["name"] in OF_ADVISE:
                name = OF_ADVISE[setting["name"]]
                if row["optimizer"] == "AdamW" and optimizer == "muon":
                    if name == "weight-decay" or name == "eps":
                        continue
                    name = "other-lr" if name == "lr" else name
                if row["optimizer"] != "AdamW" and name != "lr":
                    continue
                options += [f"--{name}", repr(setting["then"])]
    return options


def case_of(task: str, optimizer: str, seed: int, curve: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything that one case shows.

    Args:
        task: by name.
        optimizer: likewise.
        seed: of weights and data.
        curve: the time curve of another seed's trial; None to try.
    """
    case, batch = ("--task", task, "--optimizer", optimizer, "--seed", seed), TASKS[task].batch
    with tempfile.TemporaryDirectory() as folder:
        place, log = Path(folder), Path(folder) / "log"
        reference = trained(case, place, "--log", log)
        target = smooth(reference)[-1][1]
        advise = [sys.executable, "-m", "sonde", "advise", str(log), "--json"]
        tries = ["--try", "--", *script(*case, "--batch", "{batch}", "--steps", 10**6)]
        if curve is not None:
            (log / TRIAL_NAME).write_text(json.dumps(curve))
        decision = json.loads(run([*advise, *(tries if curve is None else ())]))
        assert not any("is not used" in note for note in decision["notes"]), decision["notes"]
        tried = [batch, *(max(round(batch * factor), 1) for factor in TIMES)]
        plan = next(iter(decision["advice"].values()))["best"]
        advised = batch if plan is None else round(plan["batch"])
        result: dict[str, Any] = {"task": task, "optimizer": optimizer, "seed": seed, "target": target}
        result |= {"kind": decision["kind"], "sentence": decision["sentence"], "advised": advised, "batches": {}}
        result["reference_loss"] = statistics.median(loss for _, loss in reference[-SMOOTHED:])
        for size in dict.fromkeys([*tried, advised]):
            found = json.loads(run([*advise, "--batch", str(size)]))
            said = next(iter(found["advice"].values()))
            steps = next((p for p in said["plans"] if round(p["batch"]) == size), None)
            options = [] if size == batch else settings_of(found, optimizer)
            if steps is None or (size != batch and not options):
                continue
            middle = steps["steps"]["middle"] or math.sqrt(steps["steps"]["low"] * steps["steps"]["high"])
            most = round(LONGER * middle) + 2
            one = trained(case, place, "--batch", size, "--steps", most, "--until", target, *options)
            result["batches"][size] = {"said": steps, "steps": steps_to(one, target), "options": options}
            if size == advised and size != batch:
                enough = math.ceil(steps["steps"]["high"])  # as advise says under "to set a batch"
                ended = trained(case, place, "--batch", size, "--steps", enough, *options)
                result["advised_loss"] = statistics.median(loss for _, loss in ended[-SMOOTHED:])
        result["curve"] = json.loads((log / TRIAL_NAME).read_text())
    for size, seconds in json.loads(run(script(*case, "--time", *result["batches"]))).items():
        result["batches"][int(size)]["seconds_per_step"] = seconds
    return result


def judged(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The page's tables."""
    rows, near, within, within_both, close = [], [], [], [], []
    by_case: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in results:
        by_case.setdefault((each["task"], each["optimizer"]), []).append(each)
    for (task, optimizer), runs in by_case.items():
        ends = [r["reference_loss"] for r in runs]
        limit = statistics.fmean(ends) + 2 * (statistics.stdev(ends) if len(ends) > 1 else 0.0)
        for r in runs:
            times = {int(b): of["steps"] * of["seconds_per_step"] for b, of in r["batches"].items() if of["steps"]}
            base = times.get(TASKS[task].batch)
            said = []
            for size, of in r["batches"].items():
                if base and int(size) in times and int(size) != TASKS[task].batch:
                    predicted, measured = of["said"]["time"]["middle"], times[int(size)] / base
                    holds = of["said"]["time"]["low"] <= measured <= of["said"]["time"]["high"]
                    (within if predicted else within_both).append(holds)
                    if predicted:
                        near.append(abs(predicted / measured - 1) <= CLOSE)
                        said.append(f"{size}: {predicted:.2f} / {measured:.2f}")
            fastest = min(times.values(), default=math.nan)
            advised = times.get(r["advised"], math.nan)
            close.append(advised <= NEAR_FASTEST * fastest)
            loss = r.get("advised_loss", r["reference_loss"])
            ended = "as the reference" if loss <= limit else f"{loss - statistics.fmean(ends):+.3g}"
            rows.append(
                f"| {task} | {optimizer} | {r['seed']} | {r['kind']} {r['advised']} | {'; '.join(said)} | "
                f"{advised / fastest:.2f} | {ended} |"
            )
    n_ended = sum("as the reference" in row for row in rows)
    yield (
        f"- time to the reference's loss within {CLOSE:.0%} of the measured: {sum(near)} of {len(near)}; inside the "
        f"range that is said: {sum(within)} of {len(within)}; between both ends, of sizes that were not tried: "
        f"{sum(within_both)} of {len(within_both)}"
    )
    yield f"- the advised batch within {NEAR_FASTEST} times the fastest that was tried: {sum(close)} of {len(close)}"
    yield f"- the advised batch, after as many steps as said, ends no higher than the seeds: {n_ended} of {len(rows)}"
    yield ""
    yield "| task | optimizer | seed | decision | time over the reference's, said / measured | of the fastest | ends |"
    yield "|---|---|---|---|---|---|---|"
    yield from rows


def curve_among(kept: Sequence[Mapping[str, Any]], task: str, optimizer: str) -> Mapping[str, Any] | None:
    """The time curve of a case's first trial: another seed trains the same model."""
    return next((r["curve"] for r in kept if (r["task"], r["optimizer"]) == (task, optimizer)), None)


def main() -> None:
    """Train what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    file = options.out / RESULTS
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(r["task"], r["optimizer"], r["seed"]) for r in kept}
    cases = [
        (task, optimizer, seed)
        for seed, task, optimizer in itertools.product(range(options.seeds), TASKS, OPTIMIZERS)
        if (task, optimizer, seed) not in done and (not options.only or f"{task}-{optimizer}" in options.only)
    ]
    with ThreadPoolExecutor(options.jobs) as pool, file.open("a") as out:
        for result in pool.map(lambda case: case_of(*case, curve_among(kept, case[0], case[1])), cases):
            out.write(json.dumps(result) + "\n")
            out.flush()
            kept.append(result)
            print(result["task"], result["optimizer"], result["seed"], result["sentence"], flush=True)
    text = "\n".join(judged(kept))
    (options.out / "advice.md").write_text(page("Does the advice hold?", "make bench-advice", text))


if __name__ == "__main__":
    assert LOOKS > SMOOTHED
    main()

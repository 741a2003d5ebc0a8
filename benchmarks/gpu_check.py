"""What a single GPU shows in at most 8 minutes, part by part.

    python -m benchmarks.gpu_check [--device cuda] [--parts NAME ...] [--out FOLDER] [--tiny]

`make gpu-check` prepares what a machine without a network lacks, and prints the command for it.

- **tests**: `tests/gpu`.
- **accumulation**: GPT-2 of 124M parameters in bf16 autocast, 4 micro-batches of 8 × 1,024 tokens. Four copies train
  window by window in turn: without a probe, without one again, with every window measured, and with the first alone.
  Then some windows in which waits for the GPU are counted; if there are none, again where a wait raises. At last each
  trains alone with deterministic kernels: the peak of memory, and the weights bit for bit.
- **compiled**, **fsdp2**: the same with `torch.compile`, and with FSDP2 over a group of one rank.
- **examples**: the same with one micro-batch a window, which is read by single examples.
- **clip**: of 124M and 1.5B parameters, beside torch's.
- **entropy**: a forecast for a random Llama of 0.5B parameters in bf16, beside its training step.

Each part has a process of its own and a time by which it ends. A part that fails or hangs is recorded, and the next one
goes on. Results are written as they come, to `gpu_check.jsonl`, and after each part to `gpu_check.md`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sonde
from benchmarks.contestants import ENTRIES, PLAIN, Entry, Sonde
from benchmarks.device import checked, seconds_of
from benchmarks.gpt import GPT2_SMALL, TINY, Gpt, GptShape, sequences
from benchmarks.launch import on_ranks
from benchmarks.machine import describe
from benchmarks.memory import peak_since, start_of_peak
from benchmarks.norm import contestants as clips
from benchmarks.random_llama import HALF_A_BILLION, RandomLlama
from benchmarks.random_llama import TINY as TINY_LLAMA
from benchmarks.timing import WARM_UP_WINDOWS, cost, in_words
from benchmarks.training import Run, Setup, draw_windows
from benchmarks.waiting import waits, waits_of

WHOLE_SECONDS = 480.0
"""After so long no part begins, and the one that runs is ended."""
ROOT = Path(__file__).parent.parent
GPT2_XL = GptShape(width=1600, depth=48, heads=25, context=1024, vocabulary=50_304)
REPORTS = 10
"""Windows from one report of a probe to the next."""


@dataclass(frozen=True)
class Report:
    """Where a part writes what it finds, line by line.

    Attributes:
        part: its name.
        path: of the lines.
        tiny: whether the numbers mean nothing.
    """

    part: str
    path: Path
    tiny: bool

    def say(self, what: str, found: object) -> None:
        """Write one line, and print it."""
        print(f"{self.part}: {what}: {found}", flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"part": self.part, "what": what, "found": found}, default=str) + "\n")


# Training with a probe beside training without one.


def training(setup: Setup, report: Report, seconds: float) -> None:
    """What probes cost and whether they wait; then whether they change anything, and what memory they take."""
    per_example = "always" if setup.micro_batches == 1 else "never"
    contestants = [
        PLAIN,
        ENTRIES["control"],
        Entry("every window", partial(Sonde, report_every=REPORTS, per_example=per_example)),
        Entry("one window in 1,000", partial(Sonde, report_every=REPORTS, every=1000, per_example="auto")),
    ]
    beside_each_other(setup, contestants, report, seconds)
    # Some kernels add in an order of their own. A compiled model is compiled again for this mode: it comes last.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    expected: list[Tensor] = []
    for entry in contestants:
        weights = alone(setup, entry, report)
        expected = expected or weights
        same = sum(map(torch.equal, weights, expected))
        report.say(f"{entry.title}: weights bit for bit", f"{same} of {len(weights)} tensors")


def beside_each_other(setup: Setup, entries: Sequence[Entry], report: Report, seconds: float) -> None:
    """Train copies of the model, window by window in turn and in a changing order, for so many seconds."""
    windows = draw_windows(setup, sequences(setup.shape), 64, seed=2)
    runs = {entry.title: (run := Run(setup), entry.make(run)) for entry in entries}
    for window in windows[:WARM_UP_WINDOWS]:
        for run, contestant in runs.values():
            run.train_window(contestant, window)
    took: dict[str, list[float]] = {title: [] for title in runs}
    n_rounds, end = 0, time.monotonic() + seconds
    gc.collect()
    gc.disable()
    while n_rounds < 2 or time.monotonic() < end:
        shift = n_rounds // 2 % len(runs)
        order = [*runs][shift:] + [*runs][:shift]
        for title in order[:: -1 if n_rounds % 2 else 1]:
            run, contestant = runs[title]
            work = partial(run.train_window, contestant, windows[n_rounds % len(windows)])
            took[title].append(seconds_of(work, setup.device))
        n_rounds += 1
    gc.enable()
    plain = took[PLAIN.title]
    for title, each in took.items():
        if title != PLAIN.title:
            median, mean = in_words(cost([list(zip(plain, each, strict=True))])), sum(each) / sum(plain) - 1
            # Where few windows are measured, the median is that of the others. The mean has all.
            report.say(f"{title}: added to a window", f"median {median}; mean {mean:+.2%}; {n_rounds} windows")
    for title, (run, contestant) in runs.items():
        places = waits(run, contestant, windows[:6])
        seen = f"{len(places)} in 6 windows {dict(Counter(places))}" if setup.device == "cuda" else "not known here"
        report.say(f"{title}: waits for the device", seen)
        if isinstance(contestant, Sonde):
            report.say(f"{title}: cost as the probe says", contestant.probe.cost())
            report.say(f"{title}: reading", contestant.probe.reading())
    if setup.device == "cuda":
        report.say("a read by hand waits for the device", f"{len(waits_of(lambda: windows.sum().item()))} of 1")


def alone(setup: Setup, entry: Entry, report: Report) -> list[Tensor]:
    """Train one copy and say what memory it took; the weights afterwards."""
    before = start_of_peak(setup.device)
    run = Run(setup)
    contestant = entry.make(run)
    for window in draw_windows(setup, sequences(setup.shape), WARM_UP_WINDOWS + 2, seed=1):
        run.train_window(contestant, window)
    report.say(f"{entry.title}: peak of memory, GiB", peak_since(before, setup.device))
    if isinstance(contestant, Sonde):
        contestant.probe.close()
    return [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in run.model.parameters()]


# The clip.


def clip(setup: Setup, report: Report, seconds: float) -> None:
    """Seconds of a clip that scales, beside torch's, in turn; and how right its norm is."""
    for shape in (TINY,) if report.tiny else (GPT2_SMALL, GPT2_XL):
        with torch.device("meta"):
            shapes = [p.shape for p in Gpt(shape).parameters()]
        parameters = [nn.Parameter(torch.zeros(size, device=setup.device)) for size in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p)
        grads = [p.grad for p in parameters if p.grad is not None]
        size = sum(g.numel() for g in grads)
        title = f"{size / 1e6:,.1f}M parameters in {len(grads)} tensors"
        took: dict[str, list[float]] = {}
        calls = {name: prepare() for name, prepare in clips(parameters, None).items()}
        for name, call in calls.items():
            torch._foreach_mul_(grads, 2.0)
            exact = sum(float(g.double().square().sum()) for g in grads) ** 0.5
            report.say(f"{title}: {name}: norm over that in float64, minus 1", f"{float(call()) / exact - 1:.1e}")
        if setup.device == "cuda":
            for name, call in calls.items():
                report.say(f"{title}: {name}: waits for the device", len(waits_of(call)))
        end = time.monotonic() + seconds / 2
        while len(next(iter(took.values()), [])) < 3 or time.monotonic() < end:
            for name, call in calls.items():
                torch._foreach_mul_(grads, 2.0)  # so that each has something to clip
                took.setdefault(name, []).append(seconds_of(call, setup.device))
        for name, each in took.items():
            median = statistics.median(each)
            over = statistics.median(a / b for a, b in zip(took["torch"], each, strict=True))
            report.say(f"{title}: {name}", f"{1e3 * median:.3f} ms; torch's over it {over:.3f}; {len(each)} times")
        del parameters, grads, calls


# The forecast of entropy.


def entropy(setup: Setup, report: Report, seconds: float) -> None:
    """Seconds and memory of a forecast, beside those of the training step that it is made before."""
    policy = RandomLlama(TINY_LLAMA if report.tiny else HALF_A_BILLION, setup.device)
    parameters = list(policy.model.parameters())
    report.say("policy", f"{sum(p.numel() for p in parameters):,} parameters; {policy.size}")
    probe = sonde.EntropyChangeProbe(
        policy.model, policy.optimizer, sonde.EntropyChangeOptions(), token_statistics=sonde.CausalLMStatistics()
    )
    forecasts: list[Any] = []
    work: dict[str, Callable[[], object]] = {
        "forecast": lambda: forecasts.append(probe.forecast(policy.evaluation, policy.update)),
        "training step": policy.train,
    }
    took: dict[str, list[float]] = {name: [] for name in work}
    policy.backward()
    end = time.monotonic() + seconds
    while len(forecasts) < 2 or time.monotonic() < end:
        held = [t.clone() for p in parameters for t in (p.detach(), p.grad)]
        for name, call in work.items():
            before = start_of_peak(setup.device)
            took[name].append(seconds_of(call, setup.device))
            if len(took[name]) == 2:  # the first has warmed up
                report.say(f"{name}: memory above what was there, GiB", peak_since(before, setup.device))
            if len(forecasts) == 1 and name == "forecast":  # later, the responses are no longer the policy's own
                same = sum(map(torch.equal, held, [t for p in parameters for t in (p.detach(), p.grad)]))
                report.say("forecast: weights and gradients bit for bit", f"{same} of {len(held)} tensors")
                said = ("delta", "se", "reason", "entropy", "precision", "rounded_away", "seconds")
                report.say("forecast", {field: getattr(forecasts[0], field) for field in said})
    for name, each in took.items():
        report.say(f"{name}: s", f"first {each[0]:.3f}; later {statistics.median(each[1:]):.3f}; {len(each)} times")
    ratios = [a / b for a, b in zip(took["forecast"][1:], took["training step"][1:], strict=True)]
    report.say("forecast over training step", round(statistics.median(ratios), 3))


# The parts, one after the other.


def gpu_tests(out: Path, report: Report, seconds: float) -> None:
    """Run `tests/gpu`; count from its log, which is there also if a test hangs."""
    log = out / "tests.log"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=60",
    ]
    with log.open("w") as file:
        # A session of its own: its ranks end with it.
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: object = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = f"did not end in {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = log.read_text().splitlines()
    ended = [found[1] for line in lines if (found := re.search(r" (PASSED|FAILED|ERROR|SKIPPED)\b.*\[ *\d+%\]$", line))]
    report.say("exit status", status)
    report.say("tests", dict(Counter(ended)))
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            report.say("failed", line[:500])
    if lines and status not in (0, 1):
        report.say("last line", lines[-1])


def parts(device: str, *, tiny: bool) -> dict[str, tuple[float, Setup, Callable[..., None] | None, float]]:
    """By name: the most seconds, the set-up, and the function with the seconds that it spends on rounds."""
    shape = TINY if tiny else GPT2_SMALL
    gpt = partial(Setup, 1, 1, sequences=2 if tiny else 8, shape=shape, device=device)
    rounds = 0.0 if tiny else 1.0
    return {
        "tests": (70.0, gpt(micro_batches=4), None, 0.0),
        "accumulation": (75.0, gpt(micro_batches=4), training, 12.0 * rounds),
        "compiled": (105.0, gpt(micro_batches=4, compiled=True), training, 12.0 * rounds),
        "fsdp2": (85.0, gpt(micro_batches=4, cut="FSDP2"), training, 8.0 * rounds),
        "examples": (60.0, gpt(micro_batches=1), training, 8.0 * rounds),
        "clip": (25.0, gpt(micro_batches=1), clip, 6.0 * rounds),
        "entropy": (60.0, gpt(micro_batches=1), entropy, 8.0 * rounds),
    }


def page(lines: Sequence[dict[str, Any]], head: dict[str, str]) -> str:
    """What was found so far."""
    text = ["# What one GPU shows", "", *(f"- {name}: {value}" for name, value in head.items())]
    part = None
    for line in lines:
        if line["part"] != part:
            part = line["part"]
            text += ["", f"## {part}", ""]
        text.append(f"- {line['what']}: {line['found']}")
    return "\n".join(text) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and write `gpu_check.jsonl` and `gpu_check.md`."""
    start = time.monotonic()
    names = list(parts("cpu", tiny=True))
    out = Path(os.environ.get("OUT") or Path(__file__).parent / "results" / "gpu")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="What one GPU shows.")
    parser.add_argument("--device", type=checked, default="cuda", help="cuda, or another that torch knows")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="in the order of the list")
    parser.add_argument("--tiny", action="store_true", help="to see that the script works; the numbers mean nothing")
    parser.add_argument("--out", type=Path, default=out, help="folder to write to; by default $OUT, if it is set")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu_check.jsonl"
    path.unlink(missing_ok=True)
    # Before any process of a part begins: without it, products on several streams need not repeat.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    head = describe(options.device, ("transformers",)) | {"numbers": "mean nothing" if options.tiny else "count"}
    for name, (most, setup, run, seconds) in parts(options.device, tiny=options.tiny).items():
        if name not in options.parts:
            continue
        report = Report(name, path, options.tiny)
        began = time.monotonic()
        most = min(most, WHOLE_SECONDS - (began - start))
        try:
            if most < 5.0:
                raise RuntimeError(f"not begun: {WHOLE_SECONDS:.0f} s are over")
            if run is None:
                gpu_tests(options.out, report, most)
            else:
                on_ranks(setup, run, report, seconds, deadline_seconds=most)
        except RuntimeError as error:
            report.say("ended by an error", str(error)[-3000:])
        report.say("seconds", round(time.monotonic() - began, 1))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        (options.out / "gpu_check.md").write_text(page(lines, head))


if __name__ == "__main__":
    main()

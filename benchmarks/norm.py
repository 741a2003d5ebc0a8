"""What a global norm and a clip cost, compared with torch's and torchtitan's: `python -m benchmarks.norm`."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sonde
from benchmarks import at_scale
from benchmarks.device import add_option, count, seconds_of, stem
from benchmarks.gpt import TINY
from benchmarks.launch import on_ranks
from benchmarks.machine import describe
from benchmarks.training import Setup, device_of

MAX_NORM, NEVER_CLIPS = 1.0, 1e30
SMALL, LARGE = (32, 16), (2048, 2048)
UNEVEN, CONVOLUTION = (2048, 2000), (512, 256, 3, 3)
Clip = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """Gradients to clip.

    Attributes:
        count: how many tensors.
        shape: of each tensor, over all ranks.
        ranks: processes; with more than one, the gradients are DTensors sharded over them.
        threads: of each process.
        goals: the smallest wanted ratio of torch's time to sonde's: on the first call, and on later calls.
        max_norm: the threshold. Before each later call gradients are doubled, so that a threshold of 1 always clips.
        strides: how the elements lie in memory.
    """

    count: int
    shape: tuple[int, ...]
    ranks: int
    threads: int
    goals: tuple[float | None, float | None]
    max_norm: float = MAX_NORM
    strides: Literal["contiguous", "transposed", "channels last"] = "contiguous"

    def __str__(self) -> str:
        size = self.count * math.prod(self.shape) * 4 / 1e6
        kind = "tensors" if self.shape in (SMALL, LARGE) else f"tensors of {' × '.join(map(str, self.shape))}"
        plain = f"plain {kind}" if self.strides == "contiguous" else f"{self.strides} {kind}"
        where = f"DTensors over {self.ranks} ranks" if self.ranks > 1 else f"{plain}, one process"
        return f"{self.count:,} {where}, {size:,.0f} MB in all" + (", nothing to clip" if self.max_norm > 1 else "")

    def lay_out(self, tensor: Tensor) -> Tensor:
        """The same elements with this case's strides."""
        if self.strides == "transposed":
            return tensor.t().contiguous().t()
        if self.strides == "channels last":
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def setup(self, device: str) -> Setup:
        """For `on_ranks`."""
        return Setup(self.ranks, self.threads, micro_batches=1, sequences=1, shape=TINY, device=device)


CASES = [
    *(Case(n, SMALL, 2, 1, (50.0, 3.0)) for n in (500, 2000, 6000)),
    Case(16, LARGE, 2, 1, (None, 1.0)),
    Case(16, LARGE, 2, 1, (None, 1.6), NEVER_CLIPS),
    *(Case(n, SMALL, 1, 2, (1.0, 1.0)) for n in (500, 2000, 6000)),  # nothing is to be planned
    Case(16, LARGE, 1, 2, (1.0, 1.0)),
    Case(16, LARGE, 1, 2, (1.0, 1.6), NEVER_CLIPS),
    Case(16, UNEVEN, 1, 2, (None, 1.0)),
    Case(16, LARGE, 1, 2, (None, 1.0), strides="transposed"),
    Case(56, CONVOLUTION, 1, 2, (None, 1.0), strides="channels last"),
]


@dataclass
class Result:
    """Seconds of each contestant in one case.

    Attributes:
        case: in words.
        goals: see `Case`.
        first: the first call in a new process.
        steady: later calls, with the contestants in turn; [rounds].
        read_bytes_per_second: "norm" for sonde's norm alone, "copy" for a copy of the same gradients, which reads as
            many bytes and writes as many.
    """

    case: str
    goals: tuple[float | None, float | None]
    first: dict[str, float] = field(default_factory=dict)
    steady: dict[str, list[float]] = field(default_factory=dict)
    read_bytes_per_second: dict[str, float] = field(default_factory=dict)


def make(case: Case, setup: Setup) -> tuple[list[nn.Parameter], DeviceMesh | None]:
    """Parameters with gradients on this rank, and their mesh."""
    device = device_of(setup)
    generator = torch.Generator().manual_seed(0)
    if case.ranks == 1:
        parameters = [nn.Parameter(case.lay_out(torch.zeros(case.shape, device=device))) for _ in range(case.count)]
        for p in parameters:
            p.grad = case.lay_out(torch.randn(case.shape, generator=generator).to(device))
        return parameters, None
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(setup.device, (case.ranks,))
    rows, columns = case.shape

    def shard(local: Tensor) -> DTensor:
        return DTensor.from_local(local.to(device), mesh, [Shard(0)], run_check=False)

    parameters = []
    for _ in range(case.count):
        p = nn.Parameter(shard(torch.zeros(rows // case.ranks, columns)))
        p.grad = shard(torch.randn(rows // case.ranks, columns, generator=generator))
        parameters.append(p)
    return parameters, mesh


def contestants(
    parameters: list[nn.Parameter], mesh: DeviceMesh | None, max_norm: float = MAX_NORM
) -> dict[str, Callable[[], Clip]]:
    """By name, a function that is called once and returns the function that is called at every step."""

    def planned() -> Clip:
        plan = sonde.group_parameters_for_norm(parameters, mesh=mesh)
        return lambda: sonde.clip_grad_norm_distributed_(plan, max_norm)

    by_name: dict[str, Callable[[], Clip]] = {
        "torch": lambda: lambda: torch.nn.utils.clip_grad_norm_(parameters, max_norm),
        "sonde, planned": planned,
        "sonde": lambda: lambda: sonde.clip_grad_norm_(parameters, max_norm, mesh=mesh),
    }
    if importlib.util.find_spec("torchtitan") is not None and importlib.util.find_spec("spmd_types") is not None:
        from torchtitan.distributed.utils import clip_grad_norm_

        by_name["torchtitan"] = lambda: lambda: clip_grad_norm_(parameters, max_norm)
    return by_name


def _seconds(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call on the slowest rank, counted from the moment when all ranks are ready."""
    if dist.is_initialized():
        dist.barrier()
    took = torch.tensor(seconds_of(call, device), device=device)
    if dist.is_initialized():
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def first_call(setup: Setup, case: Case, name: str) -> float:
    """Seconds of the first call in a new process, planning included."""
    parameters, mesh = make(case, setup)
    prepare = contestants(parameters, mesh, case.max_norm)[name]
    return _seconds(lambda: prepare()(), setup.device)


def steady_calls(setup: Setup, case: Case, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of later calls, with the contestants in an order that rotates every round; and bytes per second."""
    parameters, mesh = make(case, setup)
    calls = {name: prepare() for name, prepare in contestants(parameters, mesh, case.max_norm).items()}
    for call in calls.values():
        call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    grads = [p.grad.to_local() if mesh is not None else p.grad for p in parameters]  # type: ignore[union-attr]
    gc.disable()
    for k in range(rounds):
        names = list(calls)
        for name in names[k % len(names) :] + names[: k % len(names)]:
            torch._foreach_mul_(grads, 2.0 if case.max_norm == MAX_NORM else 1.0)  # warms the cache for all alike
            took[name].append(_seconds(calls[name], setup.device))
    copies = [torch.empty_like(g) for g in grads]
    n_bytes = sum(g.numel() * g.element_size() for g in grads)
    plan = sonde.group_parameters_for_norm(parameters, mesh=mesh)

    def copy() -> None:
        for into, grad in zip(copies, grads, strict=True):
            into.copy_(grad)

    rates = {}
    for name, call in {"norm": lambda: sonde.clip_grad_norm_distributed_(plan, None), "copy": copy}.items():
        rates[name] = n_bytes / statistics.median([_seconds(call, setup.device) for _ in range(rounds)])
    gc.enable()
    return took, rates


def folded_steps(setup: Setup, case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds of a clip and a step of fused AdamW, in turn: the clip as a pass of its own, and folded into the step."""
    parameters, mesh = make(case, setup)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    plan = sonde.group_parameters_for_norm(parameters, mesh=mesh)

    def step(*, folds: bool) -> None:
        sonde.clip_grad_norm_distributed_(plan, MAX_NORM, fold_into=optimizer if folds else None)
        optimizer.step()

    took: dict[str, list[float]] = {"scaled": [], "folded": []}
    for k in range(2 * rounds + 2):
        folds = k % 2 == 1
        for p in parameters:
            assert p.grad is not None
            p.grad.mul_(2.0)  # so that there is something to clip
        seconds = _seconds(lambda folds=folds: step(folds=folds), setup.device)
        if k >= 2:
            took["folded" if folds else "scaled"].append(seconds)
    return took


def _at_scale(setup: Setup, n_parameters: int) -> dict[str, float]:
    return at_scale.measure(n_parameters)


def measure(device: str, *, quick: bool) -> dict[str, Any]:
    """All measurements, case by case."""
    start = time.monotonic()
    start_method: Literal["spawn", "forkserver"] = "forkserver" if quick else "spawn"
    results = []
    n_gpus = 0 if device == "cpu" else count(device)
    cases = [case for case in CASES if device == "cpu" or case.ranks <= n_gpus]
    if quick:
        cases = [dataclasses.replace(cases[0], count=50)]
    for case in cases:
        setup, result = case.setup(device), Result(str(case), case.goals)
        for name in contestants([], None):
            _say(start, f"first call of {name}: {case}")
            n = 1 if quick or (case.ranks > 1 and case.count > 500) else 5  # torch takes minutes at 6,000 DTensors
            repeats = [on_ranks(setup, first_call, case, name, start=start_method)[0] for _ in range(n)]
            result.first[name] = statistics.median(repeats)
        _say(start, f"later calls: {case}")
        rounds = 3 if quick else 30 if case.shape == SMALL else 15
        result.steady, result.read_bytes_per_second = on_ranks(setup, steady_calls, case, rounds, start=start_method)[0]
        results.append(result)
    large = cases[-1] if quick else next(c for c in cases if c.shape == LARGE and c.ranks == 1)
    _say(start, f"folded into a fused step: {large}")
    alone = Setup(ranks=1, threads=1, micro_batches=1, sequences=1, shape=TINY)
    folded = on_ranks(large.setup(device), folded_steps, large, 3 if quick else 15, start=start_method)[0]
    return {
        "machine": describe(device, compared=("torchtitan",)),
        "quick": quick,
        "results": [dataclasses.asdict(r) for r in results],
        "folded": {"case": str(large), **folded},
        "at_scale": on_ranks(alone, _at_scale, 100 if quick else at_scale.N_PARAMETERS, start=start_method)[0],
    }


def markdown(measured: dict[str, Any], command: str) -> str:
    """The results as a page."""
    lines = ["# What a global norm and a clip cost", ""]
    lines += [f"- {name}: {value}" for name, value in measured["machine"].items()]
    lines += [f"- again: `{command}`", ""]
    if measured["quick"]:
        lines += ["**Quick: these numbers mean nothing.**", ""]
    lines += [
        "Clips fp32 gradients to norm 1, or to a norm that they never reach. "
        "First call: in a new process, planning included. Later calls: contestants "
        "in turn in one process; the table has the median, and the median over rounds of torch's time over each. "
        "Times are those of the slowest rank.",
        "",
    ]
    for result in measured["results"]:
        lines += [f"## {result['case']}", ""]
        lines += [
            "| | first call, ms | torch's over it | later calls, ms | torch's over it |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, first in result["first"].items():
            steady = result["steady"][name]
            over = statistics.median([a / b for a, b in zip(result["steady"]["torch"], steady, strict=True)])
            lines.append(
                f"| {name} | {1e3 * first:,.1f} | {result['first']['torch'] / first:.2f} | "
                f"{1e3 * statistics.median(steady):,.2f} | {over:.2f} |"
            )
        rates = {name: rate / 1e9 for name, rate in result["read_bytes_per_second"].items()}
        goals = [f"{what} ≥ {goal:g}×" for what, goal in zip(("first", "later"), result["goals"], strict=True) if goal]
        lines += [
            "",
            f"Goal for sonde: {', '.join(goals)}. Its norm alone reads {rates['norm']:.1f} GB/s on each rank; "
            f"a copy of the same gradients reads {rates['copy']:.1f} GB/s and writes as much.",
            "",
        ]
    folded = measured["folded"]
    saved = statistics.median([1 - f / s for s, f in zip(folded["scaled"], folded["folded"], strict=True)])
    lines += [
        "## Folded into a fused step of AdamW",
        "",
        f"{folded['case']}: clip and step take {1e3 * statistics.median(folded['scaled']):,.1f} ms with a pass of "
        f"scaling, {1e3 * statistics.median(folded['folded']):,.1f} ms folded (medians). Compared pair by pair of "
        f"neighbouring steps, the median saving is {100 * saved:.0f} %.",
        "",
    ]
    planned = measured["at_scale"]
    lines += [
        "## One of 4,096 ranks",
        "",
        f"A plan for 6,000 DTensors on pp 8 × dp 64 × tp 8, with a fake process group: "
        f"{planned['planning_seconds']:.2f} s (goal ≤ 2 s). A call sends {planned['bytes']} bytes "
        f"(goal ≤ 64 kB) in {planned['collectives']} collective, and takes "
        f"{1e3 * planned['later_call_seconds']:.0f} ms here.",
        "",
    ]
    return "\n".join(lines)


def _say(start: float, text: str) -> None:
    print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write `norm_<device>.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.norm", description=__doc__)
    add_option(parser)
    parser.add_argument("--quick", action="store_true", help="half a minute, to see that it works")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    options = parser.parse_args(arguments)
    measured = measure(options.device, quick=options.quick)
    page = markdown(measured, f"python -m benchmarks.norm --device {options.device}" + " --quick" * options.quick)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / stem("norm", options.device)
    path.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
    path.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()

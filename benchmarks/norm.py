"""What a global norm and a clip cost, compared with torch's: `python -m benchmarks.norm`."""

from __future__ import annotations

import argparse
import dataclasses
import gc
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
Clip = Callable[[], Tensor]
Shapes = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Case:
    """Gradients to clip.

    Attributes:
        name: in words.
        shapes: how many tensors of each shape, over all ranks.
        goals: the smallest wanted ratio of torch's time to sonde's on later calls: planned, and drop-in.
        max_norm: the threshold. Before each later call gradients are doubled, so that a threshold of 1 always clips.
        ranks: processes; with more than one, the gradients are DTensors sharded over them.
        dtype: of the gradients.
        strides: how the elements lie in memory.
        by_layer: how many tensors each call clips; 0 for all.
        has_first_call: whether the first call is timed in new processes.
    """

    name: str
    shapes: Shapes
    goals: tuple[float, float]
    max_norm: float = MAX_NORM
    ranks: int = 1
    dtype: str = "float32"
    strides: Literal["contiguous", "transposed", "channels last"] = "contiguous"
    by_layer: int = 0
    has_first_call: bool = False

    def __str__(self) -> str:
        n_bytes = sum(n * math.prod(shape) for n, shape in self.shapes) * getattr(torch, self.dtype).itemsize
        size = f"{n_bytes / 1e6:,.0f} MB" if n_bytes > 1e6 else f"{n_bytes / 1e3:,.0f} kB"
        return f"{self.name}, {size}" + (", nothing to clip" if self.max_norm > 1 else "")

    def lay_out(self, tensor: Tensor) -> Tensor:
        """The same elements with this case's strides."""
        if self.strides == "transposed":
            return tensor.t().contiguous().t()
        if self.strides == "channels last":
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def setup(self, device: str, *, one_thread: bool = False) -> Setup:
        """For `on_ranks`: each process has one thread if there are several or `one_thread`, else two."""
        threads = 1 if self.ranks > 1 or one_thread else 2
        return Setup(self.ranks, threads, micro_batches=1, sequences=1, shape=TINY, device=device)


def _both(name: str, shapes: Shapes, unclipped: float = 1.0, **options: Any) -> list[Case]:
    """With something to clip, and without."""
    return [
        Case(name, shapes, (1.0, 1.0), **options),
        Case(name, shapes, (unclipped, unclipped), NEVER_CLIPS, **options),
    ]


LARGE: Shapes = ((16, (2048, 2048)),)
GPT2: Shapes = (*((12, shape) for shape in ((2304, 768), (768, 768), (3072, 768), (768, 3072))), (98, (768,)))
CASES = [
    *(
        Case(f"{n:,} DTensors of 32 × 16 on 2 ranks", ((n, (32, 16)),), (3.0, 2.5), ranks=2, has_first_call=n < 6000)
        for n in (500, 2000, 6000)
    ),
    *_both("16 DTensors of 2048 × 2048 on 2 ranks", LARGE, 1.5, ranks=2),
    Case("4 tensors of 32 × 16", ((4, (32, 16)),), (0.5, 0.5)),
    *_both("20 tensors of 32 × 16", ((20, (32, 16)),)),
    *_both("20 tensors of 64 × 64, clipped two by two", ((20, (64, 64)),), by_layer=2),
    *_both("500 tensors of 32 × 16", ((500, (32, 16)),), has_first_call=True),
    *_both("6,000 tensors of 32 × 16", ((6000, (32, 16)),)),
    *_both("400 tensors of 128 × 128", ((400, (128, 128)),)),
    *_both("LoRA of rank 8: 128 tensors", ((64, (8, 2048)), (64, (2048, 8)))),
    *_both("GPT-2's blocks: 146 tensors", GPT2, 1.5),
    *_both("64 tensors of 1M, 1-D", ((64, (2**20,)),), 1.5),
    *_both("16 tensors of 2048 × 2048", LARGE, 1.5, has_first_call=True),
    *_both("the same in bf16", LARGE, 1.5, dtype="bfloat16"),
    *_both("the same in fp16", LARGE, 1.5, dtype="float16"),
    Case("16 tensors of 2048 × 2000", ((16, (2048, 2000)),), (1.0, 1.0)),
    Case("16 transposed tensors of 2048 × 2048", LARGE, (1.0, 1.0), strides="transposed"),
    Case("56 channels-last convolutions", ((56, (512, 256, 3, 3)),), (1.0, 1.0), strides="channels last"),
]


@dataclass
class Result:
    """Seconds of each contestant in one case.

    Attributes:
        case: in words.
        goals: see `Case`.
        first: the first call in a new process; empty if it was not timed.
        steady: later calls, with the contestants in turn; [rounds].
    """

    case: str
    goals: tuple[float, float]
    first: dict[str, float] = field(default_factory=dict)
    steady: dict[str, list[float]] = field(default_factory=dict)


def make(case: Case, setup: Setup) -> tuple[list[nn.Parameter], DeviceMesh | None]:
    """Parameters with gradients on this rank, and their mesh."""
    device, dtype = device_of(setup), getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(0)
    mesh = init_device_mesh(setup.device, (case.ranks,)) if case.ranks > 1 else None

    def placed(local: Tensor) -> Tensor:
        local = case.lay_out(local.to(device, dtype))
        if mesh is None:
            return local
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    parameters = []
    for n, (rows, *inner) in case.shapes:
        for _ in range(n):
            shape = (rows // case.ranks, *inner)
            p = nn.Parameter(placed(torch.zeros(shape)))
            p.grad = placed(torch.randn(shape, generator=generator))
            parameters.append(p)
    return parameters, mesh


def contestants(
    parameters: list[nn.Parameter], mesh: DeviceMesh | None, max_norm: float = MAX_NORM, by_layer: int = 0
) -> dict[str, Callable[[], Clip]]:
    """By name, a function that is called once and returns the function that is called at every step."""
    size = by_layer or len(parameters)
    layers = [parameters[i : i + size] for i in range(0, len(parameters), max(size, 1))]

    def each(calls: list[Clip]) -> Clip:
        return calls[0] if len(calls) == 1 else lambda: [call() for call in calls][-1]

    def planned(layer: list[nn.Parameter]) -> Clip:
        plan = sonde.group_parameters_for_norm(layer, mesh=mesh)
        return lambda: sonde.clip_grad_norm_distributed_(plan, max_norm)

    def torchs(layer: list[nn.Parameter]) -> Clip:
        return lambda: torch.nn.utils.clip_grad_norm_(layer, max_norm)

    def drop_in(layer: list[nn.Parameter]) -> Clip:
        return lambda: sonde.clip_grad_norm_(layer, max_norm, mesh=mesh)

    return {
        "torch": lambda: each([torchs(layer) for layer in layers]),
        "sonde, planned": lambda: each([planned(layer) for layer in layers]),
        "sonde": lambda: each([drop_in(layer) for layer in layers]),
    }


def _seconds(call: Callable[[], Any], device: str, *, of_thread: bool = False) -> float:
    """Seconds of one call on the slowest rank, counted from the moment when all ranks are ready.

    With `of_thread`, those that the calling thread computed: other work on the machine disturbs them less.
    """
    if dist.is_initialized():
        dist.barrier()
    if of_thread:
        start = time.thread_time()
        call()
        took = torch.tensor(time.thread_time() - start)
    else:
        took = torch.tensor(seconds_of(call, device), device=device)
    if dist.is_initialized():
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def first_call(setup: Setup, case: Case, name: str) -> float:
    """Seconds of the first call in a new process, planning included."""
    parameters, mesh = make(case, setup)
    prepare = contestants(parameters, mesh, case.max_norm)[name]
    return _seconds(lambda: prepare()(), setup.device)


def steady_calls(setup: Setup, case: Case, rounds: int, of_thread: bool) -> dict[str, list[float]]:
    """Seconds of later calls, with the contestants in an order that rotates every round."""
    parameters, mesh = make(case, setup)
    ways = contestants(parameters, mesh, case.max_norm, case.by_layer)
    calls = {name: prepare() for name, prepare in ways.items()}
    for call in calls.values():
        call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    grads: list[Any] = [p.grad.to_local() if mesh is not None else p.grad for p in parameters]  # type: ignore[union-attr]
    gc.disable()
    for k in range(rounds):
        names = list(calls)
        for name in names[k % len(names) :] + names[: k % len(names)]:
            torch._foreach_mul_(grads, 2.0 if case.max_norm == MAX_NORM else 1.0)  # warms the cache for all alike
            took[name].append(_seconds(calls[name], setup.device, of_thread=of_thread))
    gc.enable()
    return took


def _at_scale(setup: Setup, n_parameters: int) -> dict[str, float]:
    return at_scale.measure(n_parameters)


def measure(device: str, *, quick: bool, one_thread: bool) -> dict[str, Any]:
    """All measurements, case by case."""
    start = time.monotonic()
    start_method: Literal["spawn", "forkserver"] = "forkserver" if quick else "spawn"
    results = []
    n_gpus = 0 if device == "cpu" else count(device)
    cases = [case for case in CASES if device == "cpu" or case.ranks <= n_gpus]
    if one_thread:  # torch takes minutes to begin with thousands of DTensors
        cases = [case for case in cases if case.ranks == 1 or case.shapes[0][0] <= 500]
    if quick:
        cases = [dataclasses.replace(cases[0], shapes=((50, (32, 16)),))]
    for case in cases:
        setup, result = case.setup(device, one_thread=one_thread), Result(str(case), case.goals)
        for name in contestants([], None) if case.has_first_call and not one_thread else ():
            _say(start, f"first call of {name}: {case}")
            repeats = [on_ranks(setup, first_call, case, name, start=start_method)[0] for _ in range(1 if quick else 3)]
            result.first[name] = statistics.median(repeats)
        _say(start, f"later calls: {case}")
        rounds = 3 if quick else 30 if sum(n * math.prod(shape) for n, shape in case.shapes) > 1e7 else 150
        result.steady = on_ranks(setup, steady_calls, case, rounds, one_thread, start=start_method)[0]
        results.append(result)
    alone = Setup(ranks=1, threads=1, micro_batches=1, sequences=1, shape=TINY)
    return {
        "machine": describe(device, compared=()),
        "quick": quick,
        "one_thread": one_thread,
        "results": [dataclasses.asdict(r) for r in results],
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
        "Clips gradients, fp32 if nothing else is said, to norm 1, or to a norm that they never reach. Contestants "
        "take turns in one process with 2 threads, or on 2 ranks with 1 thread each, where the slowest rank counts. "
        "Torch's time over sonde's: the median over rounds, so that sonde is faster above 1.",
        "",
        "| gradients | torch, ms | planned | `clip_grad_norm_` | goals |",
        "| --- | --- | --- | --- | --- |",
    ]
    if measured["one_thread"]:
        lines[-4] = lines[-4].replace("with 2 threads", "with 1 thread")
        lines[-4] += " Times are what the calling thread computed: other work went on beside, and waits do not count."
    for result in measured["results"]:
        steady, goals = result["steady"], " and ".join(f"{goal:g}" for goal in dict.fromkeys(result["goals"]))
        over = [_over(steady["torch"], steady[name]) for name in ("sonde, planned", "sonde")]
        median = 1e3 * statistics.median(steady["torch"])
        lines.append(f"| {result['case']} | {median:,.3g} | {over[0]:.2f} | {over[1]:.2f} | {goals} |")
    has_first = any(result["first"] for result in measured["results"])
    lines += (
        [""]
        if not has_first
        else [
            "",
            "## First calls",
            "",
            "In new processes, planning included; torch's time over sonde's.",
            "",
            "| gradients | torch, ms | planned | `clip_grad_norm_` |",
            "| --- | --- | --- | --- |",
        ]
    )
    for result in measured["results"]:
        if first := result["first"]:
            over = [first["torch"] / first[name] for name in ("sonde, planned", "sonde")]
            lines.append(f"| {result['case']} | {1e3 * first['torch']:,.3g} | {over[0]:.2f} | {over[1]:.2f} |")
    lines.append("")
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


def _over(torchs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median([a / b for a, b in zip(torchs, ours, strict=True)])


def _say(start: float, text: str) -> None:
    print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write `norm_<device>.json` and `.md`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.norm", description=__doc__)
    add_option(parser)
    parser.add_argument("--quick", action="store_true", help="half a minute, to see that it works")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    parser.add_argument("--one-thread", action="store_true", help="CPU time of one thread, for a machine that is busy")
    options = parser.parse_args(arguments)
    measured = measure(options.device, quick=options.quick, one_thread=options.one_thread)
    command = f"python -m benchmarks.norm --device {options.device}"
    page = markdown(measured, command + " --quick" * options.quick + " --one-thread" * options.one_thread)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / (stem("norm", options.device) + "_one_thread" * options.one_thread)
    path.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
    path.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()

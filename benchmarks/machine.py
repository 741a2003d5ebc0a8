"""The machine, versions and commit behind a result."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.device import count, full_name


def describe(device: str, compared: Sequence[str] = ("adaptdl", "fairscale", "k-diffusion")) -> dict[str, str]:
    """Machine, versions, date and commit, for people."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = " with uncommitted changes" if _git("status", "--porcelain", "--", "src", "benchmarks/*.py") else ""
    gpu = {"GPU": f"{count(device)} × {full_name(device)}"} if device != "cpu" else {}
    return {
        **gpu,
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "compared": ", ".join(_versions(*compared)) or "no other package installed",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": (commit or "unknown") + changed,
    }


def page(title: str, command: str, tables: str, device: str = "cpu") -> str:
    """A page of results: a title, how to repeat it, where it ran, and its tables."""
    facts = {name: value for name, value in describe(device, ()).items() if name != "compared"}
    machine = ", ".join(f"{name}: {value}" for name, value in facts.items())
    return f"# {title}\n\n`{command}`, {machine}.\n\n{tables}\n"


def import_seconds(n_repeats: int) -> float:
    """Seconds that `import sonde` takes beyond `import torch`: medians of new processes, which alternate.

    Of both, Python finds the compiled files, as in an installation by pip: a run that may compile them comes first. A
    single repeat does without.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    took: dict[str, list[float]] = {"torch": [], "sonde": []}
    n_compiling = 1 if n_repeats > 1 else 0
    for k in range(n_compiling + n_repeats):
        for name, seconds in took.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {name}"], check=True, env=environment)
            if k >= n_compiling:
                seconds.append(time.perf_counter() - start)
    return statistics.median(took["sonde"]) - statistics.median(took["torch"])


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown CPU"


def _git(*args: str) -> str:
    root = Path(__file__).parent.parent
    try:
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # a bare machine has no git
        return ""
    return done.stdout.strip()


def _versions(*packages: str) -> list[str]:
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return versions

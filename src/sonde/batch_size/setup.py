"""What attaching checks, decides and says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from typing_extensions import TypeIs

from sonde.parallel.wrappers import block_of, unwrap_optimizer


def check_options(
    *,
    unit: object,
    units_per_piece: object,
    log_every: object,
    horizon: object,
    tap: object,
    metric: object,
    optimizer: object,
    grad_scaler: object,
    sinks: object,
    staging_mib: object,
) -> None:
    """Refuse what can be refused before the model is looked at.

    Raises:
        ValueError: naming the option, what it got and what it takes.
    """
    if not isinstance(unit, str) or not unit.strip():
        raise ValueError(f"unit must name the independent sample, got {unit!r}: 'sequences', 'images', 'prompts'")
    if units_per_piece is not None and not (_is_number(units_per_piece) and 0 < units_per_piece < math.inf):
        raise ValueError(f"units_per_piece must be positive and finite, got {units_per_piece!r}")
    if isinstance(log_every, bool) or not isinstance(log_every, int) or log_every < 1:
        raise ValueError(f"log_every must be a whole number of windows from 1 up, got {log_every!r}")
    if not (_is_number(horizon) and horizon > 1):
        raise ValueError(f"horizon must be more than 1 window, got {horizon!r}: use 100, or math.inf to average all")
    if tap not in ("auto", "leaf", "comm_hook"):
        raise ValueError(f"tap must be 'auto', 'leaf' or 'comm_hook', got {tap!r}")
    if metric not in ("euclidean", "adam"):
        raise ValueError(f"metric must be 'euclidean' or 'adam', got {metric!r}")
    if metric == "adam" and optimizer is None:
        raise ValueError("metric='adam' reads the optimizer's second moments, got no optimizer: pass it to attach")
    if optimizer is not None and not hasattr(unwrap_optimizer(optimizer), "register_step_pre_hook"):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if grad_scaler is not None and not hasattr(grad_scaler, "is_enabled"):
        raise ValueError(f"grad_scaler must be a torch.amp.GradScaler, got {grad_scaler!r}")
    if not isinstance(sinks, Iterable) or any(not callable(getattr(sink, "write", None)) for sink in sinks):
        raise ValueError(f"sinks must be a list of sinks, got {sinks!r}: sinks=[sonde.JsonlSink('runs/my-run')]")
    if not (_is_number(staging_mib) and 0 <= staging_mib < math.inf):
        raise ValueError(f"staging_mib must be ≥ 0 and finite, got {staging_mib!r}")


def _is_number(value: object) -> TypeIs[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def group_names(groups: object, parameters: Iterable[str]) -> list[str]:
    """The name of each parameter's group.

    Args:
        groups: "blocks", None, or a function from a parameter's name to its group's.
        parameters: names.

    Raises:
        ValueError: when `groups` is something else, or returns anything but names.
    """
    if groups == "blocks":
        return [block_of(name) for name in parameters]
    if groups is None:
        return ["all" for _ in parameters]
    if not callable(groups):
        raise ValueError(f"groups must be 'blocks', None or a function from a parameter's name, got {groups!r}")
    names = [groups(name) for name in parameters]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"groups must return a group's name, a str, for each parameter, got {names[0]!r}, …")
    return names


def describe(setup: Mapping[str, Any], unit: str) -> str:
    """The block that attach prints."""
    groups = setup["groups"]
    shown = ", ".join(groups[:4]) + (f", … {groups[-1]}" if len(groups) > 5 else "".join(f", {g}" for g in groups[4:]))
    hook = f", communication hook {setup['comm_hook']}" if setup["comm_hook"] else ""
    rows = {
        "model": f"{setup['wrapper']}, {setup['parameters']:,} trainable parameters on {setup['device']}{hook}",
        "ranks": f"{setup['ranks']} data-parallel",
        "pieces": f"read by {setup['tap']}; how many a window is said after the first",
        "unit": unit,
        "groups": f"{len(groups)}: {shown}",
    }
    return "noise scale attached\n" + "\n".join(f"  {name:<8}{text}" for name, text in rows.items())


def describe_window(n_pieces: int, n_units: float, n_ranks: int, unit: str) -> str:
    """The line that follows the first window."""
    each = f" ({n_ranks} ranks × {n_pieces / n_ranks:g})" if n_ranks > 1 else ""
    return f"{n_pieces} pieces per window{each}, {n_units:g} {unit} in all"

"""The lines that the entropy demo prints: each forecast beside its truth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from sonde.policy.stats.forecast_point import forecast_point
from sonde.wording import number

_COLUMNS = f"{'step':>9}  {'reward':>6}  {'entropy':>7}  {'forecast ± SE':>19}  {'truth ± SE':>19}"


class ForecastLines:
    """A sink that prints a policy's records as they are written: the same numbers as in the log.

    Args:
        n_steps: number of optimizer steps of the run.
        console: where the lines go.
    """

    def __init__(self, n_steps: int, console: Console) -> None:
        self._n_steps, self._console = n_steps, console
        self._has_head = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Print a record."""
        match record["kind"]:
            case "alert":
                self._console.print(f"alert: {record['message']}", style="yellow", markup=False, highlight=False)
            case "policy":
                if not self._has_head:
                    self._has_head = True
                    self._console.print(_COLUMNS, style="dim", soft_wrap=True)
                self._console.print(record_line(record, self._n_steps), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """No record follows."""


def record_line(record: Mapping[str, Any], n_steps: int) -> str:
    """A policy's record as one line.

    Example:
        >>> entropy = {"evaluation_per_token": 1.2, "delta_forecast": -0.0213, "delta_se": 0.001}
        >>> entropy |= {"delta_rollouts": -0.02, "delta_rollouts_se": 0.0001, "is_valid": 1}
        >>> metrics = {"reward": 0.5} | {f"entropy/{name}": value for name, value in entropy.items()}
        >>> record_line({"window": 6, "metrics": metrics, "reason": ""}, 120)
        '    6/120    0.50     1.20  −2.13e-2 ± 1.0e-3  −2.00e-2 ± 1.0e-4'
    """
    metrics = record["metrics"]
    point = forecast_point(record["window"], metrics, reason=record["reason"])
    step = f"{record['window']}/{n_steps}"
    reward = "–" if metrics.get("reward") is None else f"{metrics['reward']:.2f}"
    entropy = "–" if point.entropy is None else number(point.entropy)
    forecast = _with_error(metrics.get("entropy/delta_forecast"), metrics.get("entropy/delta_se"))
    truth = _with_error(metrics.get("entropy/delta_rollouts"), metrics.get("entropy/delta_rollouts_se"))
    doubt = ""
    if not point.is_valid and record["reason"]:
        doubt = "  step too large" if point.is_too_large else f"  {record['reason'].split(':')[0]}"
    return f"{step:>9}  {reward:>6}  {entropy:>7}  {forecast:>17}  {truth:>17}{doubt}"


def _with_error(value: float | None, se: float | None) -> str:
    if value is None:
        return "–"
    return _short(value, 2) + ("" if se is None else f" ± {_short(se, 1)}")


def _short(value: float, decimals: int) -> str:
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa.replace('-', '−')}e{int(exponent)}"

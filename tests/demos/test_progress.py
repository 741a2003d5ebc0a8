from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sonde.demos.byte_lm.options import DemoOptions, Setup, decide
from sonde.demos.byte_lm.progress import TrainingDisplay, describe_cost, describe_noise_scale, trend

SETUP: Setup = decide(DemoOptions(steps=20), Path("out"), n_gpus=0, n_cores=2)
HEADER = {"kind": "header", "setup": {"parameters": 1_066_880, "ranks": 2, "device": "cuda:0"}}


def _reading(window: int, status: str = "resolved", reason: str = "", **metrics: float | None) -> dict[str, Any]:
    known = {
        "gns/b_simple": 38.2,
        "gns/b_simple_low": 35.0,
        "gns/b_simple_high": 43.1,
        "loss": 2.3142,
        "run/units_per_second": 100.0,
        "cost/fraction": 0.021,
    }
    return {
        "kind": "reading",
        "window": window,
        "status": status,
        "reason": reason,
        "alerts": {},
        "metrics": known | metrics,
    }


def _shown(*records: dict[str, Any], terminal: bool) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100, _environ={"TERM": "xterm"})
    with TrainingDisplay(SETUP, console) as display:
        for record in records:
            display.write(record)
            display.advance(record.get("window", 0))
    return screen.getvalue().replace("\N{NO-BREAK SPACE}", " ")


def test_noise_scale_in_words() -> None:
    assert describe_noise_scale(_reading(1)) == "38.2 [35 – 43.1] sequences"
    bound = _reading(1, "lower_bound", **{"gns/b_simple": None, "gns/b_simple_low": 12.0, "gns/b_simple_high": None})
    assert describe_noise_scale(bound) == "> 12 sequences (lower bound)"
    nothing = dict.fromkeys(("gns/b_simple", "gns/b_simple_low", "gns/b_simple_high"))
    assert describe_noise_scale(_reading(1, "unresolved", "2 windows", **nothing)) == "not known yet: 2 windows"


def test_the_cost_says_which_windows_it_is_of() -> None:
    def said(**cost: float) -> str:
        return describe_cost(_reading(1)["metrics"] | {f"cost/{name}": value for name, value in cost.items()})

    every_window = "2.1 % of the step time, while every window is measured; by default, sonde keeps to 1 %"
    assert said().replace("\N{NO-BREAK SPACE}", " ") == every_window
    assert said(every=1, share=0.04) == said()
    sparse = said(every=7, share=0.009).replace("\N{NO-BREAK SPACE}", " ")
    assert sparse == "0.90 % of the step time, one window in 7 measured"


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([3.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 1.0, 2.0, 7.0], "▁▂▃█"), ([-1.0, 6.0], "▁█")],
)
def test_trend(values: list[float], bars: str) -> None:
    assert trend(values) == bars


def test_trend_thins_out_many_values_and_keeps_the_last() -> None:
    assert trend([float(i) for i in range(1000)], width=8) == "▁▂▃▄▅▆▇█"


def test_a_terminal_shows_every_number_and_alerts() -> None:
    alert = {"kind": "alert", "name": "same_data", "message": "ranks see the same data"}
    last = _reading(20, loss=2.0) | {"alerts": {"same_data": "ranks see the same data"}}
    shown = _shown(HEADER, _reading(10), alert, last, terminal=True)
    for text in (
        "1,066,880 parameters, 2 ranks on cuda",
        "20/20",
        "2 nats per byte",
        "38.2 [35 – 43.1] sequences",
        "32 sequences of 96 bytes",
        "9,600 tokens/s",
        "2.1 % of the step time",
        "! ranks see the same data",
    ):
        assert text in shown


def test_an_alert_leaves_the_panel_when_its_cause_is_gone() -> None:
    alert = {"kind": "alert", "name": "same_data", "message": "ranks see the same data"}
    shown = _shown(HEADER, alert, _reading(20), terminal=True)
    assert "ranks see the same data" not in shown.split("20/20")[-1]


def test_without_a_terminal_there_are_plain_lines_without_control_codes() -> None:
    alert = {"kind": "alert", "name": "same_data", "message": "ranks see the same data"}
    shown = _shown(HEADER, _reading(10), alert, _reading(20), terminal=False)
    assert "\x1b" not in shown
    assert shown.splitlines() == [
        "alert: ranks see the same data",
        "step 20/20, loss 2.31, B_simple 38.2 [35 – 43.1] sequences, 9,600 tokens/s, probe 2.1 % (every window)",
    ], "one line every few seconds, and the last step"


def test_other_ranks_show_nothing() -> None:
    screen = io.StringIO()
    with TrainingDisplay(SETUP, Console(file=screen, quiet=True, force_terminal=True)) as display:
        display.advance(20)
    assert screen.getvalue() == ""

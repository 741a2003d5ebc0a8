"""The settings of `sonde run`, on their way from the command to the processes of the script."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sonde.commands.run_script.endings import LogOfScript
from sonde.records import RunLog

VARIABLE = "SONDE_RUN"
"""The environment variable that holds the settings. Launchers hand it on to the processes that they start."""


@dataclass(frozen=True)
class Settings:
    """How a script is to be measured.

    Attributes:
        command: the script with its arguments, for the log.
        folder: of the log, as an absolute path.
        unit: plural name of the independent sample; None for rows, or what a trainer's batches hold.
        units_from: what shows the units of a micro-batch.
        weights_from: what shows its weight in the loss.
        reduced_by_hand: whether the script averages gradients over all ranks by itself.
        micro_batches: whether several backwards in a step are micro-batches, also where there are several models.
        budget: part of the run's time that measuring may cost; None to measure every window.
        every: measure one window in so many; None to go by the budget.
        report: whether a report is written at the end.
    """

    command: tuple[str, ...]
    folder: str
    unit: str | None = None
    units_from: str = "first-dim"
    weights_from: str = "auto"
    reduced_by_hand: bool = False
    micro_batches: bool = False
    budget: float | None = 0.01
    every: int | None = None
    report: bool = True

    def log_in(self, folder: Path, before_the_end: Callable[[], None]) -> RunLog:
        """The log of one model of the script.

        Args:
            folder: of the log.
            before_the_end: called when SIGTERM is about to end the process.
        """
        return RunLog(
            LogOfScript(folder, before_the_end), run=folder.name, metadata={"command": " ".join(self.command)}
        )

    def in_environment(self) -> str:
        """The value of the variable."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of_environment(environment: Mapping[str, str]) -> Settings:
        """The settings that `sonde run` has put there.

        Raises:
            KeyError: when this process was not started by `sonde run`.
        """
        values = json.loads(environment[VARIABLE])
        return Settings(**values | {"command": tuple(values["command"])})

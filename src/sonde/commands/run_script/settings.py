"""The settings of `sonde run`, on their way from the command to the processes of the script."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonde.commands.run_script.endings import LogOfScript, is_of_start
from sonde.records import RunLog

VARIABLE = "SONDE_RUN"
"""The environment variable that holds the settings. Launchers hand it on to the processes that they start."""


@dataclass(frozen=True)
class Settings:
    """How a script is to be measured.

    Attributes:
        command: the script with its arguments, for the log.
        folder: of the first log, as an absolute path.
        start: of the command, in words: the logs of one start are not mixed.
        unit: plural name of the independent sample; None for rows, or what a trainer's batches hold.
        units_from: what shows the units of a micro-batch.
        weights_from: what shows its weight in the loss.
        reduced_by_hand: whether the script averages gradients over all ranks by itself.
        micro_batches: whether several backwards in a step are micro-batches, also where there are several models.
        budget: part of the run's time that measuring may cost.
        allowance: seconds that it may take in any case.
        every: measure one window in so many; None to go by the budget.
        report: whether a report is written at the end.
    """

    command: tuple[str, ...]
    folder: str
    start: str
    unit: str | None = None
    units_from: str = "first-dim"
    weights_from: str = "auto"
    reduced_by_hand: bool = False
    micro_batches: bool = False
    budget: float = 0.01
    allowance: float = 10.0
    every: int | None = None
    report: bool = True

    def log(self) -> tuple[RunLog, LogOfScript]:
        """The log of one model of the script, and its file."""
        file = LogOfScript(Path(self.folder), self.start)
        return RunLog(file, metadata={"command": " ".join(self.command), "start": self.start}), file

    @property
    def has_log(self) -> bool:
        """Whether any process of the script has begun the first log, or gone on with it."""
        return is_of_start(Path(self.folder), self.start)

    @property
    def averaging(self) -> dict[str, Any]:
        """Arguments of `sonde.attach`: how many windows are measured."""
        return {"budget": self.budget, "allowance": self.allowance, "every": self.every}

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
        # torchrun starts all processes again if one fails: these go on with the logs.
        again = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        start = values["start"] + (f", restart {again}" if again != "0" else "")
        return Settings(**values | {"command": tuple(values["command"]), "start": start})

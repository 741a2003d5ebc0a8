"""The settings of `sonde run`, on their way from the command to the processes of the script, and the script's logs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonde.log.lines import last_header
from sonde.log.sinks import RECORDS_NAME, JsonlSink
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
        pid: of the process that the command becomes; 0 where that is torchrun.
        unit: plural name of the independent sample; None for rows, or what a trainer's batches hold.
        units_from: what shows the units of a micro-batch.
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
    pid: int = 0
    unit: str | None = None
    units_from: str = "first-dim"
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
        return _is_of_start(Path(self.folder), self.start)

    @property
    def pace(self) -> dict[str, Any]:
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


class LogOfScript(JsonlSink):
    """A log in a folder that no other model of this start of `sonde run` writes to.

    A script trains several models, and a command starts several processes that know nothing of each other. So the
    folder is looked for with the first reading: the given one, or the same with -2, -3 and so on at the end. A log of
    an earlier start gets another run. A training without a reading leaves no log: its first batch may not have fitted
    into memory, and the script begins anew with a smaller one.

    Args:
        folder: the first to try.
        start: of `sonde run`, as in the metadata of its logs.
    """

    def __init__(self, folder: Path, start: str) -> None:
        super().__init__(folder)
        self._first, self._start = folder, start
        self._held: list[Mapping[str, object]] = []
        """Records before the first reading."""
        self.folder: Path | None = None
        """Of the log; None before the first reading."""

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record; the first reading takes a folder, and brings what came before it."""
        if self.folder is not None:
            super().write(record)
            return
        self._held.append(record)
        if record["kind"] == "reading":
            self.folder = self._take_folder()
            for held in self._held:
                super().write({**held, "run": self.folder.name} if held["kind"] == "header" else held)
            self._held = []

    def _take_folder(self) -> Path:
        for n in itertools.count(1):
            folder = self._first if n == 1 else self._first.with_name(f"{self._first.name}-{n}")
            self.path = folder / RECORDS_NAME
            try:
                self.lock(patience=0.05)
            except ValueError:  # another process or model writes there
                continue
            if not _is_of_start(folder, self._start):
                return folder
            self.unlock()  # begun and ended by another model
        raise AssertionError("unreachable")


def _is_of_start(folder: Path, start: str) -> bool:
    """Whether the last run of a folder's log, if it has one, is of this start of `sonde run`."""
    header = last_header(folder / RECORDS_NAME)
    return header is not None and header.get("metadata", {}).get("start") == start

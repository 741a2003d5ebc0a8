"""A training of transformers' Trainer, measured by sonde's integration, which knows what the trainer's batches hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from sonde.batch_size.probe import NoiseScaleProbe
from sonde.commands.run_script.counted_units import units_in_batch
from sonde.commands.run_script.endings import PATIENCE, LogOfScript, say_where
from sonde.commands.run_script.messages import is_first_rank, say
from sonde.commands.run_script.settings import Settings
from sonde.integrations.guarded import GuardedProbe
from sonde.records import RunLog


class MeasuredTrainer:
    """Measures one training.

    Args:
        trainer: that is about to train.
        settings: of `sonde run`.

    Raises:
        ValueError: for a trainer that cannot be measured, with the reason.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        from sonde.integrations.transformers import TransformersProbe
        from sonde.integrations.transformers_batches import MicroBatches

        batches = MicroBatches(trainer, units_in_batch(settings.units_from))
        self.name = type(trainer).__name__
        self._writes_report, self._has_said = settings.report, False
        options = {"unit": settings.unit or batches.unit, **settings.averaging}
        self._probe = _UnseenProbe(options, settings.log)
        self._callback: TransformersProbe | None = TransformersProbe(trainer, batches, self._probe)

    def training_ended(self) -> None:
        """The training has ended, or has raised: leave the trainer as it was, and let go of it."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback.close()

    @property
    def has_stepped(self) -> bool:
        """Whether a step was taken, measured or not."""
        reading = self._probe.reading()
        return reading is not None and bool(reading.windows or reading.dropped)

    def close(self, reason: str) -> None:
        """Measure no more. Other ranks may be gone, so they are not waited for long."""
        if (probe := self._probe.probe) is not None:
            with contextlib.suppress(Exception):
                probe.close(reason, patience=PATIENCE)

    def say_end(self, number: int | None) -> None:
        """Say the reading, and write the report; once, and nothing where nothing was measured.

        Args:
            number: of the training among those of the script; None for a single one.
        """
        reading = self._probe.reading()
        if not is_first_rank() or reading is None or self._has_said:
            return
        self._has_said = True
        say(str(reading) if number is None else f"{number}. {self.name}: {reading}")
        say_where(self._probe.file, writes_report=self._writes_report)


class _UnseenProbe(GuardedProbe):
    """A probe that adds nothing to the trainer's own logs, which some print, or to its checkpoints.

    Its last reading is said when the script ends.

    Args:
        options: of `sonde.attach`.
        new_log: makes a log. Each beginning has its own: a Trainer begins anew if a batch does not fit into memory.
    """

    def __init__(self, options: Mapping[str, Any], new_log: Callable[[], tuple[RunLog, LogOfScript]]) -> None:
        super().__init__(options)
        self._new_log = new_log
        self.file: LogOfScript | None = None

    def begin(self, *args: Any, **kwargs: Any) -> None:
        self.end("training began again")  # before its log is replaced
        self._log, self.file = self._new_log()
        super().begin(*args, **kwargs)

    def metrics(self) -> Mapping[str, float]:
        return {}

    def keep(self, probe: NoiseScaleProbe) -> None:
        self._verbose = False
        super().keep(probe)

    def state_dict(self) -> dict[str, Any] | None:
        return None

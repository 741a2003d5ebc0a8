"""A training of transformers' Trainer, measured by sonde's integration, which knows what the trainer's batches hold."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonde.commands.run_script.counted_units import units_in_batch
from sonde.commands.run_script.endings import PATIENCE, say_where
from sonde.commands.run_script.messages import is_first_rank, say
from sonde.commands.run_script.settings import Settings
from sonde.integrations.trainer_probe import TrainerProbe


class MeasuredTrainer:
    """Measures one training.

    Args:
        trainer: that is about to train.
        settings: of `sonde run`.
        folder: of its log.

    Raises:
        ValueError: for a trainer that cannot be measured, with the reason.
    """

    def __init__(self, trainer: Any, settings: Settings, folder: Path) -> None:
        from sonde.integrations.transformers import TransformersProbe
        from sonde.integrations.transformers_batches import MicroBatches

        batches = MicroBatches(trainer, units_in_batch(settings.units_from))
        options = {"unit": settings.unit or batches.unit, "budget": settings.budget, "every": settings.every}
        self._folder, self._writes_report, self._has_said = folder, settings.report, False
        self._is_left_open = True
        """Whether the trainer has not ended its training, which says the reading."""
        self._probe = _UnseenProbe(options, log=settings.log_in(folder, self._say_end))
        TransformersProbe(trainer, batches, self._probe)

    def close(self, reason: str) -> None:
        """Measure no more. Other ranks may be gone, so they are not waited for long."""
        if (probe := self._probe.probe) is not None:
            with contextlib.suppress(Exception):
                probe.close(reason, patience=PATIENCE)

    def end(self, reason: str) -> None:
        """The script ends: complete the log, say the reading if the trainer did not, and write the report."""
        self._is_left_open = self._probe.probe is not None
        self.close(reason)
        self._say_end()

    def _say_end(self) -> None:
        reading = self._probe.reading()
        if not is_first_rank() or reading is None or self._has_said:
            return
        self._has_said = True
        if self._is_left_open:
            say(str(reading))
        say_where(self._folder, writes_report=self._writes_report)


class _UnseenProbe(TrainerProbe):
    """A probe that adds nothing to the trainer's own logs, which some print, or to its checkpoints."""

    def metrics(self) -> Mapping[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        return None

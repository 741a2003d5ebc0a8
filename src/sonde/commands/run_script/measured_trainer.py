"""A training of transformers' Trainer in a script, measured by its integration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sonde.batch_size.probe import NoiseScaleProbe
from sonde.commands.run_script.measured import PATIENCE
from sonde.commands.run_script.settings import LogOfScript, Settings
from sonde.commands.run_script.units import units_in_batch
from sonde.integrations.transformers import TransformersProbe
from sonde.integrations.transformers_batches import MicroBatches


class MeasuredTrainer(TransformersProbe):
    """A training of transformers' Trainer, whose integration knows what the trainer's batches hold.

    It adds nothing to the trainer's own logs, which some print, or to its checkpoints. Each beginning has a log of its
    own: a Trainer begins anew if a batch does not fit into memory.

    Args:
        trainer: that is about to train.
        settings: of `sonde run`.

    Raises:
        ValueError: for a trainer that cannot be measured, with the reason.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        batches = MicroBatches(trainer, units_in_batch(settings.units_from))
        options = {"unit": settings.unit or batches.unit, "trainer": batches.trainer_name, **settings.pace}
        super().__init__(trainer, batches, options)
        self.name, self._new_log = type(trainer).__name__, settings.log
        self.file: LogOfScript | None = None

    def close(self, reason: str = "training ended") -> None:
        """Measure no more, and let go of the trainer. Other ranks may be gone, so they are not waited for long."""
        self.end(reason, patience=PATIENCE)
        self.undo.close()
        self._trainer = self._batches = None

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """See `GuardedProbe.begin`."""
        self.end("training began again")  # before its log is replaced
        self._places, self.file = self._new_log()
        super().begin(*args, **kwargs)

    def metrics(self) -> Mapping[str, float]:
        """None for the trainer's own logs."""
        return {}

    def keep(self, probe: NoiseScaleProbe) -> None:
        """Keep the last reading, which is said when the script ends."""
        self._verbose = False
        super().keep(probe)

    def averages(self) -> dict[str, Any] | None:
        """None for checkpoints."""
        return None

"""What is measured of a script: models by `sonde.attach`, and trainings of transformers' Trainer by its integration."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sonde
from sonde.batch_size.found_model import RanksOfModel, raised_on_all_ranks
from sonde.batch_size.last_words import said_at_end
from sonde.batch_size.probe import PLAIN_LOOP, NoiseScaleProbe
from sonde.commands.run_script.model_search import ModelOfOptimizers, trainable
from sonde.commands.run_script.settings import LogOfScript, Settings
from sonde.commands.run_script.units import units_in_batch, units_of
from sonde.integrations.guarded import GuardedProbe
from sonde.parallel.placements import is_dtensor, is_partial
from sonde.parallel.refused_models import kinds_of, living_of
from sonde.parallel.unwrap import unwrap_model

PATIENCE = 2.0
"""Seconds in which other ranks may still sum the last windows with this one. They may be gone."""


class MeasuredModel:
    """A model of the script with its probe. Steps of its optimizers end the windows by themselves.

    Args:
        found: the model, and the optimizers that step it.
        settings: of `sonde run`.
        earlier: models that were attached to before.
        others_train: whether the script trains other models beside this one now.

    Raises:
        ValueError: when the model cannot be measured, with the reason.
    """

    def __init__(
        self,
        found: ModelOfOptimizers,
        settings: Settings,
        *,
        earlier: Iterable[MeasuredModel],
        others_train: Callable[[MeasuredModel], bool],
    ) -> None:
        self.name = type(unwrap_model(found.model)).__name__
        self._parameters = trainable(found.model.parameters()).keys()
        log, self.file = settings.log()
        self._probe: NoiseScaleProbe | None = _attached(found, settings, log)
        self.n_windows_before = {model: model.n_windows for model in earlier}
        self._others_train = others_train
        if not settings.micro_batches:
            self._probe.judge_further_backwards(self._why_no_micro_batch)
        self.optimizers = weakref.WeakSet(found.optimizers)
        """Those that step the model. When all are gone, the script is done with its training."""
        self.reads_parts = False
        """Whether the script reads its own rank's part of norms that are still to be summed over ranks."""
        self._n_windows = 0
        self.said_at_end: Sequence[str] = ()
        """What to say of it when the script ends, in lines."""

    def _why_no_micro_batch(self) -> str:
        if not self._others_train(self):
            return ""
        return (
            f"the script trains several models, and a step of {self.name} has {self.probe.n_pieces + 1} backwards. "
            "Losses of different kinds (of real and of generated images) are no micro-batches of one batch: if these "
            "are, pass --micro-batches"
        )

    @property
    def probe(self) -> NoiseScaleProbe:
        """Of a model that is still measured."""
        assert self._probe is not None
        return self._probe

    def holds_any(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of these tensors is a parameter of the model."""
        return not self._parameters.isdisjoint(map(id, tensors))

    @property
    def n_windows(self) -> int:
        """Windows that its optimizers have ended, measured or not."""
        return self._n_windows if self._probe is None else self._probe.n_windows

    def was_done_before(self, other: MeasuredModel) -> bool:
        """Whether it has taken its last step before the other model was attached, as that of an earlier fold has."""
        return 0 < self.n_windows == other.n_windows_before.get(self)

    def clipped(self, tensors: Sequence[Tensor], norm: Tensor, max_norm: float | None) -> bool:
        """Note the norm of these parameters or gradients, and a clip by it. Returns whether they are all it has.

        What the script does with a norm that is still to be summed over ranks is not known before it `reads_parts`.
        """
        is_whole = self.probe.takes_all(tensors)
        if is_whole and (self.reads_parts or not is_partial(norm)):
            self.probe.note_clip(norm, max_norm)
        return is_whole

    def close(self, reason: str) -> None:
        """Remove all hooks, end the log and let go of the model. Other ranks may be gone: they are not waited for long.

        Args:
            reason: for the log.
        """
        probe, self._probe = self._probe, None
        if probe is not None:
            with contextlib.suppress(Exception):
                probe.close(reason, patience=PATIENCE)
            self._n_windows = probe.n_windows
            with contextlib.suppress(Exception):
                self.said_at_end = self._verdict_of(probe)

    def _verdict_of(self, probe: NoiseScaleProbe) -> Sequence[str]:
        reading, said = probe.reading(), " ".join(probe.alerts.values())
        if not reading.windows and said and (not probe.n_windows or str(reading.reason) in said):
            return (f"no step of {self.name} could be measured: see above",)
        if not probe.n_windows:
            return (f"no step of {self.name} was measured",)
        return said_at_end(probe, reading)


def _attached(found: ModelOfOptimizers, settings: Settings, log: sonde.RunLog) -> NoiseScaleProbe:
    """A probe of the model.

    Raises:
        ValueError: on all ranks of the model, when it cannot be measured on one of them.
    """
    model = found.model
    group = dist.group.WORLD if _is_reduced_by_hand(model) else None
    with raised_on_all_ranks(model, RanksOfModel(group)):
        if why := why_not_reduced(model, settings):
            raise ValueError(why)
        units = units_of(settings.units_from, settings.weights_from, model)
        scaler = _enabled_grad_scaler()
    device = next(model.parameters()).device.type
    with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
        return sonde.attach(
            model,
            found.optimizers,
            unit=settings.unit or "rows",
            units_per_piece=units,
            **settings.pace,
            grad_scaler=scaler,
            process_group=group,
            trainer=trainer_of(model, *found.optimizers),
            log=log,
        )


_TRAINERS = {
    **dict.fromkeys(("lightning", "pytorch_lightning"), "Lightning"),
    **{name: name for name in ("torchtitan", "nanochat")},
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron",
}
"""The trainer by the package of a class."""


def trainer_of(model: nn.Module, *optimizers: object) -> str:
    """The trainer that a script uses, for `sonde advise`: the package that a class of its model or optimizers is from.

    Args:
        model: as the script calls it.
        *optimizers: that step it.
    """
    classes = (kind for each in (unwrap_model(model), *optimizers) for kind in type(each).__mro__)
    packages = (kind.__module__.split(".")[0] for kind in classes)
    return next((_TRAINERS[name] for name in packages if name in _TRAINERS), PLAIN_LOOP)


def why_not_reduced(model: nn.Module, settings: Settings) -> str:
    """Why a model cannot be measured in this job of several processes; empty if it can.

    Args:
        model: as the script calls it.
        settings: of `sonde run`.
    """
    if settings.reduced_by_hand or not _is_reduced_by_hand(model):
        return ""
    return (
        f"the model is neither in DDP nor cut by FSDP2, and this is a job of {dist.get_world_size()} processes: pass "
        "--reduced-by-hand if the script averages or adds up the gradients over all of them by itself"
    )


def _is_reduced_by_hand(model: nn.Module) -> bool:
    """Whether neither DDP nor FSDP2 averages the gradients of a model, or of a part of it, over the ranks of a job."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    has_ddp = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return not has_ddp and not any(map(is_dtensor, model.parameters()))


def _enabled_grad_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler that the script uses; None without one.

    Raises:
        ValueError: when there are several, since nothing shows which of them scales a model's loss.
    """
    scalers = [scaler for scaler in living_of(kinds_of(torch.amp.GradScaler)) if scaler.is_enabled()]
    if len(scalers) > 1:
        raise ValueError(
            f"the script uses {len(scalers)} GradScalers, and nothing shows which of them scales this model's loss: "
            "use one for all models, as torch allows, or attach by sonde.attach(grad_scaler=...)"
        )
    return scalers[0] if scalers else None


class MeasuredTrainer(GuardedProbe):
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
        from sonde.integrations.transformers import TransformersProbe
        from sonde.integrations.transformers_batches import MicroBatches

        batches = MicroBatches(trainer, units_in_batch(settings.units_from))
        options = {"unit": settings.unit or batches.unit, "trainer": batches.trainer_name, **settings.pace}
        super().__init__(options)
        self.name, self._new_log = type(trainer).__name__, settings.log
        self.file: LogOfScript | None = None
        self._callback: TransformersProbe | None = TransformersProbe(trainer, batches, self)

    def training_ended(self) -> None:
        """The training has ended, or has raised: leave the trainer as it was, and let go of it."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback.close()

    @property
    def n_windows(self) -> int:
        """Measured windows so far, those without a number among them."""
        reading = self.reading()
        return 0 if reading is None else reading.windows + sum(reading.dropped.values())

    def close(self, reason: str) -> None:
        """Measure no more. Other ranks may be gone, so they are not waited for long."""
        self.end(reason, patience=PATIENCE)

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """See `GuardedProbe.begin`."""
        self.end("training began again")  # before its log is replaced
        self._log, self.file = self._new_log()
        super().begin(*args, **kwargs)

    def metrics(self) -> Mapping[str, float]:
        """None for the trainer's own logs."""
        return {}

    def keep(self, probe: NoiseScaleProbe) -> None:
        """Keep the last reading, which is said when the script ends."""
        self._verbose = False
        super().keep(probe)

    def state_dict(self) -> dict[str, Any] | None:
        """None for checkpoints."""
        return None

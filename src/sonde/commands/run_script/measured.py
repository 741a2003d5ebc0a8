"""A model of a script, measured by `sonde.attach`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonde.batch_size.found_model import RanksOfModel, raised_on_all_ranks
from sonde.batch_size.probe import PLAIN_LOOP, NoiseScaleProbe
from sonde.commands.run_script.model_search import ModelOfOptimizers, trainable
from sonde.commands.run_script.settings import Settings
from sonde.commands.run_script.units import units_of
from sonde.integrations.guarded import GuardedProbe
from sonde.parallel.placements import is_dtensor
from sonde.parallel.refused_models import kinds_of, living_of
from sonde.parallel.unwrap import unwrap_model

PATIENCE = 2.0
"""Seconds in which other ranks may still sum the last windows with this one. They may be gone."""


class MeasuredModel(GuardedProbe):
    """A model of the script with its probe. Steps of its optimizers end the windows by themselves.

    Args:
        found: the model, and the optimizers that step it.
        settings: of `sonde run`.
        earlier: models that were attached to before.
        others_train: whether the script trains other models beside this one now.

    Raises:
        ValueError: on all ranks of the model, when it cannot be measured on one of them, with the reason.
    """

    def __init__(
        self,
        found: ModelOfOptimizers,
        settings: Settings,
        *,
        earlier: Iterable[MeasuredModel],
        others_train: Callable[[MeasuredModel], bool],
    ) -> None:
        log, self.file = settings.log()
        super().__init__({"unit": settings.unit or "rows", **settings.pace}, log=log, on_error="raise", verbose=False)
        self.name = type(unwrap_model(found.model)).__name__
        self._attach(found, settings)
        self._on_error = "warn"
        self._parameters = trainable(found.model.parameters()).keys()
        self.n_windows_before = {model: model.n_windows for model in earlier}
        self._others_train = others_train
        self.optimizers = weakref.WeakSet(found.optimizers)
        """Those that step the model. When all are gone, the script is done with its training."""

    def _attach(self, found: ModelOfOptimizers, settings: Settings) -> None:
        model = found.model
        group = dist.group.WORLD if _is_reduced_by_hand(model) else None
        with raised_on_all_ranks(model, RanksOfModel(group)):
            if why := why_not_reduced(model, settings):
                raise ValueError(why)
            units = units_of(settings.units_from, model)
            scaler = _enabled_grad_scaler()
        device = next(model.parameters()).device.type
        with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
            self.begin(
                model,
                found.optimizers,
                units_per_piece=units,
                grad_scaler=scaler,
                process_group=group,
                trainer=trainer_of(model, *found.optimizers),
                verbose=True,
            )
        if self.probe is not None and not settings.micro_batches:
            self.probe.judge_further_backwards(self._why_no_micro_batch)

    def _why_no_micro_batch(self) -> str:
        if self.probe is None or not self._others_train(self):
            return ""
        return (
            f"the script trains several models, and a step of {self.name} has {self.probe.n_pieces + 1} backwards. "
            "Losses of different kinds (of real and of generated images) are no micro-batches of one batch: if these "
            "are, pass --micro-batches"
        )

    def holds_any(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of these tensors is a parameter of the model."""
        return not self._parameters.isdisjoint(map(id, tensors))

    def was_done_before(self, other: MeasuredModel) -> bool:
        """Whether it has taken its last step before the other model was attached, as that of an earlier fold has."""
        return 0 < self.n_windows == other.n_windows_before.get(self)

    def close(self, reason: str = "closed") -> None:
        """Remove all hooks, end the log and let go of the model. Other ranks may be gone: they are not waited for long.

        Args:
            reason: for the log.
        """
        self.end(reason, patience=PATIENCE)

    def keep(self, probe: NoiseScaleProbe) -> None:
        """Keep what is said of the model when the script ends."""
        super().keep(probe)
        reading, said = probe.reading(), " ".join(probe.alerts.values())
        if not reading.windows and said and (not probe.n_windows or str(reading.reason) in said):
            self.said_at_end = [f"no step of {self.name} could be measured: see above"]
        elif not probe.n_windows:
            self.said_at_end = [f"no step of {self.name} was measured"]


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

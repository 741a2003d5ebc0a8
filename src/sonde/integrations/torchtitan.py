"""The noise scale of a run of torchtitan's Trainer."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from sonde.integrations.guarded import GuardedProbe, OnError, WrappedMethods, is_wrapped, warn_if_untested
from sonde.integrations.torchtitan_batches import UnitsOfBatch, counts_of, counts_of_each
from sonde.records import LogOrPlaces, logger
from sonde.version import TESTED

try:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise ImportError("this needs torchtitan, with a torch from 2.14 on: see docs/torchtitan.md") from error

SAVED_AS = "sonde"
"""The entry of checkpoints that has the averages."""


def attach(
    trainer: Trainer,
    *,
    unit: str | Sequence[str] = "sequences",
    units: UnitsOfBatch | None = None,
    clips: bool = False,
    log: LogOrPlaces = None,
    on_error: OnError = "warn",
    verbose: bool = True,
    **options: Any,
) -> TorchtitanProbe:
    """Measure the gradient noise scale of a torchtitan run. Call it between making the trainer and `trainer.train()`.

    Each micro-batch is a piece, weighed by its loss tokens, since torchtitan divides by those of the whole step. Each
    step of the optimizers ends a window. The trainer's metrics get the headline's, and its checkpoints the averages.

    Args:
        trainer: of torchtitan.
        unit: plural name of the independent sample.
        units: called with a micro-batch's `input_dict` and `labels`, it returns the number of units, or the weight of
            each in the loss, [units]. By default the loss tokens of each row; `documents` of
            `sonde.integrations.torchtitan_batches` returns those of each document in the rows.
        clips: clip by `sonde.clip_grad_norm_` in place of torchtitan's own: one collective for parameters on all
            meshes, and the log has the share of windows that were clipped.
        log: of the run, the folder for a log of its own, or whatever else `RunLog` takes: "wandb", a function, several.
        on_error: "warn" logs errors of the probe, and training goes on; "raise" raises them, for tests.
        verbose: print the set-up that was found, and the reading at the end, on rank 0.
        **options: others of `sonde.attach`: `groups`, `metric`, `staging_mib`, `budget`, `allowance`, `every` and the
            like.

    Returns:
        The probe: `reading()` is the present reading, `close()` ends it, and so does the end of `trainer.train()`.

    Raises:
        ValueError: for something that is no Trainer, one that has a probe already, or an option outside its range.
        TypeError: for an option that does not exist.
    """
    if not isinstance(trainer, Trainer):
        raise ValueError(f"trainer must be a torchtitan.trainer.Trainer, got {trainer!r:.80}")
    if is_wrapped(trainer, "forward_backward_step"):
        raise ValueError("this trainer has a probe already: close it first")
    warn_if_untested("torchtitan", importlib.metadata.version("torchtitan"), TESTED["torchtitan"])
    dims = trainer.parallel_dims
    meshes = {"mesh": dims.world_mesh, "pp_mesh": dims.get_optional_mesh("pp")}
    options = {"unit": unit, "trainer": "torchtitan", **meshes, **options}
    return TorchtitanProbe(trainer, clips, options, units=units, log=log, on_error=on_error, verbose=verbose)


def measured(config: Trainer.Config, **arguments: Any) -> Trainer.Config:
    """The same configuration, of a trainer that attaches a probe to itself: its attribute `noise_scale`.

    Args:
        config: of a trainer, as a function of a `config_registry` returns it.
        **arguments: of `attach`.
    """
    of_config: Any = type(config)

    class Measured(of_config._owner):  # type: ignore[misc]
        """A trainer with a probe."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(of_config):  # type: ignore[misc]
            """As it was."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.noise_scale = attach(self, **arguments)

    return Measured.Config(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init})


class TorchtitanProbe(GuardedProbe):
    """The probe of a torchtitan run, as `attach` returns it. Checkpoints go on holding the averages after `close`."""

    def __init__(self, trainer: Trainer, clips: bool, options: Mapping[str, Any], **guarded: Any) -> None:
        super().__init__(options, **guarded)
        self._trainer, parts = trainer, trainer.model_parts
        model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        self.begin(model, list(trainer.optimizers), refused=_why_refused(trainer))
        wrappers: dict[str, Any] = {"train_step": self._train_step if clips else self.watched}
        wrappers |= {"forward_backward_step": self._forward_backward_step, "train": self._train}
        self.undo.enter_context(WrappedMethods(trainer, **wrappers))
        self.undo.enter_context(WrappedMethods(trainer.metrics_processor, log=self._log))
        checkpointer = trainer.checkpointer
        if self.probe is not None and isinstance(checkpointer, CheckpointManager) and checkpointer.enable:
            checkpointer.states[SAVED_AS] = self
            self.undo.enter_context(WrappedMethods(checkpointer, dcp_load=self._dcp_load))

    # Wrappers of the trainer's methods, in the order in which a step calls them. The optimizers' step ends the window.

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = self.train(original, *args, **kwargs)
        self.close("training ended")
        return result

    def _train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """torchtitan clips by a function of a module, so that function is replaced while this trainer steps."""
        with WrappedMethods(dist_utils, clip_grad_norm_=self._clip_grad_norm_):
            return original(*args, **kwargs)

    def _forward_backward_step(
        self, original: Callable[..., Any], *, input_dict: Any, labels: Any, **kwargs: Any
    ) -> Any:
        is_one = isinstance(labels, Tensor)  # not so for a step of a pipeline schedule
        count = functools.partial(counts_of if is_one else counts_of_each, self.units, input_dict, labels)
        with self.piece(count, None if is_one else len(labels)):
            return original(input_dict=input_dict, labels=labels, **kwargs)

    def _clip_grad_norm_(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.clip(*args, mesh=self._trainer.parallel_dims.world_mesh, **kwargs)

    def _log(self, original: Callable[..., Any], step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> Any:
        if not self._trainer.parallel_dims.pp_enabled:  # there, other stages than the last one know no loss
            self.log_also(loss=global_avg_loss)
        kwargs["extra_metrics"] = {**(kwargs.get("extra_metrics") or {}), **self.metrics()}
        return original(step, global_avg_loss, *args, **kwargs)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The averages so far."""
        return self.averages() or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with these averages."""
        if state_dict:
            self.resume(state_dict)

    def _dcp_load(
        self, original: Callable[..., Any], state_dict: dict[str, Any], checkpoint_id: str, **kwargs: Any
    ) -> Any:
        if SAVED_AS in state_dict and Path(checkpoint_id, ".metadata").exists():
            saved = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
            if not any(name.split(".")[0] == SAVED_AS for name in saved):
                logger.warning("sonde: the checkpoint has no entry %r: the averages begin anew", SAVED_AS)
                state_dict = {name: state for name, state in state_dict.items() if name != SAVED_AS}
        return original(state_dict, checkpoint_id=checkpoint_id, **kwargs)


def _why_refused(trainer: Trainer) -> str:
    """What of this trainer cannot be measured, with the way out; empty if it can be."""
    dims = trainer.parallel_dims
    if getattr(trainer.fwd_bwd_fn, "__func__", None) is not type(trainer)._forward_backward_body:
        return "backwards are replayed in CUDA graphs, which run no hook: train with --training.disable_cuda_graphs"
    if dims.tp_enabled and dims.spmd_backend == "spmd_types":
        return (
            "tensor parallelism by spmd_types has plain gradients that do not show how they are cut: train with "
            "--parallelism.spmd_backend full_dtensor, or without tensor parallelism"
        )
    if dims.cp_enabled or dims.ep_enabled:
        return (
            "context and expert parallelism of torchtitan were never compared with one process: measure a training "
            "without them, or try sonde.attach with cp_mesh= or expert_mesh="
        )
    return ""

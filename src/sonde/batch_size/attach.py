"""`sonde.attach`: makes a noise-scale probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import nn

from sonde.batch_size.forward_units import FIRST_DIM, UnitsPerPiece
from sonde.batch_size.found_model import RanksOfModel, raised_on_all_ranks
from sonde.batch_size.last_words import speak_at_exit
from sonde.batch_size.pace import DEFAULT_ALLOWANCE, DEFAULT_BUDGET
from sonde.batch_size.per_example.rules import GradientsOf
from sonde.batch_size.probe import PLAIN_LOOP, NoiseScaleProbe
from sonde.batch_size.setup import Groups, NoiseScaleOptions
from sonde.batch_size.taps.metric import MetricName
from sonde.parallel.unwrap import Optimizers
from sonde.records import LogOrPlaces, log_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def attach(
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    unit: str | Sequence[str],
    units_per_piece: UnitsPerPiece = FIRST_DIM,
    groups: Groups = "blocks",
    metric: MetricName | Sequence[MetricName] = "euclidean",
    staging_mib: float | None = None,
    per_example: Literal["auto", "always", "never"] = "auto",
    rules: Mapping[type[nn.Module], GradientsOf] | None = None,
    budget: float | None = DEFAULT_BUDGET,
    allowance: float = DEFAULT_ALLOWANCE,
    every: int | None = None,
    log_groups: bool | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    pp_mesh: DeviceMesh | None = None,
    expert_mesh: DeviceMesh | None = None,
    cp_mesh: DeviceMesh | None = None,
    log: LogOrPlaces = None,
    trainer: str = PLAIN_LOOP,
    verbose: bool = True,
) -> NoiseScaleProbe:
    """Measure the gradient noise scale of a model while it trains.

    `NoiseScaleOptions` explains `unit` to `log_groups`, and `NoiseScaleProbe` the other arguments.

    Args:
        model: plain, compiled, wrapped in DDP, or cut by FSDP2, tensor or sequence parallelism; on any devices, with
            its final `requires_grad`. A model of FSDP2 is attached on all its ranks together: its parameters are
            gathered once.
        optimizer: whose steps end the windows, or several in a list that step the model together, as Muon and AdamW do.
            What they hold is measured, and nothing else. Without it, all trainable parameters are measured, and the
            step of any optimizer that holds some of them ends a window.
        unit: plural name of the independent sample ("sequences", "images"); results are in it. With several names,
            ("sequences", "tokens"), they are converted to those after the first.
        units_per_piece: units in a micro-batch, by name if there are several, unless `piece(units=...)` gives them.
            "first dim" counts the rows that each forward is called with; None counts nothing.
        groups: "blocks", "kinds", "parameters", None, or a function from a parameter's name to its group's.
        metric: "euclidean", "adam", "sign" or "spectral"; or several of them, the headline first.
        staging_mib: limit of the memory for gradients that wait, in MiB; None for 8, or 128 on an accelerator.
        per_example: "auto", "always" or "never": whether the gradient of each example is read besides those of pieces.
        rules: rules for layers of your own, whose examples are to be read; see `PerExampleNorms`.
        budget: part of the run's time that measuring may cost; None to measure every window.
        allowance: seconds that measuring may take in any case.
        every: measure one window in so many, whatever it costs.
        log_groups: whether each group's values go to the log; None for up to 256 groups, but not for "parameters".
        grad_scaler: the `torch.amp.GradScaler` in use.
        process_group: the ranks over which you reduce the gradients of a plain module yourself.
        mesh: all ranks that hold any of a sharded model, where no parameter is on all of them.
        pp_mesh: the pipeline stages, an axis of `mesh`. `model` is this rank's stage, or an `nn.ModuleList` of its
            stages, and `probe.pieces(n)` goes around each step of the schedule.
        expert_mesh: the axis of `mesh` over which experts are spread as DTensors, each rank with data of its own. It is
            found without, where FSDP2 cuts the other parameters over these ranks. A mesh of one rank spreads none.
        cp_mesh: the axis of `mesh` whose ranks hold parts of the same sequences. They enter the same pieces with the
            same numbers, those of the whole sequences. In measured windows, their gradients are summed piece by piece.
        log: of the run; give the same log to every probe of the run. Or what `RunLog` takes, for a log of its own: a
            folder as "runs/my-run", "wandb" or another tracker, a function, or several of these in a list.
        trainer: that runs the loop, such as "Megatron": `sonde advise` says how a batch size is set there. Integrations
            say it by themselves.
        verbose: print the setup that was found, on rank 0.

    Returns:
        The probe; close it at the end, or use it in a `with` statement.

    Raises:
        ValueError: for an argument outside its range, and a model that has no trainable parameters or hides its
            gradients: FSDP's first version, DeepSpeed, Megatron's own parallelism, the module inside a DDP module.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> probe = attach(model, optimizer, unit="rows", verbose=False)
        >>> for _ in range(20):
        ...     for _ in range(4):
        ...         model(torch.randn(8, 4)).square().mean().backward()
        ...     norm = probe.clip_grad_norm_(1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> probe.reading().windows
        20
        >>> probe.close()
    """
    given = dict(locals())
    log = log_of(log)
    ranks = RanksOfModel(process_group, mesh, pp_mesh, expert_mesh, cp_mesh)
    with raised_on_all_ranks(model, ranks):
        options = NoiseScaleOptions(**{field.name: given[field.name] for field in fields(NoiseScaleOptions)})
    probe = NoiseScaleProbe(
        model,
        optimizer,
        options,
        ranks=ranks,
        grad_scaler=grad_scaler,
        log=log,
        trainer=trainer,
        verbose=verbose,
    )
    speak_at_exit(probe)
    return probe

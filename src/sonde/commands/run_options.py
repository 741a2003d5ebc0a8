"""The options of `sonde run`, and their ranges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg


@dataclass(frozen=True)
class RunOptions:
    """Measure a training script as it is: no line of it changes.

    Use: sonde run [options] -- train.py --its own options. After the two dashes also: -m package.module, torchrun …,
    accelerate launch …, or any other command that starts Python. The script computes what it computes without sonde,
    and ends with its own exit status. At its end, sonde prints the noise scale on stderr and writes a report.

    Attributes:
        nproc: Start this number of processes, as torchrun --nproc-per-node does.
        unit: What a row of a batch is, as a plural: sequences, images. The noise scale is counted in it.
        units_from: What shows how many units a micro-batch has. first-dim: the rows of what the model is called with,
            unless it is not clear which dim they are. A number: it has always so many. NAME:DIM, as input_ids:0: a dim
            of an argument of the model's forward. package.module:function: a function of yours, called as the model is.
        weights_from: What shows the weight of a micro-batch in the loss. labels: the number of labels that are not
            -100, where the loss is a mean over the tokens of the whole step. units: the units of the micro-batch, where
            the loss is added up over rows and divided by those of the whole step. equal: all have the same. auto:
            labels where a model of transformers is told the tokens of the step, otherwise equal.
        reduced_by_hand: The script averages or adds up gradients over all processes by itself, without DDP or FSDP2.
        micro_batches: Several backwards in a step are micro-batches of one batch, also where the script trains several
            models. Without it, such a model is not measured: its backwards may be of different losses.
        budget: Part of the run's time that measuring may cost: 0.01 for 1 %.
        allowance: Seconds that measuring may take in any case, however short the run is.
        every: Measure one step in N, whatever it costs. 1 measures all: use it for a few hundred steps.
        out: Folder for the log and the report. A second model of the script has its own, with -2 at the end.
        report: Write a report at the end.
    """

    nproc: Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")] = None
    unit: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: rows)")] = None
    units_from: Annotated[str, arg(metavar="SOURCE")] = "first-dim"
    weights_from: Literal["auto", "labels", "units", "equal"] = "auto"
    reduced_by_hand: bool = False
    micro_batches: bool = False
    budget: Annotated[float, arg(metavar="PART")] = 0.01
    allowance: Annotated[float, arg(metavar="SECONDS")] = 10.0
    every: Annotated[int | None, arg(metavar="N", help_behavior_hint="(optional)")] = None
    out: Annotated[
        Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: runs/ with the script's name and the time)")
    ] = None
    report: bool = True

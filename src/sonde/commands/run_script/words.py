"""What `sonde run` says, on stderr: the remedies of `sonde.attach` for a user who has a script and no probe."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TextIO

import torch.distributed as dist

from sonde.batch_size.stats.window_row import NO_BACKWARD
from sonde.batch_size.taps.problems import HOW_TO_COUNT
from sonde.console import tell, write_to

REMEDIES: Mapping[str, str] = {
    NO_BACKWARD: (
        "a step came without a backward of the parameters that it steps: gradients are set by hand, as those of "
        "torch.autograd.grad, or other parameters are trained now, such as another adapter"
    ),
    "Pass units_per_piece= a number, or enter 'with probe.piece(units=…):' around the backward of each micro-batch": (
        "To count such micro-batches, pass --units-from with the number of units in one"
    ),
    HOW_TO_COUNT: "Pass --units-from: a number or package.module:function",
    "pass units= to attach, a function of the batch": "pass --units-from package.module:function, a function",
    "probe.alerts['units'] says why, and what to do": "a sentence above says why, and what to do",
    ", or put both into one 'with probe.piece():'": "",
    "units_per_piece=": "--units-from",
    ", unless piece(units=...) says it": "",
    "raise budget=, or put more work into each window": "raise --budget, or put more work into each step",
    "(every=": "(--every=",
    ", or a larger budget=)": ", or a larger --budget)",
    "another rank refused to attach, and its own error says why: attach with the same arguments, to the same model, on "
    "every rank": "another rank could not be measured, and says why",
    "Wrap the model in DDP before attach and pass the wrapped one, or pass process_group= if you average them "
    "yourself": "Wrap the model in DDP, or pass --reduced-by-hand if the script averages them",
    "): attach again": "), so the noise scale is that of the other parameters",
    "before attach": "before the first training forward",
    "after attach": "after measuring began",
    ", put every backward into a piece, and end a window before each optimizer.step() only, not after each "
    "micro-batch": "",
    "put all backwards of one batch into one 'with probe.piece():'": "add up all losses of one batch before backward",
    "Put all backwards of one batch into one 'with probe.piece():'": "Add up all losses of one batch before backward",
    "pass the optimizers that step to attach as optimizer=, or freeze": "freeze",
    "clipped by value before probe.step(): clip by norm, or clip after probe.step()": (
        "clipped by value before the step: clip by norm"
    ),
}
"""By what `sonde.attach` says. The order matters: what is replaced first is no longer there for the lines below."""


def in_words_of_run(text: str) -> str:
    """A message of a probe, for the user of `sonde run`."""
    for said, instead in REMEDIES.items():
        text = text.replace(said, instead)
    return text


class _Told(logging.Logger):
    """sonde's logger: its warnings go where all of sonde's sentences go, whatever the script does to its loggers."""

    def isEnabledFor(self, level: int) -> bool:
        return level >= logging.WARNING

    def handle(self, record: logging.LogRecord) -> None:
        trace = record.exc_info and f"\nwith this traceback:\n{logging.Formatter().formatException(record.exc_info)}"
        tell(record.getMessage().removeprefix("sonde: ") + (trace or ""))


def say_in_words_of_run(stream: TextIO) -> None:
    """Have sonde and its logger say from now on what a script's user can follow, on this stream alone.

    The script's own loggers may write to stdout, which is the script's.
    """
    write_to(stream, in_words_of_run)
    logging.getLogger("sonde").__class__ = _Told


_rank: int | None = None
"""Of this process in the script's process group, which may be gone."""


def rank() -> int:
    """The number of this process. The first speaks and writes for all."""
    global _rank
    if dist.is_available() and dist.is_initialized():
        _rank = dist.get_rank()
    return int(os.environ.get("RANK", "0")) if _rank is None else _rank


def say(text: str, *, on_every_rank: bool = False) -> None:
    """Write a sentence for the user.

    Args:
        text: the sentence.
        on_every_rank: whether other ranks than the first write it too, with their number.
    """
    if rank() == 0 or on_every_rank:
        tell(f"rank {rank()}: {text}" if rank() else text)

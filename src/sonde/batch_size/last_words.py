"""What is said when training ends: the last reading, what looked wrong, and what to do with the batch size next."""

from __future__ import annotations

import atexit
import functools
import os
import weakref

from sonde.batch_size.probe import NoiseScaleProbe
from sonde.batch_size.stats.norm_watch import OWN_NORM
from sonde.batch_size.stats.reading import NoiseScaleReading
from sonde.console import tell
from sonde.decision.decide import Decision, decide
from sonde.decision.facts import facts_of
from sonde.decision.kept_trial import with_trial

_PATIENCE_AT_EXIT = 1.0
"""Seconds for which a process that ends waits for the other ranks' part in the last windows."""


def decision_of(probe: NoiseScaleProbe, reading: NoiseScaleReading) -> Decision:
    """What to do with the batch size, as the report and `sonde advise` say it of the run's log.

    Args:
        probe: that the reading is of.
        reading: the last one.
    """
    facts, folder = facts_of(**probe.known_of(reading)), probe.run_log.folder
    return decide(facts) if folder is None else decide(with_trial(facts, folder), logs=[folder])


def said_at_end(probe: NoiseScaleProbe, reading: NoiseScaleReading) -> list[str]:
    """What to say when training ends, in lines.

    Args:
        probe: that the reading is of.
        reading: the last one.
    """
    lines, alerts = [str(reading)], probe.alerts
    if "not_watched" in alerts:
        lines.append("parameters that came or became trainable after attach are not in it")
    lines += [alerts[OWN_NORM]] if OWN_NORM in alerts else []
    decision, folder = decision_of(probe, reading), probe.run_log.folder
    if decision.kind != "wait":
        lines.append(f"advice  {decision.sentence}{'' if folder is None else f' More: sonde advise {folder}'}")
    return lines


def speak_at_exit(probe: NoiseScaleProbe) -> None:
    """At the end of a script that has not closed its probe, close it, and say how the run ended."""
    atexit.register(functools.partial(_close_and_speak, weakref.ref(probe), os.getpid()))


def _close_and_speak(probe: weakref.ref[NoiseScaleProbe], pid: int) -> None:
    """Complete the log, but for windows that peers have not summed yet, and print the last reading.

    A child that the script forked inherits this call. The log is not the child's, and its device may be unusable there.
    """
    if os.getpid() != pid or (left_open := probe()) is None or left_open.is_closed:
        return
    left_open.close("the process ended without probe.close()", patience=_PATIENCE_AT_EXIT)
    if left_open.n_windows and left_open.is_verbose:
        for line in said_at_end(left_open, left_open.reading(with_groups=False)):
            tell(line)

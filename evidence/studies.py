"""All studies, by name. To add one: a module with `pieces`, a function that does one, and a line here."""

from __future__ import annotations

from evidence import branched, cost, regression, rl, schedules, sweep, watched
from evidence.work import Study

_ALL: tuple[Study, ...] = (
    regression.STUDY,
    sweep.STUDY,
    watched.STUDY,
    branched.STUDY,
    schedules.STUDY,
    rl.SWEEP,
    rl.NOISE,
    cost.STUDY,
)

STUDIES = {study.name: study for study in _ALL}

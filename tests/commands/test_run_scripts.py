"""Unmodified scripts: what they print, save and return is what it was, and the noise scale is that of an own probe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import scripts
from tests.commands.scripts import END, ENDINGS, PLAIN
from tests.commands.unmodified import check_untouched, explicit, with_run

STYLES = {
    "plain": (scripts.PLAIN, 1, {}),
    "compiled": (scripts.COMPILED, 1, {}),
    "amp": (
        scripts.AMP,
        1,
        {
            "grad_scaler": "scaler",
            # The GradScaler takes no step on an overflow, so an unmodified script has no window there.
            "step": "probe.step() if all(p.grad.isfinite().all() for p in model.parameters()) else probe.discard()",
        },
    ),
    "closure": (scripts.CLOSURE, 1, {}),
    "ddp": (scripts.DDP, 2, {}),
    "fsdp2": (scripts.FSDP2, 2, {}),
    "reduced by hand": (scripts.BY_HAND, 2, {"process_group": "dist.group.WORLD"}),
}


@pytest.mark.parametrize("style", STYLES)
def test_scripts_compute_what_they_did_and_are_measured_from_the_first_step(style: str, tmp_path: Path) -> None:
    script, ranks, arguments = STYLES[style]
    options = {"reduced_by_hand": True} if style == "reduced by hand" else {}
    measured = check_untouched(script, tmp_path, ranks=ranks, **options)
    # The compiler warns of Python 3.13.0, with sonde and without.
    warns = any("Warning" in line and "Python 3.13.0" not in line for line in measured.err.splitlines())
    assert (measured.status, "not measured" in measured.err, warns) == (0, False, False)
    own = explicit(script, tmp_path, ranks=ranks, **arguments)
    assert own.status == 0, own.err
    # The same floats are added up in the same order.
    assert len(own.numbers) == 3
    assert measured.numbers == pytest.approx(own.numbers, rel=1e-5)
    n = 13 if style == "amp" else 12
    assert f", {n} windows" in measured.err
    assert measured.err.count("sonde: B_simple") == 1


def test_a_clip_of_the_script_is_in_the_log(tmp_path: Path) -> None:
    measured = with_run(PLAIN, tmp_path)
    clips = PLAIN.replace("nn.utils.clip_grad_norm_(model.parameters(), 0.5)", "").replace(
        "# (a window ends here)", "probe.clip_grad_norm_(0.5)"
    )
    own = explicit(clips, tmp_path)
    for name in ("grad/norm", "grad/clip_fraction"):
        assert measured.run.readings[-1].metrics[name] == pytest.approx(own.run.readings[-1].metrics[name], rel=1e-5)
    assert measured.run.readings[-1].metrics["grad/clip_fraction"] == 1.0


@pytest.mark.parametrize(
    ("ending", "status", "writes_report"),
    [("crash", 1, True), ("exit 3", 3, False), ("interrupted", 1, False), ("terminated", -15, False)],
)
def test_scripts_end_as_they_did(ending: str, status: int, writes_report: bool, tmp_path: Path) -> None:
    measured = check_untouched(PLAIN + END + ENDINGS[ending], tmp_path, report=writes_report)
    assert measured.status == status
    assert ("ValueError: the script has a mistake" in measured.err) == (ending == "crash")
    if ending == "terminated":  # nothing runs then: the log is whole up to its last reading
        assert (len(measured.run.readings), measured.run.ended, measured.run.torn) == (1, None, None)
        return
    assert len(measured.run.readings) == 2
    assert re.search(r"sonde: B_simple [\d.]+ rows \[", measured.err)
    assert (measured.folder / "report.html").exists() == ("sonde: report" in measured.err) == writes_report

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.evidence.shell_losses import Losses, LossSource, check_starts, read_losses

STEPS = LossSource(pattern=r"step (?P<step>\S+) loss (?P<loss>\S+)")


def losses(folder: Path, text: str, source: LossSource = STEPS) -> list[tuple[float, float]]:
    (folder / "stdout.txt").write_text(text)
    curve = read_losses(folder, 8, source).curve
    return list(zip(curve.units, curve.losses, strict=True))


def test_where_printed_steps_begin(tmp_path: Path) -> None:
    # Anew, with and without the checkpoint's own loss.
    assert losses(tmp_path, "step 0 loss 3\nstep 10 loss 2\n") == [(0, 3), (80, 2)]
    assert losses(tmp_path, "step 10 loss 3\nstep 20 loss 2\n") == [(80, 3), (160, 2)]
    # Counting on from step 1,000, whose loss is printed first.
    assert losses(tmp_path, "step 1000 loss 3\nstep 1010 loss 2\n") == [(0, 3), (80, 2)]
    assert losses(tmp_path, "step 1000 loss 3\n") == [(0, 3)]
    told = LossSource(pattern=STEPS.pattern, first_step=1000)
    assert losses(tmp_path, "step 1010 loss 3\nstep 1020 loss 2\n", told) == [(80, 3), (160, 2)]
    assert losses(tmp_path, "step 990 loss 4\nstep 1000 loss 3\n", told) == [(0, 3)]


def test_first_losses_that_are_not_the_checkpoints_own(tmp_path: Path) -> None:
    """The same step 1,020 of two batches from step 1,000 has other losses: they begin 20 steps before."""
    for batch, first in ((8, 3.0), (16, 2.5)):
        (tmp_path / f"{batch}").mkdir()
        losses(tmp_path / f"{batch}", f"step 1020 loss {first}\nstep 1040 loss 2\n")

    def seen(*batches: int, source: LossSource = STEPS) -> list[Losses]:
        return [read_losses(tmp_path / f"{batch}", batch, source) for batch in batches]

    check_starts(seen(8))
    check_starts(seen(8, 16, source=LossSource(pattern=STEPS.pattern, first_step=1000)))
    with pytest.raises(ValueError, match=r"\(2.500 to 3\) differ.*: pass its step as --first-step"):
        check_starts(seen(8, 16))
    losses(tmp_path / "16", "step 1020 loss 3.00001\nstep 1040 loss 2\n")  # rounded otherwise
    check_starts(seen(8, 16))
    losses(tmp_path / "16", "step 1020 loss 2.5\n")  # ended by sonde after its first loss
    with pytest.raises(ValueError, match=r"pass its step as --first-step"):
        check_starts(seen(8, 16))
    check_starts(seen(16))


def test_printed_units(tmp_path: Path) -> None:
    units = LossSource(pattern=r"(?P<units>\d+) rows: (?P<loss>\S+)")
    assert losses(tmp_path, "100 rows: 3\n200 rows: 2.5\n", units) == [(100, 3), (200, 2.5)]
    both = LossSource(pattern=r"(?P<step>\d+)/(?P<units>\d+) (?P<loss>\S+)")
    assert losses(tmp_path, "0/0 3\n10/60 2\n", both) == [(0, 3), (60, 2)]
    assert read_losses(tmp_path, 8, both).trained_batch == 6


def test_a_line_that_is_half_written(tmp_path: Path) -> None:
    text = "step 0 loss 3\nstep 10 loss 1"
    assert losses(tmp_path, text) == [(0, 3)]
    (tmp_path / "status").write_text("0")  # it has ended, so that no more will come
    assert losses(tmp_path, text) == [(0, 3), (80, 1)]


def test_printed_oddities(tmp_path: Path) -> None:
    """A line that is printed twice, numbers that are none, and none at all."""
    assert losses(tmp_path, "step 0 loss 3\nstep 10 loss 2\nstep 10 loss 1\n") == [(0, 3), (80, 1)]
    (_, nan), *_ = losses(tmp_path, "step 0 loss nan\nstep 10 loss 2\n")
    assert nan != nan
    assert losses(tmp_path, "step 0 loss ?\n") == []
    assert "matches what is no number" in read_losses(tmp_path, 8, STEPS).problem
    optional = LossSource(pattern=r"step (?P<step>\d+)(?: loss (?P<loss>\S+))?")
    assert losses(tmp_path, "step 0\nstep 0 loss 3\nstep 5\nstep 10 loss 2\n", optional) == [(0, 3), (80, 2)]
    assert losses(tmp_path, "") == []
    assert "nothing that it printed matches" in read_losses(tmp_path / "absent", 8, STEPS).problem


def test_losses_that_go_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "stderr.txt").write_text("a warning\n")
    assert "nothing that it printed matches" in read_losses(tmp_path, 8, STEPS).problem
    (tmp_path / "stderr.txt").write_text("step 0 loss 3\n")
    assert "it prints its losses to stderr" in read_losses(tmp_path, 8, STEPS).problem


def test_expressions_that_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="is no regular expression"):
        LossSource(pattern="(")
    for pattern in ("(?P<loss>x)", "(?P<step>x)"):
        with pytest.raises(ValueError, match="needs the groups"):
            LossSource(pattern=pattern)

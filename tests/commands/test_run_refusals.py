"""What `sonde run` cannot see or measure: it says why and what to do, and the script runs on untouched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sonde
from tests.commands import hard_scripts, scripts
from tests.commands.unmodified import check_untouched, explicit, with_run

REFUSED = {
    "LBFGS": (hard_scripts.LBFGS, 1, "not measured: LBFGS evaluates its closure several times a step"),
    "two modules": (
        hard_scripts.TWO_MODULES,
        1,
        "no module holds the parameters that SGD steps: put its modules",
    ),
    "steps in backward": (hard_scripts.STEPS_IN_BACKWARD, 1, "an optimizer steps inside backward"),
    "parts of a model": (hard_scripts.PARTS, 1, "pass --units-from with the number of units in one"),
    "reduced by hand": (scripts.BY_HAND, 2, "pass --reduced-by-hand if the script averages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_said_once_and_the_script_runs_on(name: str, tmp_path: Path) -> None:
    script, ranks, message = REFUSED[name]
    measured = check_untouched(script, tmp_path, ranks=ranks)
    said = [line for line in measured.err.splitlines() if line.startswith("sonde: ")]
    assert measured.status == 0
    assert sum(message in line for line in said) == 1, measured.err
    assert not re.search(r"B_simple [\d<>]", measured.err)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_be_measured_alone_says_why_and_its_peers_do_not_wait(rank: int, tmp_path: Path) -> None:
    scalers = f"""
scalers = [torch.amp.GradScaler("cpu") for _ in range(2)] if dist.get_rank() == {rank} else []
for scaler in scalers:
    scaler.scale(torch.ones(1))
"""
    measured = check_untouched(scripts.DDP.replace(scripts.ATTACH, scalers), tmp_path, ranks=2)
    said = [measured.err, (tmp_path / "run" / "err-1").read_text()]
    of_rank = "" if rank == 0 else "rank 1: "
    assert f"sonde: {of_rank}not measured: the script uses 2 GradScalers" in said[rank]
    other = "sonde: not measured: another rank could not be measured, and says why. The script runs on\n"
    assert said[1 - rank].strip() == (other.strip() if rank == 1 else "")
    assert not measured.folder.exists()


TOKENS_BY_HAND = hard_scripts.TOKENS.replace(
    "(model(ids, labels=labels) / n_tokens).backward()",
    "tokens = labels[:, 1:].ne(-100).sum(1)\n"
    "        with probe.piece(weight=tokens.sum(), unit_weights=tokens.clamp(min=1e-6)):\n"
    "            (model(ids, labels=labels) / n_tokens).backward()",
)
ROWS = """
def rows(input_ids, labels):
    return len(labels)
"""
BY_TOKENS = """
from sonde.batch_size.forward_units import CountsOfForward

def by_tokens(input_ids, labels):
    tokens = labels[:, 1:].ne(-100).sum(1)
    return CountsOfForward(len(labels), tokens.sum(), tokens.clamp(min=1e-6))
"""
TOLD = {
    "a number of units, of a model that is called in parts": (
        hard_scripts.PARTS,
        {"units_from": "8"},
        (hard_scripts.PARTS, {"units_per_piece": "8"}),
    ),
    "a function for rows": (ROWS + hard_scripts.TOKENS, {"units_from": "__main__:rows"}, (hard_scripts.TOKENS, {})),
    "a function of tokens that weigh micro-batches and rows": (
        BY_TOKENS + hard_scripts.TOKENS,
        {"units_from": "__main__:by_tokens"},
        (TOKENS_BY_HAND, {}),
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_an_option_says_what_the_script_does_not_show(name: str, tmp_path: Path) -> None:
    script, options, (by_hand, own) = TOLD[name]
    measured = with_run(script, tmp_path, **options)
    assert measured.numbers == pytest.approx(explicit(by_hand, tmp_path, **own).numbers, rel=1e-5)


def test_a_function_that_cannot_count_is_named(tmp_path: Path) -> None:
    measured = with_run(hard_scripts.TOKENS, tmp_path, units_from="operator:length_hint")
    assert "--units-from could not count a piece: TypeError: _operator.length_hint()" in measured.err


def test_models_of_a_gan_have_a_log_each(tmp_path: Path) -> None:
    """The backward of one goes through the other, whose gradients are then zeroed without a step."""
    measured = check_untouched(scripts.GAN, tmp_path)
    assert measured.err.count("12 windows") == 2
    # The critic steps first.
    for folder, per_window in ((measured.folder, 16), (measured.folder.with_name("log-2"), 8)):
        last = sonde.read_run(folder).readings[-1]
        assert (last.window, last.dropped) == (12, {})
        assert last.metrics["gns/units_per_window"] == per_window


def test_two_losses_of_a_gans_critic_are_no_micro_batches(tmp_path: Path) -> None:
    measured = check_untouched(scripts.GAN_OF_TWO_LOSSES, tmp_path)
    assert "trains several models, and a step of Sequential has 2 backwards" in measured.err
    assert "pass --micro-batches" in measured.err
    assert measured.err.count("sonde: 1. Sequential: B_simple") == 1
    assert "optimizer.step() ran" not in measured.err
    told = with_run(scripts.GAN_OF_TWO_LOSSES, tmp_path / "told", micro_batches=True)
    assert told.err.count(", 12 windows") == 2

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sonde.evidence.shell_losses import LossSource
from sonde.evidence.shell_plan import Plan, rates_of
from sonde.evidence.shell_run import launch_words

COMMAND = ("python", "train.py", "--batch={batch}", "{seed}", "{checkpoint}", "--out", "{out}/x")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "start.pt").write_text("weights")
    base = {"checkpoint": str(tmp_path / "start.pt")}
    return Plan(COMMAND, (16.0, 32.0, 64.0), 32.0, 1000, (1.0,), 2, LossSource(), tmp_path / "out", "", {}, base)


def test_the_reference_comes_first_and_then_its_twins(plan: Plan) -> None:
    asked = plan.asked()
    assert [(each.batch, each.seed, each.changed, each.value) for each in asked] == [
        (32, 1, "", None),
        (32, 1, "again", None),
        (16, 1, "batch", 16),
        (28, 1, "batch", 28),
        (32, 2, "", None),
        (64, 1, "", None),
        (56, 1, "batch", 56),
        (64, 2, "", None),
        (16, 1, "", None),
        (14, 1, "batch", 14),
        (16, 2, "", None),
    ]
    assert asked[0].command[2:] == ("--batch=32", "1", plan.base["checkpoint"], "--out", f"{asked[0].folder}/x")
    of_asked = [("--batch=32", "1"), ("--batch=16", "1"), ("--batch=28", "1"), ("--batch=32", "2")]
    assert [each.command[2:4] for each in asked[1:5]] == of_asked
    assert len({each.folder for each in asked}) == 11


def test_a_twin_changes_one_value_far(plan: Plan) -> None:
    """At the reference, and upwards at the largest batch: down to half of it, if that is no odd size, for the batch."""
    base = plan.base | {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
    names = ("batch", "seed", "lr", "steps", "units", "beta1", "beta2", "eps", "weight_decay")
    all_of_them = replace(
        plan, command=tuple(f"{{{name}}}" for name in names), base=base, rates={16.0: 1e-3, 32.0: 2e-3, 64.0: 4e-3}
    )
    first, again, *twins = [each for each in all_of_them.asked() if each.changed or each.seed == 1][:11]
    assert first.command == again.command == ("32", "1", "0.002", "32", "1000", "0.9", "0.99", "1e-08", "0")
    others = ("16", "", "2e-09", "8", "250", "0.45", "0.495", "1.00000001", "50")
    assert {twin.changed for twin in twins} == {*names} - {"seed"}
    for twin in (each for each in twins if each.value != 28):  # a little below
        k = names.index(twin.changed)
        assert twin.command == (*first.command[:k], others[k], *first.command[k + 1 :])
    assert [twin.units for twin in twins if twin.changed in ("steps", "units")] == [250, 256]
    for batches, beside in (
        ((32.0, 64.0), [64, 28, 56]),
        ((32.0, 80.0, 192.0), [80, 28, 96, 168, 70]),  # the largest follows the reference
        ((32.0, 80.0), [80, 28, 70]),
        ((32.0, 40.0, 80.0), [40, 28, 40, 70, 35]),
    ):
        of = replace(all_of_them, batches=batches, rates=dict.fromkeys(batches, 4e-3))
        assert [each.value for each in of.asked() if each.changed == "batch"] == beside
        assert [each.value for each in of.asked() if each.changed == "lr"] == [4e-9, 0.008]


def test_a_folder_is_that_of_one_content(plan: Plan, tmp_path: Path) -> None:
    """Whatever changes what a branch would show gives it another folder, and nothing else does."""
    folder = plan.asked()[0].folder
    same = (replace(plan, n_seeds=5), replace(plan, batches=(32.0, 128.0)), replace(plan, rule="in other words"))
    assert {each.asked()[0].folder for each in same} == {folder}
    others = [
        replace(plan, units=1001),
        replace(plan, command=(*COMMAND, "--wd", "0.1")),
        replace(plan, source=LossSource("val")),
        replace(plan, source=LossSource(pattern="(?P<loss>.)(?P<step>.)")),
    ]
    folders = [each.asked()[0].folder for each in others]
    (tmp_path / "start.pt").write_text("other weights")
    folders.append(plan.asked()[0].folder)
    assert len({folder, *folders}) == 6


def test_large_numbers_are_whole_ones(plan: Plan) -> None:
    """Scripts read them by `int`, and folders of two batch sizes that are nearly the same have two names."""
    large = replace(plan, command=("{batch}", "{units}", "{steps}"), batches=(2.0**20, 2.0**21), reference=2.0**20)
    asked = replace(large, units=2e10, lengths=(0.7, 1.0)).asked()
    assert [each.command for each in asked if not each.changed][:2] == [
        ("1048576", "14000000000", "13352"),
        ("1048576", "20000000000", "19074"),
    ]
    assert asked[0].folder.name.startswith("batch-1048576-seed-1-")
    fraction = replace(large, units=1001, lengths=(0.7,)).asked()[0]
    assert fraction.command[1] == "700.7"


def test_words_of_launchers(plan: Plan) -> None:
    first = plan.asked()[0]
    script = f"{first.folder}/run.sh"
    assert launch_words("{command}", first) == ["sh", script]
    spaced = replace(first, folder=Path("/my runs/one"))
    assert launch_words("srun -o {out}/x {command}", spaced) == [
        "srun",
        "-o",
        "/my runs/one/x",
        "sh",
        "/my runs/one/run.sh",
    ]
    assert launch_words("bash -c 'nice {command}'", spaced) == ["bash", "-c", "nice sh '/my runs/one/run.sh'"]


def test_a_checkpoint_of_several_files(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-10" / "rank-0.pt").write_text("weights")
    sharded = replace(plan, base={"checkpoint": str(tmp_path / "step-10")})
    folder = sharded.asked()[0].folder
    assert sharded.asked()[0].folder == folder
    (tmp_path / "step-10" / "rank-0.pt").write_text("other weights")
    assert sharded.asked()[0].folder != folder


def test_rates() -> None:
    batches = (16.0, 64.0)
    assert rates_of(batches, 16, 0.1, None, {"lr"}) == ("learning rate ∝ √batch", {16: 0.1, 64: 0.2})
    assert rates_of(batches, 64, 0.1, "linear", {"lr"})[1] == {16: 0.025, 64: 0.1}
    assert rates_of(batches, 64, 0.1, "none", {"lr"})[1] == {16: 0.1, 64: 0.1}
    assert rates_of(batches, 16, None, "64:3e-4,16:1e-4,128:1", {"lr"})[1] == {16: 1e-4, 64: 3e-4}
    assert rates_of(batches, 16, None, None, set()) == ("the script's own learning rate", {})


def test_weight_decay_keeps_its_time_scale(plan: Plan) -> None:
    """Its part per unit is η λ/B: the same for all batches, whatever the rule of the rate."""
    for rule in ("sqrt", "linear", "none"):
        words, rates = rates_of(plan.batches, 32, 0.1, rule, {"lr"})
        base = plan.base | {"weight_decay": 0.2}
        scaled = replace(plan, command=("{batch}", "{lr}", "{weight_decay}"), rule=words, rates=rates, base=base)
        branches = [each.command for each in scaled.asked() if not each.changed]
        per_unit = [float(lr) * float(decay) / float(batch) for batch, lr, decay in branches]
        assert per_unit == pytest.approx([0.1 * 0.2 / 32] * 6)

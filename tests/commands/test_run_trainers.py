"""Unmodified scripts of transformers, Lightning and Accelerate: untouched, and measured as their integrations do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # other packages cause various warnings when they are imported
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.slow,
]

import sonde  # noqa: E402
from tests.commands.trainer_scripts import ACCELERATE, LIGHTNING, OUT_OF_MEMORY, TRANSFORMERS  # noqa: E402
from tests.commands.unmodified import bare, check_untouched, explicit, same_weights, with_run  # noqa: E402

NO_UNITS = {"unit": "", "units_per_piece": ""}
ON_FIRST_RANK = 'import os\nif os.environ.get("RANK", "0") == "0":\n    torch.save('


def script_of(script: str, ranks: int) -> str:
    """For one rank as it is; for several, with what its user changes: who saves, and Lightning's strategy."""
    if ranks == 1:
        return script
    cpu = 'accelerator="cpu", '
    return script.replace("torch.save(", ON_FIRST_RANK).replace(cpu, f'{cpu}devices={ranks}, strategy="ddp", ')


@pytest.fixture(autouse=True)
def _no_accelerate_state() -> None:
    """What other tests of this process have left there, a fork would have too: that it is one process."""
    from accelerate.state import AcceleratorState, GradientState

    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Here, so that the children need not import them."""
    import lightning  # noqa: F401
    import transformers.trainer  # noqa: F401


@pytest.mark.parametrize("ranks", [1, 2])
def test_transformers_trainer_is_measured_by_its_integration(ranks: int, tmp_path: Path) -> None:
    """Sequences and micro-batches weigh by their tokens, and the trainer's own logs stay as they were."""
    script = script_of(TRANSFORMERS, ranks)
    without, measured = (run(script, tmp_path, ranks=ranks, forks=True) for run in (bare, with_run))
    out = [line for line in without.out.splitlines() if "train_runtime" not in line]
    assert len(out) == 3
    assert [line for line in measured.out.splitlines() if "train_runtime" not in line] == out
    assert same_weights(measured.weights, without.weights)
    assert (measured.status, without.status) == (0, 0)
    assert ", 10 windows" in measured.err
    assert "sonde: log " in measured.err
    attach = "sonde.integrations.transformers.attach(trainer, "
    own = explicit(
        script.replace("import sys", "import sys, sonde.integrations.transformers", 1),
        tmp_path,
        ranks=ranks,
        forks=True,
        attach=attach,
        **NO_UNITS,
    )
    assert measured.numbers == pytest.approx(own.numbers, rel=1e-5)
    assert measured.run.header.unit == "sequences"


@pytest.mark.parametrize("fit", [0, 12])
def test_a_trainer_that_looks_for_a_batch_that_fits_into_memory(fit: int, tmp_path: Path) -> None:
    """It begins anew inside train(). The training that fits is measured, also if an earlier one has taken steps."""
    script = OUT_OF_MEMORY.replace("STEPS_THAT_FIT", str(fit))
    without, measured = (run(script, tmp_path, forks=True) for run in (bare, with_run))
    rows = int(measured.out.split()[-1])
    assert (measured.status, measured.out.split()[-1]) == (0, without.out.split()[-1]), measured.err
    assert same_weights(measured.weights, without.weights)
    said = [line for line in measured.err.splitlines() if "B_simple" in line]
    assert len(said) == 1
    assert f", batch {rows} examples, {560 // rows} windows" in said[0]
    folder = measured.folder.with_name("log-2") if fit else measured.folder
    assert measured.err.splitlines()[-1] == f"sonde: log     {folder}"
    assert sonde.read_run(folder).readings[-1].window == 560 // rows
    assert measured.folder.with_name("log-2").exists() == bool(fit)


@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_is_measured_in_the_closures_of_its_optimizer(ranks: int, tmp_path: Path) -> None:
    script = script_of(LIGHTNING, ranks)
    measured = check_untouched(script, tmp_path, ranks=ranks, forks=True)
    attach = "sonde.integrations.lightning.NoiseScale("
    script = script.replace("import sys", "import sys, sonde.integrations.lightning", 1)
    script = script.replace("callbacks=callbacks", "callbacks=[probe]")
    own = explicit(script, tmp_path, ranks=ranks, forks=True, attach=attach, **NO_UNITS)
    assert f", {10 // ranks} windows" in measured.err
    assert len(own.numbers) == 3
    assert measured.numbers == pytest.approx(own.numbers, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_is_measured_by_its_forwards_and_backwards(ranks: int, tmp_path: Path) -> None:
    script = script_of(ACCELERATE, ranks)
    measured = check_untouched(script, tmp_path, ranks=ranks, forks=True)
    own = explicit(script, tmp_path, ranks=ranks, forks=True)
    assert f", {10 // ranks} windows" in measured.err
    assert len(own.numbers) == 3
    assert measured.numbers == pytest.approx(own.numbers, rel=1e-5)

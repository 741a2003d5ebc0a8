"""`sonde run` as a command: its options, what it becomes, and real processes of Python, torchrun and chained files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sonde.cli import main
from sonde.commands.run import RunOptions, arguments_of, environment_of, split_command
from sonde.commands.run_script.settings import Settings
from sonde.commands.run_script.units import units_in_batch


def error(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What a command that must fail says."""
    assert main(["run", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return err


def test_errors_come_before_the_script_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('started')")
    assert "own: sonde run -- train.py --lr '1 2'\n" in error(capsys, "train.py", "--lr", "1 2")
    assert "own: sonde run --every 1 -- python -m a.b\n" in error(capsys, "--every", 1, "python", "-m", "a.b")
    assert "got no -- in '--every 1'" in error(capsys, "--every", 1)
    assert "got nothing after --" in error(capsys, "--")
    assert "no script at absent.py" in error(capsys, "--", "absent.py")
    assert "'absent' is no script that ends in .py, and no command" in error(capsys, "--", "absent")
    assert "'-c' is no script that ends in .py, and no command that is installed: sonde run -- python -c …" in error(
        capsys, "--", "-c", "print()"
    )
    assert "--nproc must be at least 1, got 0" in error(capsys, "--nproc", 0, "--", "train.py")
    assert "tell it how many to start" in error(capsys, "--nproc", 2, "--", "python", "train.py")
    assert "--units-from takes what shows the units" in error(capsys, "--units-from", "rows", "--", "train.py")
    assert "--budget must be a part" in error(capsys, "--budget", 2, "--", "train.py")
    assert "--allowance must be seconds" in error(capsys, "--allowance", -1, "--", "train.py")
    assert "--every must be a whole number of" in error(capsys, "--every", 0, "--", "train.py")
    for unit in ("tokens", " "):
        said = error(capsys, "--unit", unit, "--", "train.py")
        assert f"--unit must name the independent sample, got {unit!r}" in said
    assert "-m needs the name of a module" in error(capsys, "--", "-m")
    assert "(Not a directory): pass --out" in error(capsys, "--out", "train.py", "--", "train.py")
    assert "--nproc" in error(capsys, "--nprocs", 2, "--", "train.py")
    for number in ("0", "-3", "nan", "inf"):
        assert "must be a number above 0" in error(capsys, f"--units-from={number}", "--", "train.py")
    assert f"the log goes to {tmp_path}/train.py/log, but" in error(capsys, "--out", "train.py/log", "--", "train.py")
    Path("train.py").rename("train")
    assert "sonde run -- python ./train" in error(capsys, "--", "./train")


def test_what_the_command_becomes(tmp_path: Path) -> None:
    assert split_command(["--every", "1", "--", "train.py", "--every", "2", "--", "--help"]) == (
        ["--every", "1"],
        ["train.py", "--every", "2", "--", "--help"],
    )
    script = tmp_path / "train.py"
    script.touch()
    python, torchrun = sys.executable, ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    assert arguments_of([str(script), "--lr", "3"], None) == [python, str(script), "--lr", "3"]
    assert arguments_of(["-m", "package.train", "x"], None) == [python, "-m", "package.train", "x"]
    assert arguments_of([str(script)], 4) == [python, *torchrun, "--nproc-per-node", "4", str(script)]
    assert arguments_of(["-m", "package.train"], 2)[-4:] == ["--nproc-per-node", "2", "-m", "package.train"]
    assert arguments_of([sys.executable, "x"], None) == [sys.executable, "x"]
    assert arguments_of([Path(sys.executable).name], None)[0].endswith(Path(sys.executable).name)


def test_settings_reach_the_script_by_its_environment() -> None:
    options = RunOptions(unit="images", units_from="8", budget=0.02, every=3, out=Path("here"), report=False)
    environment = environment_of(options, ["torchrun", "train.py"], {"PYTHONPATH": "mine", "OTHER": "1"})
    first, *rest = environment.pop("PYTHONPATH").split(os.pathsep)
    assert (Path(first) / "sitecustomize.py").is_file()
    assert (rest, environment["OTHER"]) == (["mine"], "1")
    settings = Settings.of_environment(environment)
    assert settings == Settings(
        ("torchrun", "train.py"),
        str(Path("here").absolute()),
        settings.start,
        os.getpid(),
        "images",
        "8",
        budget=0.02,
        every=3,
        report=False,
    )
    again = Settings.of_environment(environment | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.start == f"{settings.start}, restart 1"
    default = Settings.of_environment(environment_of(RunOptions(), ["torchrun", "a/train.py"], {}))
    assert Path(default.folder).parent == Path("runs").absolute()
    assert Path(default.folder).name.startswith("train-2")


@pytest.mark.parametrize(("text", "units"), [("8", 8.0), ("builtins:dict", {"labels": 3})])
def test_a_trainers_batch_is_counted_as_a_call_of_the_model_is(text: str, units: object) -> None:
    count = units_in_batch(text)
    assert count is not None
    assert count({"labels": 3}) == units  # a function gets the batch by name, as the model does

"""`sonde run` as a command: its options, what it becomes, and real processes of Python, torchrun and chained files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sonde
from sonde.cli import main
from sonde.commands.run import RunOptions, arguments_of, environment_of, split_command
from sonde.commands.run_script.settings import Settings
from tests.commands.scripts import PLAIN
from tests.commands.unmodified import same_weights
from tests.new_process import Python
from tests.read_only import read_only_folder


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
    assert "--every must be a whole number of steps" in error(capsys, "--every", 0, "--", "train.py")
    for unit in ("tokens", " "):
        said = error(capsys, "--unit", unit, "--", "train.py")
        assert f"--unit must name the independent sample, got {unit!r}" in said
        assert ": pass --unit sequences. Times" in said or ": pass sequences, images or prompts" in said
        assert "piece(" not in said
        assert "('" not in said
    assert "-m needs the name of a module" in error(capsys, "--", "-m")
    assert "(Not a directory): pass --out" in error(capsys, "--out", "train.py", "--", "train.py")
    assert "--nproc" in error(capsys, "--nprocs", 2, "--", "train.py")
    for number in ("0", "-3", "nan", "inf"):
        assert "must be a number above 0" in error(capsys, f"--units-from={number}", "--", "train.py")
    assert f"the log goes to {tmp_path}/train.py/log, but" in error(capsys, "--out", "train.py/log", "--", "train.py")
    for flag in ("-E", "-I", "-S", "-uE", "-BI"):
        before = f"python {flag} ignores the environment"
        assert before in error(capsys, "--", "python", "-u", "-W", "ignore", "-Xdev", flag, "train.py")
    Path("train.py").rename("train")
    assert "sonde run -- python ./train" in error(capsys, "--", "./train")


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_script_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with read_only_folder() as folder:
        monkeypatch.chdir(folder)
        for out in ([], ["--out", folder / "log"], ["--out", folder / "train.py"]):
            assert f"no file can be written in {folder}" in error(capsys, *out, "--", "sh", "train.sh")
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "is_told"),
    [
        (["sh", "-c", "echo $PYTHONPATH"], True),
        (["sh", "-c", "echo $PYTHONPATH", "train.py"], False),
        ([sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"], False),
        (["./tool", "-E"], False),  # a script that Python runs, with an option of its own
    ],
)
def test_a_command_that_is_no_python_is_run_and_told_of(command: list[str], is_told: bool, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable} -u\nimport os; print(os.environ['PYTHONPATH'])\n")
    tool.chmod(0o755)
    with Python("-m", "sonde", "run", "--", *command, folder=tmp_path) as process:
        ended = process.wait()
    assert "on_start" in ended.out
    name = command[0]
    told = f"sonde: {name} is no Python program: only what it starts by Python is measured. For a script: sonde run"
    assert (told in ended.err) == is_told


def test_help_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    for option in (
        "--nproc N",
        "--unit NAME",
        "--units-from SOURCE",
        "--weights-from",
        "--budget PART",
        "--out FOLDER",
    ):
        assert option in said
    assert "{None}" not in said


def test_options_of_the_script_are_its_own() -> None:
    assert split_command(["--every", "1", "--", "train.py", "--every", "2", "--", "--help"]) == (
        ["--every", "1"],
        ["train.py", "--every", "2", "--", "--help"],
    )


def test_what_the_command_becomes(tmp_path: Path) -> None:
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


CHAINED = """
import sys
print("chained", "torch" in sys.modules, flush=True)
"""


@pytest.mark.slow
def test_a_real_python_runs_the_script_as_it_was(tmp_path: Path) -> None:
    """The whole way: the command becomes the script, whose own sitecustomize runs too."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CHAINED)
    (tmp_path / "train.py").write_text(
        PLAIN + "print(sys.path[0], [path for path in sys.path if 'on_start' in path], __name__)\nsys.exit(3)\n"
    )
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path[:1], str(Path(sonde.__file__).parents[1])])
    }
    environment["OMP_NUM_THREADS"] = "1"
    bare = subprocess.run(
        [sys.executable, "train.py", "a.pt", "--lr", "3"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    arguments = ["-m", "sonde", "run", "--every", "1", "--", "train.py", "b.pt", "--lr", "3"]
    with Python(*arguments, folder=tmp_path, environment=environment) as process:
        ended = process.wait()
    assert (ended.status, ended.out, bare.returncode) == (3, bare.stdout, 3), ended.err
    assert bare.stdout.startswith("chained False\n")
    assert same_weights(torch.load(tmp_path / "a.pt"), torch.load(tmp_path / "b.pt"))
    assert re.search(r"sonde: B_simple [\d.]+ rows \[", ended.err)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"sonde: report  {folder}/report.html\n" in ended.err
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    run = sonde.read_run(folder)
    assert (run.ended, run.header.metadata["command"]) == ("the script ended", "train.py b.pt --lr 3")


SECOND_INTERRUPT = """
import os, signal, sonde
write = sonde.write_report
def interrupted(folder):
    os.kill(os.getpid(), signal.SIGINT)
    return write(folder)
sonde.write_report = interrupted
"""


@pytest.mark.slow
@pytest.mark.parametrize(("command", "is_pressed_twice"), [(["train.py"], False), (["-m", "train"], True)])
def test_ctrl_c_ends_a_real_python_as_it_did(command: list[str], is_pressed_twice: bool, tmp_path: Path) -> None:
    """By the signal itself, a shell's 130: neither the report at the end nor a second Ctrl-C changes that."""
    interrupt = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    script = PLAIN.replace("sys.argv[1]", "'weights.pt'") + SECOND_INTERRUPT * is_pressed_twice + interrupt
    (tmp_path / "train.py").write_text(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(sonde.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-m", "sonde", "run", "--every", "1", "--", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        # A shell starts tests in the background with interrupts ignored, and processes hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert "KeyboardInterrupt" in ended.stderr
    assert re.search(r"sonde: B_simple [\d.]+ rows \[", ended.stderr)
    assert ("sonde: report" in ended.stderr) != is_pressed_twice

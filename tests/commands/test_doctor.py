"""`sonde doctor` on this machine, and on broken ones."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - of a host's name; the user `nobody` may not be allowed to read it
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import sonde
from sonde.commands.doctor_checks import self_tests as tests_of_sonde
from sonde.commands.doctor_checks.check import Check, checked
from sonde.commands.doctor_checks.environment import OF_EXTRAS, environment_checks
from sonde.commands.doctor_checks.processes import self_tests, started
from sonde.commands.run import arguments_of
from sonde.version import TESTED
from tests.docs_blocks import ROOT
from tests.mutants import Mutant
from tests.oracles import window_by_hand
from tests.read_only import read_only_folder

WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch" else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def machine(folder: Path, site: str = "", **variables: str) -> dict[str, str]:
    """The environment of a Python that runs this first."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(site)
    path = os.pathsep.join([str(folder), str(Path(sonde.__file__).parents[1])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def doctor(environment: Mapping[str, str], folder: Path, *arguments: str) -> tuple[int, dict[str, Check]]:
    """The exit status and the rows by name. Nothing but JSON is printed."""
    command = [sys.executable, "-m", "sonde", "doctor", "--json", *arguments]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, {row["name"]: Check(**row) for row in json.loads(ended.stdout)["checks"]}


def environment(folder: Path) -> dict[str, Check]:
    return {check.name: check for check in environment_checks(folder)}


# The self-tests.


def row(test: Any) -> Check:
    return checked(test.__name__, lambda: tests_of_sonde.row_of(test.__name__, test))


@pytest.mark.parametrize("test", tests_of_sonde.ALONE, ids=lambda test: test.__name__)
def test_each_mechanism_is_sound_here(test: Any) -> None:
    lacks_gpu = test is tests_of_sonde.devices and torch.version.cuda and not torch.cuda.is_available()
    assert row(test).state == ("warning" if lacks_gpu else "ok")


MISTAKES = {
    "micro_batches": (
        "batch_size.taps.window_sums:WindowSums._add_gradient",
        "gradient.terms / weight",
        "1.01 * gradient.terms / weight",
    ),
    "single_examples": ("batch_size.per_example.rules:_by_position", "tensor[:, None]", "1.01 * tensor[:, None]"),
    "norm_and_clip": ("gradient_norm.scaling:_coefficient_at_hand", "else product", "else 0.999 * product"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_a_mechanism_is_noticed(name: str) -> None:
    function, old, new = MISTAKES[name]
    with Mutant(name, f"sonde.{function}", old, new).applied():
        found = row(getattr(tests_of_sonde, name))
    assert found.state == "fails"


def test_the_exact_values_are_those_of_the_oracle() -> None:
    rows = 2 * (tests_of_sonde._X @ tests_of_sonde._WEIGHT - tests_of_sonde._Y)[:, None] * tests_of_sonde._X
    pieces = rows.view(4, 2, 3).mean(1)
    assert tests_of_sonde.exact(4)[:2] == pytest.approx(window_by_hand(pieces, [1.0] * 4, [2.0] * 4, pieces.mean(0)))


def test_a_crash_and_a_hang_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hung,) = self_tests("alone", patience=0.2)
    assert (hung.name, hung.state) == ("self-tests (alone)", "fails")
    assert hung.found.startswith("no answer within 0.2 s")
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", machine(tmp_path)["PYTHONPATH"])
    (aborted,) = self_tests("alone")
    assert aborted.found.startswith("its process ended with status -6")

    def crash() -> Check:
        raise KeyError("x")

    assert checked("any", crash).found == "KeyError: 'x'"


# Broken machines.


@pytest.mark.slow
def test_what_is_broken_is_named_with_what_to_do(tmp_path: Path) -> None:
    """No such interface or GPU, and half of torchrun's variables."""
    broken = machine(tmp_path / "site", GLOO_SOCKET_IFNAME="nope0", RANK="1", CUDA_VISIBLE_DEVICES="99")
    status, rows = doctor(broken, tmp_path)
    assert status == 1
    assert {name for name, each in rows.items() if each.state == "fails"} == {
        *("torchrun", "host", "self-tests (ranks)")
    }
    assert (rows["torchrun"].advice, rows["host"].advice) == (
        "unset RANK, or start by torchrun",
        "set GLOO_SOCKET_IFNAME to one of them, or unset it",
    )
    assert rows["devices"].state == "warning"
    assert "finds no GPU" in rows["devices"].advice
    assert "nope0" in rows["self-tests (ranks)"].found
    assert all(rows[name].state == "ok" for name in ("micro batches", "norm and clip"))
    assert all(each.advice for each in rows.values() if each.state != "ok")
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_without_torch_it_says_what_works(tmp_path: Path) -> None:
    status, rows = doctor(machine(tmp_path / "site", WITHOUT_TORCH), tmp_path)
    assert status == 0
    assert (rows["torch"].state, rows["self-tests"].state, rows["log folder"].state) == ("not there", "not there", "ok")
    assert "sonde report" in rows["torch"].advice


def test_a_folder_that_cannot_be_written_to_and_a_disk_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with read_only_folder() as folder:
        row = environment(folder / "runs")["log folder"]
    assert (row.state, row.advice) == ("fails", "pass --out with a folder that you may write to")
    monkeypatch.setattr("sonde.commands.doctor_checks.environment._ENOUGH_GB", 1e9)
    row = environment(tmp_path)["log folder"]
    assert (row.state, row.advice) == ("warning", "make room, or pass another --out")


def test_a_host_whose_name_does_not_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-node-7.invalid")
    row = environment(tmp_path)["host"]
    assert (row.state, row.advice) == (
        "warning",
        "put gpu-node-7.invalid into /etc/hosts, bring its network up, or set GLOO_SOCKET_IFNAME=lo",
    )


HAS_OWN_NETWORK = shutil.which("unshare") is not None and subprocess.call(["unshare", "-rn", "true"]) == 0


@pytest.mark.skipif(not HAS_OWN_NETWORK, reason="a network of its own is not allowed here")
def test_a_loopback_that_is_down(tmp_path: Path) -> None:
    code = "import sonde.commands.doctor_checks.environment as e; print(e.checked('host', e._host).found)"
    command = ["unshare", "-rn", sys.executable, "-c", code]
    found = subprocess.run(command, env=machine(tmp_path), capture_output=True, text=True, check=True).stdout
    assert found.startswith("no process here can be reached by the name")


def test_packages_outside_their_range_and_extras_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("transformers", "4.9.1"), ("wandb", "0.18"), ("torch", "2.99.0+cu900")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = environment(tmp_path)
    assert [rows[name].state for name in ("transformers", "wandb", "torch")] == ["warning"] * 3
    too_old = "Metadata-Version: 2.1\nName: torch\nVersion: 2.1"
    (tmp_path / "torch-2.99.0+cu900.dist-info" / "METADATA").write_text(too_old)
    assert environment(tmp_path)["torch"].found.startswith("2.1, and sonde's tests ran with")
    assert rows["transformers"].found == "4.9.1, and sonde's tests ran with 5.23 to below 5.24"


def test_every_package_of_an_extra_is_checked_in_the_range_that_the_extra_installs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [Requirement(text) for extra, texts in extras.items() if extra not in ("dev", "docs") for text in texts]
    assert OF_EXTRAS.keys() == {each.name for each in asked}
    for each in asked:
        first, beyond, extra = OF_EXTRAS[each.name]
        assert str(each) in [str(Requirement(text)) for text in extras[extra]]
        if each.name not in TESTED:
            assert each.specifier == SpecifierSet(f">={first},<{beyond}" if beyond else f">={first}")


# What is started is ended.

WITH_CHILDREN = """
import os, pathlib, subprocess, time
child = subprocess.Popen(["sleep", "300"])
for pid in (child.pid, os.getpid()):
    pathlib.Path(f"pid-{pid}").touch()
time.sleep(300)
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_script_its_ranks_and_their_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A try of a script is started by the same function."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(WITH_CHILDREN)
    with contextlib.suppress(KeyboardInterrupt), started(arguments_of(["train.py"], 2)):
        waits_until = time.monotonic() + 120.0
        while len(list(tmp_path.glob("pid-*"))) < 4 and time.monotonic() < waits_until:
            time.sleep(0.1)
        raise KeyboardInterrupt
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert [is_alive(pid) for pid in pids] == [False] * 4


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # of one that has ended, and that nobody has waited for yet, it is Z
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_all_is_well_here(tmp_path: Path) -> None:
    status, rows = doctor(machine(tmp_path / "site"), tmp_path)
    assert (status, {each.state for each in rows.values()} - {"not there", "warning"}) == (0, {"ok"})
    assert [rows[name].state for name in ("DDP", "FSDP2")] == ["ok"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"site"}

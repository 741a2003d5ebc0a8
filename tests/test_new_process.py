"""A Python that is forked ends as a new one would, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.new_process import Python, in_new_process

SCRIPTS = {
    "prints": "import os, sys; print(sys.argv[1:], os.getcwd(), __name__, os.environ['MINE'])",
    "raises": "raise ValueError('of this script')",
    "ends with a status": "import sys; sys.exit(3)",
    "ends with a message": "import sys; sys.exit('told')",
    "runs its exit handlers": "import atexit; atexit.register(print, 'at the end')",
    "is interrupted": "from signal import *; signal(SIGINT, default_int_handler); raise_signal(SIGINT)",
}


@pytest.mark.parametrize("code", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_ends_as_in_a_new_python(tmp_path: Path, code: str) -> None:
    script, mine = tmp_path / "script.py", {"MINE": "7"}
    script.write_text(code)
    command = [sys.executable, "-S", str(script), "a"]
    new = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | mine)
    with Python(str(script), "a", folder=tmp_path, environment=mine) as python:
        forked = python.wait()
    assert forked.out == new.stdout
    assert forked.err.splitlines()[-1:] == new.stderr.splitlines()[-1:]
    # An interrupted Python kills itself by the signal in the end, so that a shell can tell.
    assert forked.status == (1 if "SIGINT" in code else new.returncode)


def test_code_of_the_command_line_runs(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv, os.getcwd(), __name__); time = 3; print(len((lambda: time * 'x')()))"
    command = [sys.executable, "-S", "-c", code, "a"]
    new = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    with Python(*command[2:], folder=tmp_path) as python:
        ended = python.wait()
        assert python.out() == ended.out == new.stdout
    assert ended.status == 0


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_python_that_takes_too_long_ends_with_all_its_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import subprocess\nsubprocess.run(['sleep', '600'])")
    with Python(str(script), folder=tmp_path) as python:
        wait_until(lambda: "sleep" in names_of_session(python.pid))
        with pytest.raises(AssertionError, match=r"did not end within 0\.1 s"):
            python.wait(0.1)
    wait_until(lambda: "sleep" not in names_of_session(python.pid))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def names_of_session(session: int) -> set[str]:
    """The names of a session's processes, from lines like `7 (sleep) S 1 7 7 …`."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a process that has ended meanwhile
            before, _, after = path.read_text().rpartition(")")
            if int(after.split()[3]) == session:
                found.add(before.partition("(")[2])
    return found


def test_an_error_in_a_function_is_raised_here() -> None:
    assert in_new_process(os.path.basename, "/a/b") == "b"
    assert in_new_process(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        in_new_process(divmod, 1, 0)

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from sonde.demos.byte_lm.interrupt import INTERRUPTED, interrupts_left_to_ranks
from tests.new_process import Ended, Python

PRINTS_WHETHER_BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"


def test_ctrl_c_is_blocked_in_new_processes_and_ignored_by_the_launcher() -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with interrupts_left_to_ranks():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as torch's launcher does
        command = [sys.executable, "-c", PRINTS_WHETHER_BLOCKED]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        os.kill(os.getpid(), signal.SIGINT)
    assert process.stdout.strip() == "True"
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_second_ctrl_c_ends_a_rank_at_once(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from sonde.demos.byte_lm.interrupt import StopRequest\n"
        "stop = StopRequest()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('goes on', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('never printed')\n"
    )
    with Python("-c", code, folder=tmp_path) as python:
        assert python.wait() == Ended(INTERRUPTED, "goes on\n", "")

from __future__ import annotations

import os
import signal
import subprocess
import sys

from sonde.demos.byte_lm.interrupt import INTERRUPTED, interrupts_left_to_ranks

BORN_INSIDE = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"


def test_processes_are_born_with_ctrl_c_held_back_and_the_launcher_ignores_it() -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with interrupts_left_to_ranks():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as torch's launcher takes it
        born = subprocess.run([sys.executable, "-c", BORN_INSIDE], capture_output=True, text=True, check=True)
        os.kill(os.getpid(), signal.SIGINT)
    assert born.stdout.strip() == "True"
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_second_ctrl_c_ends_a_rank_at_once() -> None:
    code = (
        "import os, signal\n"
        "from sonde.demos.byte_lm.interrupt import StopRequest\n"
        "stop = StopRequest()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('goes on', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('never said')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, "goes on\n", "")

"""`python -m tests.commands.as_run script.py …`: a process as `sonde run` starts it, but without a new Python.

Python would import `sitecustomize` before anything else. Here torch is imported already.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from sonde.commands import run


def main() -> None:
    """Do what Python does at its start, then run the script."""
    on_start = Path(run.__file__).parent / "run_script" / "on_start" / "sitecustomize.py"
    runpy.run_path(str(on_start), run_name="sitecustomize")
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

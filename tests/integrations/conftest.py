"""Files that pytest would import for their docstrings' examples."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torchtitan") else ["titan_trainer.py"]

"""A folder that nobody may write to, also where the tests run as root."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def read_only_folder(mode: int = 0o555) -> Iterator[Path]:
    """The folder with this mode. Meanwhile, root is the user `nobody`: permissions do not bind root."""
    is_root = os.name == "posix" and os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(dir="/tmp" if is_root else None))
    (folder / "read-only").mkdir()
    folder.chmod(0o755)
    (folder / "read-only").chmod(mode)
    if is_root:
        import torch._dynamo  # noqa: F401 - attach imports it, and `nobody` may not be allowed to read its files

        os.seteuid(_NOBODY)
    try:
        yield folder / "read-only"
    finally:
        if is_root:
            os.seteuid(0)
        (folder / "read-only").rmdir()
        folder.rmdir()

"""The file of a log: a single process appends to it at a time, and the children of that process never do."""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
import weakref
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]

SECONDS_TO_WAIT = 3.0
"""How long to wait for another writer: a process may still be ending when its successor starts."""

_CANNOT_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of file systems without locks."""

logger = logging.getLogger("sonde")

_open_files: weakref.WeakSet[LockedFile] = weakref.WeakSet()


class LockedFile:
    """A file that is locked and appended to.

    The operating system holds the lock and releases it when the process ends, also after a crash: so a restart can go
    on. Nothing is buffered: lines that were written survive the process.

    Args:
        path: of the file; it and its folder are made if they do not exist.
        patience: seconds to wait for another writer; None for `SECONDS_TO_WAIT`.

    Raises:
        ValueError: when another process, or this one, has the file open for writing.
        OSError: when the file cannot be made.
    """

    def __init__(self, path: Path, *, patience: float | None = None) -> None:
        self._path, self._absolute = path, path.absolute()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO | None = path.open("ab", buffering=0)
        except OSError as error:
            why = f"the log cannot be written ({error.strerror}): log to a folder that you may write to, not to"
            raise OSError(error.errno, why, str(path.parent)) from None
        try:
            self._lock(self._file, SECONDS_TO_WAIT if patience is None else patience)
        except BaseException:
            self._file.close()
            raise
        _let_go_in_children()
        _open_files.add(self)
        if _last_line_is_torn(path):
            self.append(b"\n")

    def append(self, lines: bytes) -> None:
        """Hand whole lines to the operating system before returning. After a fork, a child appends nothing.

        Raises:
            OSError: when they do not all fit on the disk, or when nobody could read them there: the file was removed,
                or another file has taken its place.
        """
        if self._file is not None and self._is_gone(self._file):
            message = "the log was removed, or another file has taken its place, while the run wrote to it"
            raise FileNotFoundError(errno.ENOENT, message, str(self._path))
        rest = memoryview(lines)
        try:
            while rest and self._file is not None:  # a disk that is almost full takes a part, and refuses the rest
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file, which unlocks it. A second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_gone(self, file: BinaryIO) -> bool:
        """Whether no path leads to the file any more, or its path leads to another one. A file may be moved."""
        own = os.fstat(file.fileno())
        if own.st_nlink == 0:
            return True
        try:
            return not os.path.samestat(own, self._absolute.stat())
        except OSError:
            return False

    def _lock(self, file: BinaryIO, patience: float) -> None:
        if fcntl is None:
            self._warn("this system has no locks for files")
            return
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
            except OSError as error:
                if error.errno not in _CANNOT_LOCK:
                    raise
                self._warn("its disk has no locks")
                return
            raise ValueError(
                f"{self._path} is open in another run, or in a probe of this process that was not closed, and two "
                "writers would mix their records: log to another folder, or close the other run first"
            )

    def _warn(self, why: str) -> None:
        logger.warning("sonde: %s is not locked, as %s: two runs in one folder go unnoticed", self._path, why)


@functools.cache
def _let_go_in_children() -> None:
    """Close the files in each child that this process forks, once for all files.

    A child must not write to its parent's log. Nor may it hold the lock: a data loader's worker can outlive a trainer
    that was killed, and would keep the restarted run out.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for file in list(_open_files):
        file.close()


def _last_line_is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"

"""The log of a run: one JSON object per line, each on disk at once: a crash costs at most the last line.

A single process appends to it at a time, and the children of that process never do.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, ClassVar

from sonde.log.lines import encode_line, lines_of, parse_record
from sonde.record_values import SCHEMA

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]

RECORDS_NAME = "records.jsonl"
"""Name of the log in a run's folder."""
TRIAL = "SONDE_TRIAL"
"""Environment variable of a script that `sonde advise --try` has started: the file for the times of its steps."""
BRANCH_FOLDER, BRANCH_LOSS = "SONDE_BRANCH", "SONDE_BRANCH_LOSS"
"""Environment variables of a script that `sonde branch` has started: the branch's folder, and the name of its loss."""
SECONDS_TO_WAIT = 3.0
"""How long to wait for another writer: a process may still be ending when its successor starts."""

_ADVICE = "nothing was written; log to another folder"
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


class JsonlSink:
    """Appends records to `folder/records.jsonl`, creating both; a restarted run appends to the same file.

    Nothing in the file is ever changed. If a crash left its last line torn, that line is ended before anything else is
    written, so the torn rest cannot merge with a new record. Files are touched with the first record, so every rank may
    make a sink: a run's log writes on rank 0 only. From then on the file is locked until `close`, or until the process
    ends.

    Args:
        folder: the run's folder.

    Raises:
        ValueError: when the folder is a file, or its log does not begin like a run's log of this version.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> sink = JsonlSink(folder)
        >>> sink.write({"kind": "header", "schema": 3, "writes": "reading", "unit": "sequences"})
        >>> sink.close()
        >>> (Path(folder) / "records.jsonl").read_text()
        '{"kind":"header","schema":3,"writes":"reading","unit":"sequences"}\\n'
    """

    must_begin: ClassVar[bool] = True
    """A run without its log, or in the log of another, is an error of the user's that is seen before training."""

    def __init__(self, folder: str | Path) -> None:
        folder = in_branch(Path(folder))
        self.path = folder / RECORDS_NAME
        _check_folder(folder)
        _check_beginning(self.path)
        self._file: LockedFile | None = None
        self._has_begun = self._closed = False

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record and hand it to the operating system before returning.

        Args:
            record: JSON values under string keys; the first record must be a header. Unknown numbers are None.

        Raises:
            ValueError: when a value is not JSON, NaN and infinity included; when another process writes to
                the log.
            RuntimeError: after `close`, or when the first record is not a header.
            OSError: when the disk is full, or the folder cannot be written to.
        """
        if self._closed:
            raise RuntimeError(f"the log {self.path} is closed, got a {record['kind']!r} record: open a new JsonlSink")
        if record["kind"] != "header" and not self._has_begun:
            raise RuntimeError(f"a run starts with its header, got a {record['kind']!r} record: write the header first")
        line = encode_line(record)
        if self._file is None:
            self.lock()
        assert self._file is not None
        self._file.append(line)  # killed here or later, the lines before stay whole
        self._has_begun = True

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._closed = True
        self.unlock()

    def lock(self, *, patience: float | None = None) -> None:
        """Let no other process write to the log. The first record does this too.

        Args:
            patience: seconds to wait for a process that writes to it; None for `SECONDS_TO_WAIT`.

        Raises:
            ValueError: when another process writes to the log.
        """
        self._file = LockedFile(self.path, patience=patience)

    def unlock(self) -> None:
        """Let another process write to the log. The next record locks it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def in_branch(folder: Path) -> Path:
    """Where a log lies: a branch has its own, whatever the script calls it, since several branches run the same script.

    Args:
        folder: as the script gives it.
    """
    branch = os.environ.get(BRANCH_FOLDER)
    if not branch or folder.absolute().is_relative_to(branch):
        return folder
    return Path(branch) / "log" / folder.name


def _check_folder(folder: Path) -> None:
    """Refuse a folder that is a file, or lies in one."""
    # os.path answers also where a folder may not be looked into, which its own error says later.
    existing = next((path for path in (folder, *folder.parents) if os.path.exists(path)), None)
    if existing is not None and not existing.is_dir():
        raise ValueError(f"a run is logged to a folder, got {folder}, and {existing} is a file: give another folder")
    if os.path.isdir(folder / RECORDS_NAME):
        raise ValueError(f"a run is logged to a file, but {folder / RECORDS_NAME} is a folder: give another folder")


def _check_beginning(path: Path) -> None:
    """Refuse a file that does not begin like a run's log, or is of another version; its first line is read.

    A log holds several runs, but no sonde could read starts of two versions.
    """
    if not os.path.exists(path) or path.stat().st_size == 0:
        return
    header = parse_record(next(lines_of(path, advice=_ADVICE))) or {}
    if header.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(
            f"{path} begins with a header of record schema {header['schema']!r}, expected {SCHEMA}; no sonde could "
            f"read both that start and this one: {_ADVICE}"
        )

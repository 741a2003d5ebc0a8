"""Versions of trainers that the tests ran with."""

from __future__ import annotations

from sonde.records import logger

TESTED_TRL = ("1.16", "1.17")
"""The first version of TRL that the tests ran with, and the first one above it that they did not."""


def warn_if_untested(
    package: str,
    version: str,
    tested: tuple[str, str],
    check: str = "compare the pieces and units per window that sonde prints with your own",
) -> None:
    """Log a warning for a version outside the tested range, since a trainer's hooks may have moved.

    Args:
        package: its name.
        version: installed.
        tested: the first version that the tests ran with, and the first one above it that they did not.
        check: how one sees that all is well.
    """
    from packaging.version import Version  # comes with the trainers' packages, whose absence has a message of its own

    first, beyond = tested
    if not Version(first).release <= Version(version).release < Version(beyond).release:
        logger.warning(
            "sonde: %s %s is not a version that sonde was tested with, which are those from %s to below %s: %s",
            package,
            version,
            first,
            beyond,
            check,
        )

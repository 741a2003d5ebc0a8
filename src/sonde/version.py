"""The version and the name of the distribution, and the versions of other packages that the tests ran with.

On their own, so that the build and `sonde doctor` read them without importing torch.
"""

import re

__version__ = "0.1.0"
DISTRIBUTION = "gradsonde"
"""What pip installs. On the package index, `sonde` is another project."""
TESTED = {
    "Python": ("3.11", "3.14"),
    "torch": ("2.9", "2.16"),
    "transformers": ("5.23", "5.24"),
    "trl": ("1.16", "1.17"),
    "lightning": ("2.6.6", "2.7"),
    "accelerate": ("1.15", "1.16"),
    "torchtitan": ("0.3", "0.4"),
}
"""The first version that the tests ran with, and the first one above it that they did not."""


def is_within(version: str, first: str, beyond: str) -> bool:
    """Whether a version is the first one or later, and below the one beyond; "" for no such limit.

    Example:
        >>> is_within("2.6.10", "2.6.6", "2.7")
        True
    """
    return _numbers(first) <= _numbers(version) and (not beyond or _numbers(version) < _numbers(beyond))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def install_hint(extra: str) -> str:
    """The command that installs an optional part of sonde, also beside a sonde that came from a checkout.

    Args:
        extra: one of those in pyproject.toml.

    Example:
        >>> install_hint("report")
        "pip install 'gradsonde[report]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"

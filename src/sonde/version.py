"""The version and the name of the distribution, on their own so that the build reads them without importing torch."""

__version__ = "0.1.0"
DISTRIBUTION = "gradsonde"
"""What pip installs. On the package index, `sonde` is another project."""


def install_hint(extra: str) -> str:
    """The command that installs an optional part of sonde, also beside a sonde that came from a checkout.

    Args:
        extra: one of those in pyproject.toml.

    Example:
        >>> install_hint("report")
        "pip install 'gradsonde[report]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"

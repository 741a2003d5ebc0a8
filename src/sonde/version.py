"""The version of sonde, on its own so that the build reads it without importing torch."""

__version__ = "0.1.0"

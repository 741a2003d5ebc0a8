"""What `sonde run` does inside the script that it measures."""

NAMES_MODELS = "SONDE_NAMES_MODELS"
"""Environment variable of a script whose measured models are named on stderr, as `sonde doctor` wants it."""

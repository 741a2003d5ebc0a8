"""What `sonde run` does inside the script that it measures."""

NOT_MEASURED = "not measured"
"""Is in each sentence that says why a model of the script is not measured."""
